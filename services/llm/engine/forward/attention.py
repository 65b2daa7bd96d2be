"""The interface of attention over paged contexts, which the forward pass calls once per layer.

Shape suffixes: T rows of the step, H query heads, K head size, R requests, E tiles, N block ids of all requests.
"""

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from services.llm.engine.beam.tails import Tails
from services.llm.engine.kv.cache import KvCache
from services.llm.engine.plan import StepPlan

Prepared = TypeVar("Prepared")


@dataclass(frozen=True, slots=True, eq=False)
class UniformBatch:
    """A step of one fixed shape: every request has the same number of query rows, which see all its pages.

    Text decode (one row per request) and beam search are such steps. All tensors are int64 and stay in place on the
    device, so that derived work can be captured in a graph and replayed over other contents.

    Request r owns `rows_per_request` rows from r * `rows_per_request`. They are at position `position_R[r]`, see the
    first `limit_R[r]` tokens of the request's pages, and the ids of its blocks start at
    `block_table_N[first_block_R[r]]`. No request sees more than `max_context` tokens.
    """

    limit_R: Tensor
    position_R: Tensor
    first_block_R: Tensor
    block_table_N: Tensor
    rows_per_request: int
    max_context: int


@dataclass(frozen=True, slots=True, eq=False)
class TileBatch:
    """A step with a fixed number of tiles of changing content: a recorded step of prompts.

    All tensors are int64 and stay in place. A row of `tile_E6` is: first row, number of rows (0 for an unused tile,
    whose other numbers are valid but arbitrary), first limit, limit step, first position, start of its block ids in
    `block_table_N`. Row i of a tile sees the first `limit + i * step` tokens of its blocks.
    """

    tile_E6: Tensor
    block_table_N: Tensor
    rows_per_tile: int
    max_context: int


class PagedAttention(Protocol, Generic[Prepared]):
    """Attention of a step's rows, each over its own paged context: prepared once per step, called in each layer."""

    def prepare(self, plan: StepPlan) -> Prepared:
        """Return the description of the pages that each row sees, as the layers need it."""
        ...

    def prepare_uniform(self, batch: UniformBatch) -> Prepared:
        """Return the description for a step of one fixed shape, computed entirely on the device."""
        ...

    @property
    def max_tile_rows(self) -> int: ...

    def prepare_tiles(self, batch: TileBatch) -> Prepared:
        """Return the description for a fixed number of tiles, computed entirely on the device."""
        ...

    def attend(self, q_THK: Tensor, cache: KvCache, layer: int, prepared: Prepared, tails: Tails | None) -> Tensor:
        """Return the output (T, H, K). With `tails`, the last rows are beams, which also attend to their tail."""
        ...
