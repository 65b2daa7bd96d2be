"""Reads the wishes of requests in one thread, with each bundle's reader, within a part of their deadline.

A wish that is not read in time, or whose reader fails or is missing, costs the request nothing more: it is answered as
without the wish. Failures in a row open a breaker, so that requests do not wait for a broken reader. A late reading is
still kept, for the next equal wish. Changed words and items that only the live catalogue has are handed to the readers
within a second, or two for catalogues of ten thousand items.

No wish is logged: an error is logged by its type only, since its words may contain the text.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from weakref import WeakKeyDictionary

import structlog
from prometheus_client import Counter

from models.wishes.reading import Reading
from models.wishes.vocabulary import WishItem
from services.gateway.request.live_bundle import Live, WishReader
from services.gateway.request.names import Names
from services.gateway.wishes.kept import KeptReadings, key_of
from services.items.layout import ItemLayout
from services.router.breaker import Breaker

log = structlog.get_logger()

MAX_NEW_ITEMS = 10_000
"""Beyond this many new items, the newest are not read until a bundle knows them."""
_PATIENCE = 4.0
"""A reading that is late counts as a failure of the reader if it had this many times the usual time."""
_SMOOTHING = 0.1


class _InUse:
    """A bundle's reader with the new items that it knows, its kept readings, and the text revision of its items."""

    def __init__(
        self, reader: WishReader, revision: tuple[int, int] = (0, 0), texts: dict[int, WishItem] | None = None
    ) -> None:
        self.reader = reader
        self.revision = revision
        self.items = texts or {}
        self.kept = KeptReadings()


class WishReaders:
    """The readers of all loaded bundles. One per process; call from the event loop."""

    def __init__(
        self, names: Names, breaker: Breaker, outcomes: Counter, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._names = names
        self._breaker = breaker
        self._outcomes = outcomes
        for outcome in ("read", "kept", "missing", "late", "failed", "open"):
            outcomes.labels(outcome)
        self._clock = clock
        self._in_use: WeakKeyDictionary[Live, _InUse] = WeakKeyDictionary()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="wishes")
        self._usual_s = 0.0

    async def read(self, wishes: Sequence[str], live: Live, timeout_s: float) -> Reading | None:
        """Read a conversation's wishes, the newest last, within `timeout_s`; None if not read. Never raises."""
        reading, outcome = await self._read(wishes, live, timeout_s)
        self._outcomes.labels(outcome).inc()
        return reading

    async def _read(self, wishes: Sequence[str], live: Live, timeout_s: float) -> tuple[Reading | None, str]:
        in_use, key = self._reader_of(live), key_of(wishes)
        if in_use is None:
            return None, "missing"
        if (kept := in_use.kept.get(key)) is not None:
            return kept, "kept"
        now_s = self._clock()
        if timeout_s <= 0 or not self._breaker.allows(now_s):
            return None, "late" if timeout_s <= 0 else "open"
        number = self._breaker.started(now_s)
        try:
            reading = asyncio.get_running_loop().run_in_executor(self._thread, self._read_now, in_use, key, wishes)
            result = await asyncio.wait_for(reading, timeout_s)
        except TimeoutError:
            if timeout_s > _PATIENCE * self._usual_s:
                self._breaker.failed(self._clock(), number)
            else:
                self._breaker.abandoned(number)
            return None, "late"
        except asyncio.CancelledError:
            self._breaker.abandoned(number)
            raise
        except Exception as error:  # noqa: BLE001 - a request is answered without its wish after any failure
            log.warning("wish_not_read", version=live.version, error=type(error).__name__)
            self._breaker.failed(self._clock(), number)
            return None, "failed"
        self._breaker.succeeded()
        return result, "read"

    def _read_now(self, in_use: _InUse, key: bytes, wishes: Sequence[str]) -> Reading:
        began_s, (*session, text) = self._clock(), wishes
        reading = in_use.reader.read(text, session)
        in_use.kept.put(key, reading)
        self._usual_s += _SMOOTHING * (self._clock() - began_s - self._usual_s)
        return reading

    def _reader_of(self, live: Live) -> _InUse | None:
        if live.reader is None:
            return None
        in_use = self._in_use.get(live)
        if in_use is None:
            in_use = self._in_use[live] = _InUse(live.reader)
        return in_use

    async def refresh(self) -> None:
        """Hand the readers the items that are new, or whose words have changed."""
        for live in self._names.loaded:
            in_use = self._reader_of(live)
            if in_use is None or in_use.revision == live.items.text_revision:
                continue
            self._in_use[live] = await asyncio.to_thread(with_new_items, in_use, live.items)


def with_new_items(in_use: _InUse, items: ItemLayout) -> _InUse:
    """Return a reader that knows the new items, and the changed words of the bundle's items.

    Earlier readings lack these titles and are dropped.
    """
    revision = items.text_revision  # read before the words: the next refresh finds concurrent changes
    column = items.columns.texts["categories"]
    last = min(items.num_named, len(column.codes), items.num_known + MAX_NEW_ITEMS)
    reworded = {index for index in in_use.items if index < items.num_known} | {*items.reworded()}
    wish_items = {
        index: WishItem(items.item_id(index), items.title(index), column.values[column.codes[index]])
        for index in (*sorted(reworded), *range(items.num_known, last))
    }
    changed = [item for index, item in wish_items.items() if in_use.items.get(index) != item]
    reader = in_use.reader.with_items(changed) if changed else in_use.reader
    return _InUse(reader, revision, wish_items)
