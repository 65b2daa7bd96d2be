"""A layer's attention for the rows of a step: the protocol that every implementation keeps, and the one in plain torch.

The reference that faster kernels are held to: over pages and, for beams, over their tails.

Shape suffixes: T rows of the step, H query heads, K head size.
"""

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from models.decoder.window import Window
from services.llm.engine.beam.tails import Tails
from services.llm.engine.forward.regular import RegularRows
from services.llm.engine.forward.tail_attention import merge_attention, tail_attention
from services.llm.engine.forward.tile_groups import TileGroup, group_tiles, regular_group
from services.llm.engine.forward.tiles import cut_tiles
from services.llm.engine.forward.torch_attention import paged_attention
from services.llm.engine.kv.cache import KvCache
from services.llm.engine.schedule.plan import StepPlan

Prepared = TypeVar("Prepared")


class PagedAttention(Protocol, Generic[Prepared]):
    """Attention of a step's rows, each over its own paged context: prepared once a step, called in each layer."""

    def prepare(self, plan: StepPlan) -> Prepared:
        """Lay out which rows see which pages."""
        ...

    def prepare_regular(self, rows: RegularRows) -> Prepared:
        """Lay out a step of one fixed shape, on the device alone."""
        ...

    def attend(self, q_THK: Tensor, cache: KvCache, layer: int, prepared: Prepared, tails: Tails | None) -> Tensor:
        """Return the output (T, H, K). The last rows are beams where there are tails, which they see besides their pages."""
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
