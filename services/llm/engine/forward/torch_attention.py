"""Attention over paged contexts in plain torch: the reference for faster kernels.

Tiles of query rows are processed with an online softmax over tiles of the context, so no score matrix is larger than
one tile of queries by one tile of context. The H query heads share the G key/value heads in groups of M = H / G.

Shape suffixes: T rows of the step, E tiles of a group, Q rows of a tile, C context positions of a tile, N blocks, B
beams, L positions of a tail, H query heads, G key/value heads, M = H / G, X = Q * M, K head size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from models.decoder.window import Window
from services.llm.engine.beam.tails import Tails
from services.llm.engine.forward.attention import TileBatch, UniformBatch
from services.llm.engine.forward.tiles import TileGroup, cut_tiles, group_tiles, recorded_group, uniform_group
from services.llm.engine.kv.cache import KvCache
from services.llm.engine.plan import StepPlan

_LOWEST_PEAK = -1e30
"""Replaces -inf as the maximum over no keys, because -inf minus -inf is NaN."""


@dataclass(frozen=True, slots=True, eq=False)
class TileLayout:
    """A step's tiles, for layers with full attention and for layers with a sliding window."""

    full: list[TileGroup]
    windowed: list[TileGroup]


class TorchAttention:
    """Implements `PagedAttention` on any device."""

    def __init__(
        self,
        tile_queries: int,
        tile_tokens: int,
        block_tokens: int,
        device: torch.device,
        window: Window | None = None,
    ) -> None:
        self._tile_queries = tile_queries
        self._tile_tokens = tile_tokens
        self._block_tokens = block_tokens
        self._device = device
        self._window = window

    def prepare(self, plan: StepPlan) -> TileLayout:
        """Cut a step into tiles and group tiles of similar size."""
        return TileLayout(self._groups(plan, None), [] if self._window is None else self._groups(plan, self._window))

    def prepare_uniform(self, batch: UniformBatch) -> TileLayout:
        """Return one group, padded to the longest context."""
        full = uniform_group(batch, self._block_tokens)
        windowed = [] if self._window is None else [uniform_group(batch, self._block_tokens, self._window)]
        return TileLayout([full], windowed)

    @property
    def max_tile_rows(self) -> int:
        return self._tile_queries

    def prepare_tiles(self, batch: TileBatch) -> TileLayout:
        """Return one group, padded to the longest context."""
        full = recorded_group(batch, self._block_tokens)
        windowed = [] if self._window is None else [recorded_group(batch, self._block_tokens, self._window)]
        return TileLayout([full], windowed)

    def attend(self, q_THK: Tensor, cache: KvCache, layer: int, prepared: TileLayout, tails: Tails | None) -> Tensor:
        """Attend each row over its own context, and beams over their tails as well."""
        is_windowed = self._window is not None and layer in self._window.layers
        groups = prepared.windowed if is_windowed else prepared.full
        out_THK, lse_TH = paged_attention(q_THK, cache, layer, groups, self._tile_tokens)
        if tails is not None:
            first = len(q_THK) - len(tails.place_B)
            tail = tail_attention(q_THK[first:], tails.keys_YBLGK[layer], tails.values_YBLGK[layer], tails.seen_BL)
            out_THK[first:] = merge_states(out_THK[first:], lse_TH[first:], *tail)
        return out_THK

    def _groups(self, plan: StepPlan, window: Window | None) -> list[TileGroup]:
        return group_tiles(cut_tiles(plan, self._tile_queries, self._block_tokens, window), self._device)


def paged_attention(
    q_THK: Tensor, cache: KvCache, layer: int, groups: list[TileGroup], tile_tokens: int
) -> tuple[Tensor, Tensor]:
    """Attend each row over its own context.

    Returns the output (T, H, K) and the log-sum-exp of the scores (T, H) fp32.
    """
    out_THK = torch.empty_like(q_THK)
    lse_TH = torch.empty(q_THK.shape[:2], dtype=torch.float32, device=q_THK.device)
    for group in groups:
        rows = group.rows_EQ.flatten()
        out_EQHK, lse_EQH = _attend_group(q_THK[group.rows_EQ], cache, layer, group, tile_tokens)
        out_THK.index_copy_(0, rows, out_EQHK.flatten(0, 1).to(out_THK.dtype))
        lse_TH.index_copy_(0, rows, lse_EQH.flatten(0, 1))
    return out_THK, lse_TH


def tail_attention(q_BHK: Tensor, k_BLGK: Tensor, v_BLGK: Tensor, seen_BL: Tensor) -> tuple[Tensor, Tensor]:
    """Attend each beam over its own tail. Returns the output (B, H, K) and its log-sum-exp (B, H), both fp32."""
    num_kv_heads = k_BLGK.shape[2]
    q_BGMK = q_BHK.float().view(len(q_BHK), num_kv_heads, -1, q_BHK.shape[-1]) * q_BHK.shape[-1] ** -0.5
    score_BGML = q_BGMK @ k_BLGK.float().permute(0, 2, 3, 1)
    score_BGML.masked_fill_(~seen_BL[:, None, None, :], -torch.inf)
    lse_BGM = score_BGML.logsumexp(-1)
    out_BGMK = (score_BGML - lse_BGM.unsqueeze(-1)).exp_() @ v_BLGK.float().transpose(1, 2)
    return out_BGMK.flatten(1, 2), lse_BGM.flatten(1)


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Tensor:
    """Combine attention over two disjoint sets of keys into attention over their union, weighted by log-sum-exp."""
    share_a = (lse_a - lse_b).sigmoid_().unsqueeze(-1)
    return torch.lerp(out_b, out_a.float(), share_a).to(out_a.dtype)


