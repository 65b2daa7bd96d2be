"""Attention in plain torch: over paged contexts, tile by tile with an online softmax, and over the beams' dense tails.

The reference that faster kernels are held to. No score matrix larger than one tile of queries by one tile of context
exists at any time. Query heads share key/value heads in runs of M = H / G.

Shape suffixes: T rows of the step, E tiles of a group, Q rows of a tile, C context positions of a tile, N blocks,
B beams, L places of a tail, H query heads, G key/value heads, M = H / G, K head size.
"""

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from models.window import Window
from services.llm.engine.kv_cache import KvCache
from services.llm.engine.plan import StepPlan
from services.llm.engine.regular import RegularRows
from services.llm.engine.tails import Tails
from services.llm.engine.tiles import TileGroup, cut_tiles, group_tiles, regular_group

Prepared = TypeVar("Prepared")

_LOWEST_PEAK = -1e30
"""In place of -inf, the peak of no keys at all, whose differences are no numbers."""


class PagedAttention(Protocol, Generic[Prepared]):
    """Attention of a step's rows, each over its own paged context: prepared once a step, called in each layer."""

    def prepare(self, plan: StepPlan) -> Prepared:
        """Lay out which rows see which pages."""
        ...

    def prepare_regular(self, rows: RegularRows) -> Prepared:
        """Lay out a step of one fixed shape, on the device alone."""
        ...

    def attend(self, q_THK: Tensor, cache: KvCache, layer: int, prepared: Prepared, tails: Tails | None) -> Tensor:
        """Give the output (T, H, K). The last rows are beams where there are tails, which they see besides their pages."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """A step's tiles, for layers that see everything and for those with a window."""

    full: list[TileGroup]
    windowed: list[TileGroup]


class TorchAttention:
    """The reference: any device, plain torch."""

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

    def prepare(self, plan: StepPlan) -> Layout:
        """Cut a step into tiles and group those of like size."""
        return Layout(self._groups(plan, None), [] if self._window is None else self._groups(plan, self._window))

    def prepare_regular(self, rows: RegularRows) -> Layout:
        """Lay out a step of one fixed shape: one group, padded to the longest context."""
        full = regular_group(rows, self._block_tokens)
        return Layout([full], [] if self._window is None else [regular_group(rows, self._block_tokens, self._window)])

    def attend(self, q_THK: Tensor, cache: KvCache, layer: int, prepared: Layout, tails: Tails | None) -> Tensor:
        """Attend each row over its own context, and beams over their tails besides."""
        is_windowed = self._window is not None and layer in self._window.layers
        groups = prepared.windowed if is_windowed else prepared.full
        out_THK, lse_TH = paged_attention(q_THK, cache, layer, groups, self._tile_tokens)
        if tails is not None:
            first = len(q_THK) - len(tails.place_B)
            tail = tail_attention(q_THK[first:], tails.keys_YBLGK[layer], tails.values_YBLGK[layer], tails.seen_BL)
            out_THK[first:] = merge_attention(out_THK[first:], lse_TH[first:], *tail)
        return out_THK

    def _groups(self, plan: StepPlan, window: Window | None) -> list[TileGroup]:
        return group_tiles(cut_tiles(plan, self._tile_queries, self._block_tokens, window), self._device)


def paged_attention(
    q_THK: Tensor, cache: KvCache, layer: int, groups: list[TileGroup], tile_tokens: int
) -> tuple[Tensor, Tensor]:
    """Attend each row over its own context. Gives the output (T, H, K) and the log-sum-exp of its scores (T, H) fp32."""
    out_THK = torch.empty_like(q_THK)
    lse_TH = torch.empty(q_THK.shape[:2], dtype=torch.float32, device=q_THK.device)
    for group in groups:
        rows = group.rows_EQ.flatten()
        out_EQHK, lse_EQH = _attend_group(q_THK[group.rows_EQ], cache, layer, group, tile_tokens)
        out_THK.index_copy_(0, rows, out_EQHK.flatten(0, 1).to(out_THK.dtype))
        lse_TH.index_copy_(0, rows, lse_EQH.flatten(0, 1))
    return out_THK, lse_TH


