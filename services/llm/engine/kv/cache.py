"""The KV cache: memory of the block pool's blocks, keys and values of all layers. It does not know requests or hashes.

Numbers are stored in the model's dtype, or in one byte each with a scale per token and head: int8, or fp8 (e4m3;
Micikevicius et al. 2022). Reads return plain numbers.

Shape suffixes: T tokens, E contexts, N blocks, C = N * block tokens, G key/value heads, K head size.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from models.decoder.config import DecoderConfig
from services.llm.engine.config import KvKind


@dataclass(frozen=True, slots=True, eq=False)
class Slots:
    """One layer's memory for kernels: (slots, G, K) numbers, and scales (slots, G, 1) if they are quantised."""

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None
    value_scales: Tensor | None


class SlotStore(Protocol):
    """The slots of all layers, for keys or for values."""

    def raw(self, layer: int) -> tuple[Tensor, Tensor | None]:
        """Return one layer's slots as stored, and their scales if they are quantised."""
        ...

    @property
    def bytes_per_token(self) -> int:
        """Bytes per token in all layers."""
        ...

    def write(self, layer: int, slots_T: Tensor, x_TGK: Tensor) -> None:
        """Store tokens in their slots (block * block tokens + offset)."""
        ...

    def read(self, layer: int, blocks_EN: Tensor) -> Tensor:
        """Gather blocks as plain numbers (E, C, G, K)."""
        ...


class KvCache:
    """Keys and values, one slot for each token of each block in each layer."""

    def __init__(
        self,
        config: DecoderConfig,
        num_blocks: int,
        block_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        kind: KvKind = "model",
    ) -> None:
        shape = (config.num_hidden_layers, num_blocks, block_tokens, config.num_key_value_heads, config.head_dim)
        self.block_tokens = block_tokens
        self.num_kv_heads = config.num_key_value_heads
        self._keys = _make_store(kind, shape, dtype, device)
        self._values = _make_store(kind, shape, dtype, device)
        self._slots = [_slots(self._keys, self._values, layer) for layer in range(config.num_hidden_layers)]

    @property
    def bytes_per_token(self) -> int:
        return self._keys.bytes_per_token + self._values.bytes_per_token

    def write(self, layer: int, slots_T: Tensor, k_TGK: Tensor, v_TGK: Tensor) -> None:
        """Store tokens in their slots (block * block tokens + offset)."""
        self._keys.write(layer, slots_T, k_TGK)
        self._values.write(layer, slots_T, v_TGK)

    def read(self, layer: int, blocks_EN: Tensor) -> tuple[Tensor, Tensor]:
        """Gather the blocks of several contexts: (E, N) block ids -> keys and values (E, C, G, K)."""
        return self._keys.read(layer, blocks_EN), self._values.read(layer, blocks_EN)

    def slots(self, layer: int) -> Slots:
        """Return one layer's memory, for kernels that gather directly."""
        return self._slots[layer]


class _PlainStore:
    """Numbers in the model's dtype."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._slots = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def bytes_per_token(self) -> int:
        return _bytes_per_token(self._slots)

    def write(self, layer: int, slots_T: Tensor, x_TGK: Tensor) -> None:
        self._slots[layer].flatten(0, 1).index_copy_(0, slots_T, x_TGK)

    def read(self, layer: int, blocks_EN: Tensor) -> Tensor:
        return self._slots[layer][blocks_EN].flatten(1, 2)

    def raw(self, layer: int) -> tuple[Tensor, Tensor | None]:
        return self._slots[layer].flatten(0, 1), None


@dataclass(frozen=True, slots=True)
class _Code:
    """Quantisation of a number in -1 to 1 to a dtype with largest magnitude `peak`, rounded for an integer dtype."""

    dtype: torch.dtype
    peak: float
    rounds: bool


_CODES = {"int8": _Code(torch.int8, 127.0, rounds=True), "fp8": _Code(torch.float8_e4m3fn, 448.0, rounds=False)}


class _ScaledStore:
    """One byte per number, with an fp32 scale per token and head. Stored as uint8, which every device can index."""

    def __init__(self, shape: tuple[int, ...], code: _Code, device: torch.device) -> None:
        self._code = code
        self._slots = torch.zeros(shape, dtype=torch.uint8, device=device)
        self._scales = torch.zeros((*shape[:-1], 1), dtype=torch.float32, device=device)

    @property
    def bytes_per_token(self) -> int:
        return _bytes_per_token(self._slots) + _bytes_per_token(self._scales)

    def write(self, layer: int, slots_T: Tensor, x_TGK: Tensor) -> None:
        scale_TG1 = x_TGK.float().abs().amax(-1, keepdim=True) / self._code.peak
        coded_TGK = x_TGK.float() / scale_TG1.clamp_min(torch.finfo(torch.float32).tiny)
        if self._code.rounds:
            coded_TGK = coded_TGK.round()
        byte_TGK = coded_TGK.to(self._code.dtype).view(torch.uint8)
        self._slots[layer].flatten(0, 1).index_copy_(0, slots_T, byte_TGK)
        self._scales[layer].flatten(0, 1).index_copy_(0, slots_T, scale_TG1)

    def read(self, layer: int, blocks_EN: Tensor) -> Tensor:
        coded = self._slots[layer][blocks_EN].view(self._code.dtype).float()
        return coded.mul_(self._scales[layer][blocks_EN]).flatten(1, 2)

    def raw(self, layer: int) -> tuple[Tensor, Tensor | None]:
        return self._slots[layer].view(self._code.dtype).flatten(0, 1), self._scales[layer].flatten(0, 1)


def _slots(keys: SlotStore, values: SlotStore, layer: int) -> Slots:
    (key_numbers, key_scales), (value_numbers, value_scales) = keys.raw(layer), values.raw(layer)
    return Slots(key_numbers, value_numbers, key_scales, value_scales)


def _make_store(kind: KvKind, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> SlotStore:
    return _PlainStore(shape, dtype, device) if kind == "model" else _ScaledStore(shape, _CODES[kind], device)


def _bytes_per_token(slots: Tensor) -> int:
    return slots[:, 0, 0].numel() * slots.element_size()
