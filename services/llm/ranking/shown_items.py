"""The items that a replica may show by the live catalogue, as masks that change seldom.

The engine's cost of a new mask grows with the catalogue, so a mask of all items is kept for half a second; items hidden
since then are listed separately. Items that are shown again wait for the next mask.
"""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from services.contracts.recommend import Filters
from services.errors import DeadlineExceeded
from services.items.expression import Budget, Expressions
from services.items.layout import ItemLayout

_KEPT_S = 0.5
_NO_FILTERS = Filters()


@dataclass(frozen=True, slots=True)
class _Kept:
    """The shown items at a revision of the layout, (num_known,) bool, None for all; and when the mask was made."""

    mask: np.ndarray | None
    revision: int
    made_s: float


class ShownItems:
    """The masks over the items of one bundle, for one event loop. Expensive expressions are compiled in a thread."""

    def __init__(self, items: ItemLayout) -> None:
        self._items = items
        self._expressions = Expressions(items, lock=threading.Lock())
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="filters")
        self._kept = _Kept(None, -1, 0.0)

    async def compile(self, filters: Filters, deadline_s: float) -> None:
        """Compile the filters' expression for `masks`, within the budget of one call.

        Raises InvalidRequest beyond the budget, DeadlineExceeded past `deadline_s` on the monotonic clock.
        """
        if (clause := filters.expression) is None:
            return
        Budget().spend(clause, "filters", self._expressions)
        if self._expressions.compiled_soon([clause]) is None:
            running = asyncio.get_running_loop().run_in_executor(self._compiling, self._expressions.mask, clause)
            try:
                await asyncio.wait_for(running, deadline_s - time.monotonic())
            except TimeoutError as error:
                raise DeadlineExceeded("filters") from error

    def masks(self, filters: Filters, now_s: float) -> tuple[np.ndarray | None, list[int]]:
        """Return the items that may be shown, (num_known,) bool or None for all, and the indices of items hidden since.

        Without filters the same array is returned until it is replaced.
        """
        items = self._items
        if filters != _NO_FILTERS:
            allowed = items.allowed(categories=filters.categories, allowed_item_ids=filters.allowed_item_ids)
            if filters.expression is not None:
                allowed &= self._expressions.mask(filters.expression)[: len(allowed)]
            return allowed[: items.num_known], []
        kept = self._kept
        if kept.revision == items.revision:
            return kept.mask, []
        revision, available = items.revision, items.columns.available[: items.num_known]
        if kept.revision < 0 or now_s - kept.made_s >= _KEPT_S:
            self._kept = kept = _Kept(None if available.all() else available.copy(), revision, now_s)
            return kept.mask, []
        hidden = ~available if kept.mask is None else kept.mask & ~available
        return kept.mask, np.flatnonzero(hidden).tolist()
