"""The forward pass on a CPU: a step through all layers is one call into the compiled library, or plain torch.

The library handles fp32 and bf16 with keys and values in the model's dtype, and computes the same as `LayerLoop` over
`TorchOps`, up to rounding. If it cannot be built or does not support the configuration, a warning is logged and the
engine runs on plain torch, several times slower. The module does not know requests.

Shape suffixes: T rows of the step, R rows, D hidden, E tiles, N blocks of all tiles.
"""

import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from models.decoder.window import Window
from services.llm.engine.config import EngineConfig, WeightKind
from services.llm.engine.cpu.compiler import BuildFailedError, built_library
from services.llm.engine.cpu.library import AdapterRowsStruct, Library, StepStruct
from services.llm.engine.cpu.packing import PackedModel, pack_slots, use_huge_pages
from services.llm.engine.forward.adapters import AdapterRows, AdapterSlots
from services.llm.engine.forward.layers import Forward, LayerLoop, StepInputs
from services.llm.engine.forward.ops import TorchOps
from services.llm.engine.forward.tiles import Tile, cut_tiles
from services.llm.engine.forward.torch_attention import TorchAttention
from services.llm.engine.forward.weights import DecoderWeights
from services.llm.engine.kv.cache import KvCache
from services.llm.engine.plan import StepPlan

_log = logging.getLogger(__name__)
_DTYPES = (torch.float32, torch.bfloat16)
_TILE_QUERIES = 64
"""Rows of a tile: enough to reuse each page that is read, few enough to skip most of the causally masked positions."""
_NO_WINDOW = -(2**30)
"""Window start of a tile without a window: before every position."""


def cpu_forward(
    weights: DecoderWeights, cache: KvCache, config: EngineConfig, reduce: Callable[[Tensor], Tensor] | None = None
) -> Forward:
    """Return the fastest forward pass that this machine supports. Never raises.

    With `reduce` the weights are one rank's shard, which plain torch computes.
    """
    if reduce is not None:
        return LayerLoop(weights, cache, TorchOps(), _torch_attention(weights, config), reduce)
    reason = _why_not_compiled(weights.head_VD.dtype, config)
    if reason is None:
        try:
            return CpuForward(_load_library(config.kernel_cache), weights, cache, config.weight_kind)
        except (BuildFailedError, OSError) as error:
            reason = str(error)
    if config.cpu_kernels == "compiled":
        _log.warning("the engine runs on plain torch, several times slower: %s", reason)
    return LayerLoop(weights, cache, TorchOps(), _torch_attention(weights, config))


def _torch_attention(weights: DecoderWeights, config: EngineConfig) -> TorchAttention:
    return TorchAttention(
        config.tile_queries, config.tile_tokens, config.block_tokens, weights.head_VD.device, weights.config.window
    )


def compute_dtype(dtype: torch.dtype, config: EngineConfig) -> torch.dtype:
    """Return the dtype of a decoder's computation on this CPU.

    This is fp32 if plain torch would otherwise compute bf16 without bf16 instructions, which is three to eighty times
    slower than fp32, depending on the size of the matrices; the compiled kernels are little slower.
    """
    has_bf16: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if dtype is not torch.bfloat16 or has_bf16 or config.cpu_kernels == "torch" or _is_compiled(dtype, config):
        return dtype
    _log.warning("weights in bfloat16 are computed in float32: this processor has no bf16 instructions")
    return torch.float32


def _is_compiled(dtype: torch.dtype, config: EngineConfig) -> bool:
    try:
        return _why_not_compiled(dtype, config) is None and _load_library(config.kernel_cache) is not None
    except (BuildFailedError, OSError):
        return False


def _why_not_compiled(dtype: torch.dtype, config: EngineConfig) -> str | None:
    if config.cpu_kernels == "torch":
        return "so configured"
    if dtype not in _DTYPES:
        return f"weights in {dtype}"
    return None if config.kv_kind == "model" else f"keys and values in {config.kv_kind}"


def _load_library(cache: Path) -> Library:
    """Load the library. A cached file that no longer loads is rebuilt, otherwise every start would run on torch."""
    path = built_library(cache)
    try:
        return Library(path)
    except OSError:
        if path.parent != cache:
            raise
        path.unlink(missing_ok=True)
        return Library(built_library(cache))