def tail_attention(q_BHK: Tensor, k_BLGK: Tensor, v_BLGK: Tensor, seen_BL: Tensor) -> tuple[Tensor, Tensor]:
    """Attend each beam over its own few tokens. Gives the output (B, H, K) and the log-sum-exp (B, H), both fp32."""
    num_groups = k_BLGK.shape[2]
    q_BGMK = _split(q_BHK.float(), 1, num_groups) * q_BHK.shape[-1] ** -0.5
    score_BGML = q_BGMK @ k_BLGK.float().permute(0, 2, 3, 1)
    score_BGML.masked_fill_(~seen_BL[:, None, None, :], -torch.inf)
    lse_BGM = score_BGML.logsumexp(-1)
    out_BGMK = (score_BGML - lse_BGM.unsqueeze(-1)).exp_() @ v_BLGK.float().transpose(1, 2)
    return out_BGMK.flatten(1, 2), lse_BGM.flatten(1)


def merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Tensor:
    """Combine attention over two disjoint sets of keys into attention over their union."""
    share_a = (lse_a - lse_b).sigmoid_().unsqueeze(-1)
    return torch.lerp(out_b, out_a.float(), share_a).to(out_a.dtype)


def _attend_group(
    q_EQHK: Tensor, cache: KvCache, layer: int, group: TileGroup, tile_tokens: int
) -> tuple[Tensor, Tensor]:
    num_rows, head_dim = q_EQHK.shape[1], q_EQHK.shape[3]
    scaled = q_EQHK.float() * head_dim**-0.5
    q_EGXK = _split(scaled, 2, cache.num_groups).permute(0, 2, 1, 3, 4).flatten(2, 3)  # X = Q * M
    tile_blocks = tile_tokens // cache.block_tokens
    softmax = _OnlineSoftmax()
    for first_block in range(0, group.blocks_EN.shape[1], tile_blocks):
        k_ECGK, v_ECGK = cache.read(layer, group.blocks_EN[:, first_block : first_block + tile_blocks])
        score_EGXC = q_EGXK @ k_ECGK.float().permute(0, 2, 3, 1)
        _hide_unseen(score_EGXC, group, first_block, cache.block_tokens)
        softmax.add(score_EGXC, v_ECGK.float().transpose(1, 2))
    out_EGXK, lse_EGX1 = softmax.result()

    def by_row(x: Tensor) -> Tensor:
        return _split(x, 2, num_rows).transpose(1, 2).flatten(2, 3)

    return by_row(out_EGXK), by_row(lse_EGX1).squeeze(-1)


def _hide_unseen(score_EGXC: Tensor, group: TileGroup, first_block: int, block_tokens: int) -> None:
    """Set the scores of positions at or beyond each row's limit, and of those before its window, to -inf."""
    num_positions = score_EGXC.shape[-1]
    first_position = first_block * block_tokens
    if group.window is None and first_position + num_positions <= group.min_limit:
        return
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


def _split(x: Tensor, dim: int, num_parts: int) -> Tensor:
    """View one dimension as `num_parts` equal runs."""
    return x.view(*x.shape[:dim], num_parts, -1, *x.shape[dim + 1 :])


class _OnlineSoftmax:
    """Softmax-weighted sum of values over tiles of keys that arrive one after another (Milakov and Gimelshein 2018).

    Each row must see a key in some tile; any other may show it none.
    """

    def __init__(self) -> None:
        self._state: tuple[Tensor, Tensor, Tensor] | None = None

    def add(self, score_EGXC: Tensor, v_EGCK: Tensor) -> None:
        """Take one tile in. Destroys the scores."""
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
        """Give the weighted mean (E, G, X, K) and the log-sum-exp (E, G, X, 1)."""
        assert self._state is not None, "attention over nothing"
        peak, total, out = self._state
        return out.div_(total), total.log().add_(peak)