def _attend_group(
    q_EQHK: Tensor, cache: KvCache, layer: int, group: TileGroup, tile_tokens: int
) -> tuple[Tensor, Tensor]:
    num_rows, head_dim = q_EQHK.shape[1], q_EQHK.shape[3]
    scaled = q_EQHK.float() * head_dim**-0.5
    q_EGXK = _split(scaled, 2, cache.num_kv_heads).permute(0, 2, 1, 3, 4).flatten(2, 3)
    tile_blocks = tile_tokens // cache.block_tokens
    softmax = _OnlineSoftmax()
    for first_block in range(0, group.block_table_EN.shape[1], tile_blocks):
        k_ECGK, v_ECGK = cache.read(layer, group.block_table_EN[:, first_block : first_block + tile_blocks])
        score_EGXC = q_EGXK @ k_ECGK.float().permute(0, 2, 3, 1)
        unseen_EC = _hide_unseen(score_EGXC, group, first_block, cache.block_tokens)
        if unseen_EC is not None:  # stale contents may be NaN, and NaN times a weight of 0 is NaN
            v_ECGK = v_ECGK.masked_fill(unseen_EC[:, :, None, None], 0.0)
        softmax.add(score_EGXC, v_ECGK.float().transpose(1, 2))
    out_EGXK, lse_EGX1 = softmax.result()

    def by_row(x: Tensor) -> Tensor:
        return _split(x, 2, num_rows).transpose(1, 2).flatten(2, 3)

    return by_row(out_EGXK), by_row(lse_EGX1).squeeze(-1)


def _hide_unseen(score_EGXC: Tensor, group: TileGroup, first_block: int, block_tokens: int) -> Tensor | None:
    """Set the scores of positions at or beyond each row's limit, and of positions before its window, to -inf.

    Returns the positions that no row sees (E, C), or None if every row sees all positions.
    """
    num_positions = score_EGXC.shape[-1]
    first_position = first_block * block_tokens
    if group.window is None and first_position + num_positions <= group.min_limit:
        return None
    position_C = torch.arange(first_position, first_position + num_positions, device=score_EGXC.device)
    if group.window is None:
        hidden_EQC = position_C >= group.limits_EQ.unsqueeze(-1)
    else:
        shift_EN = group.window.shift_EN[:, first_block : first_block + num_positions // block_tokens]
        position_E1C = (position_C + (shift_EN * block_tokens).repeat_interleave(block_tokens, 1)).unsqueeze(1)
        is_past = (position_E1C >= group.window.num_sinks) & (position_E1C < group.window.starts_EQ.unsqueeze(-1))
        hidden_EQC = is_past | (position_E1C >= group.limits_EQ.unsqueeze(-1))
    score_EGQMC = _split(score_EGXC, 2, hidden_EQC.shape[1])
    score_EGQMC.masked_fill_(hidden_EQC[:, None, :, None, :], -torch.inf)
    return hidden_EQC.all(1)


def _split(x: Tensor, dim: int, num_parts: int) -> Tensor:
    """View one dimension as `num_parts` equal runs."""
    return x.view(*x.shape[:dim], num_parts, -1, *x.shape[dim + 1 :])


class _OnlineSoftmax:
    """Softmax-weighted sum of values over tiles of keys, one tile at a time (Milakov and Gimelshein 2018).

    Each row must see a key in at least one tile.
    """

    def __init__(self) -> None:
        self._state: tuple[Tensor, Tensor, Tensor] | None = None

    def add(self, score_EGXC: Tensor, v_EGCK: Tensor) -> None:
        """Add a tile. Overwrites the scores."""
        peak = score_EGXC.amax(-1, keepdim=True).clamp_min_(_LOWEST_PEAK)
        if self._state is not None:
            peak = torch.maximum(peak, self._state[0])
        weight = score_EGXC.sub_(peak).exp_()
        total, out = weight.sum(-1, keepdim=True), weight @ v_EGCK
        if self._state is not None:
            old_peak, old_total, old_out = self._state
            shrink = old_peak.sub_(peak).exp_()
            total, out = total.addcmul_(old_total, shrink), out.addcmul_(old_out, shrink)
        self._state = peak, total, out

    def result(self) -> tuple[Tensor, Tensor]:
        """Return the weighted mean (E, G, X, K) and the log-sum-exp (E, G, X, 1)."""
        assert self._state is not None, "attention over no keys"
        peak, total, out = self._state
        return out.div_(total), total.log().add_(peak)