class CpuForward:
    """The compiled forward pass of one decoder over its KV cache."""

    def __init__(self, library: Library, weights: DecoderWeights, cache: KvCache, weight_kind: WeightKind) -> None:
        config = weights.config
        self._library = library
        self._config = config
        self._cache = cache
        self._dtype = weights.head_VD.dtype
        self._model = PackedModel(library, weights, weight_kind)
        use_huge_pages(self._model.tensors)
        self.use_adapters(None)
        self._is_windowed = np.array(
            [config.window_of(layer) is not None for layer in range(config.num_hidden_layers)], dtype=np.uint8
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights and their scales, as they stay in memory."""
        return self._model.num_bytes

    def use_adapters(self, slots: AdapterSlots | None) -> None:
        """Read the adapters of later steps from these slots; None if no step has any."""
        self._slots, self._packed_slots = slots, None if slots is None else pack_slots(slots)

    def prepare(self, plan: StepPlan) -> "TileTable":
        """Return the pages that each row of a step sees."""
        return tile_table(plan, self._cache.block_tokens, self._config.window)

    def hidden(self, step: StepInputs) -> Tensor:
        """Embed, run all layers, norm. Returns (R, D) of the output rows."""
        tiles: TileTable = step.pages
        outputs_R = step.output_rows_R
        num_outputs = len(step.tokens_T) if outputs_R is None else len(outputs_R)
        hidden_RD = torch.empty(num_outputs, self._config.hidden_size, dtype=self._dtype)
        keys, values = self._cache.slots(0).keys, self._cache.slots(0).values
        struct = StepStruct(
            rows=len(step.tokens_T),
            paged_rows=len(step.slot_mapping_P),
            num_tiles=len(tiles.full_E),
            tokens=step.tokens_T.data_ptr(),
            positions=step.positions_T.data_ptr(),
            slot_mapping=step.slot_mapping_P.data_ptr(),
            block_table=tiles.block_table_N.ctypes.data,
            tiles=tiles.full_E.ctypes.data,
            windowed_tiles=None if tiles.windowed_E is None else tiles.windowed_E.ctypes.data,
            is_windowed=self._is_windowed.ctypes.data,
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            layer_slots=len(keys),
            block_tokens=self._cache.block_tokens,
            num_outputs=num_outputs,
            output_rows=None if outputs_R is None else outputs_R.data_ptr(),
            hidden=hidden_RD.data_ptr(),
        )
        if step.adapters is not None:
            assert self._slots is not None, "a step with adapters follows `use_adapters`"
            struct.adapter_rows = _adapter_rows(step.adapters.every)
            struct.output_adapter_rows = _adapter_rows(step.adapters.outputs)
            struct.slot_rank, struct.slot_ranks = self._slots.rank, self._slots.ranks.ctypes.data
            struct.adapters = ctypes.addressof(self._packed_slots)  # type: ignore[arg-type]
        if step.tails is not None:
            struct.tail_keys = step.tails.keys_YBLGK.data_ptr()
            struct.tail_values = step.tails.values_YBLGK.data_ptr()
            struct.tail_places = step.tails.place_B.data_ptr()
            struct.tail_seen = step.tails.seen_BL.data_ptr()
            struct.num_tail_places = step.tails.keys_YBLGK.shape[2]
        self._library.forward(self._model.struct, struct)
        return hidden_RD

    def logits(self, hidden_RD: Tensor, first: int, last: int) -> Tensor:
        """Multiply by these rows of the output matrix."""
        rows_RD = hidden_RD.reshape(-1, hidden_RD.shape[-1]).contiguous()
        logits_RN = self._library.score_rows(rows_RD, self._model.head, first, last)
        return logits_RN.view(*hidden_RD.shape[:-1], last - first)


def _adapter_rows(rows: AdapterRows) -> AdapterRowsStruct:
    return AdapterRowsStruct(len(rows.segments), rows.segments.ctypes.data, rows.slot_T.data_ptr())


@dataclass(frozen=True, slots=True, eq=False)
class TileTable:
    """Tiles (E, 10) int64 as declared in `paged_context.h`, for full and windowed layers, over a flat block table."""

    full_E: np.ndarray
    windowed_E: np.ndarray | None
    block_table_N: np.ndarray


def tile_table(plan: StepPlan, block_tokens: int, window: Window | None) -> TileTable:
    """Cut a step into tiles, most work first, so that threads finish at about the same time."""
    full = cut_tiles(plan, _TILE_QUERIES, block_tokens)
    windowed = [] if window is None else cut_tiles(plan, _TILE_QUERIES, block_tokens, window)
    full.sort(key=lambda tile: tile.num_rows * tile.context_len, reverse=True)
    tiles = (*full, *windowed)
    block_table_N = np.array([block for tile in tiles for block in tile.block_ids], dtype=np.int64)
    starts = np.cumsum([0, *(len(tile.block_ids) for tile in tiles)])[:-1].tolist()
    rows = np.array([_tile_row(tile, start) for tile, start in zip(tiles, starts, strict=True)], dtype=np.int64)
    return TileTable(rows[: len(full)], rows[len(full) :] if windowed else None, block_table_N)


def _tile_row(tile: Tile, first_block: int) -> tuple[int, ...]:
    return (
        tile.first_row,
        tile.num_rows,
        tile.first_limit,
        tile.limit_step,
        first_block,
        len(tile.block_ids),
        _NO_WINDOW if tile.window_start is None else tile.window_start,
        tile.num_sinks,
        tile.num_sink_blocks,
        tile.num_skipped,
    )
