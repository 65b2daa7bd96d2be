"""Attention over paged contexts in plain torch, tile by tile with an online softmax.

No score matrix larger than one tile of queries by one tile of context exists at any time. Query heads share key/value heads
in runs of M = H / G.

Shape suffixes: T rows of the step, E tiles of a group, Q rows of a tile, C context positions of a tile, N blocks,
H query heads, G key/value heads, M = H / G, X = Q * M, K head size.
"""

import torch
from torch import Tensor

from services.llm.engine.forward.tile_groups import TileGroup
from services.llm.engine.kv.cache import KvCache

_LOWEST_PEAK = -1e30
"""In place of -inf, the peak of no keys at all, whose differences are no numbers."""


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


def _attend_group(
    q_EQHK: Tensor, cache: KvCache, layer: int, group: TileGroup, tile_tokens: int
) -> tuple[Tensor, Tensor]:
    num_rows, head_dim = q_EQHK.shape[1], q_EQHK.shape[3]
    scaled = q_EQHK.float() * head_dim**-0.5
    q_EGXK = _split(scaled, 2, cache.num_groups).permute(0, 2, 1, 3, 4).flatten(2, 3)
    tile_blocks = tile_tokens // cache.block_tokens
    softmax = _OnlineSoftmax()
    for first_block in range(0, group.blocks_EN.shape[1], tile_blocks):
        k_ECGK, v_ECGK = cache.read(layer, group.blocks_EN[:, first_block : first_block + tile_blocks])
        score_EGXC = q_EGXK @ k_ECGK.float().permute(0, 2, 3, 1)
        unseen_EC = _hide_unseen(score_EGXC, group, first_block, cache.block_tokens)
        if unseen_EC is not None:  # what others left there may be no number, which no weight of zero takes back
            v_ECGK = v_ECGK.masked_fill(unseen_EC[:, :, None, None], 0.0)
        softmax.add(score_EGXC, v_ECGK.float().transpose(1, 2))
    out_EGXK, lse_EGX1 = softmax.result()

    def by_row(x: Tensor) -> Tensor:
        return _split(x, 2, num_rows).transpose(1, 2).flatten(2, 3)

    return by_row(out_EGXK), by_row(lse_EGX1).squeeze(-1)


def _hide_unseen(score_EGXC: Tensor, group: TileGroup, first_block: int, block_tokens: int) -> Tensor | None:
    """Set the scores of positions at or beyond each row's limit, and of those before its window, to -inf.

    Gives which positions no row sees (E, C), None where all see all.
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
        """Return the weighted mean (E, G, X, K) and the log-sum-exp (E, G, X, 1)."""
        assert self._state is not None, "attention over nothing"
        peak, total, out = self._state
        return out.div_(total), total.log().add_(peak)
