"""The explanations of recent requests: gathered in a small buffer, written to a shared store five times a second.

Never on a request's path: offering one is an append. What does not fit (200 a second, and as many slow ones), and what the
store does not take, is dropped and counted. Any replica can tell of any request, since the store is shared. Does not know Redis: the port is below.
"""

from collections.abc import Sequence
from typing import Protocol

import structlog
from prometheus_client import Counter

from services.contracts.explanation import Explanation, decode_explanation
from services.errors import DependencyAway, NotFound
from services.gateway.records.explaining import FACT_NAMES, Answered, Refused, Shed
from services.gateway.request.repeating import Repeating

log = structlog.get_logger()

_FLUSH_EVERY_S = 0.2
_MAX_WAITING = 80
_FIND_TIMEOUT_S = 1.0
_WRITE_TIMEOUT_S = 1.0
_NOT_TOLD = frozenset({"unauthenticated", "not_allowed"})
"""Refusals of those who were not let in: they must not be able to overwrite what others are told."""


class ExplanationStore(Protocol):
    """Where explanations are kept for a while, for all replicas."""

    async def put(self, records: Sequence[tuple[str, bytes]], timeout_s: float) -> None:
        """Keep records (request id, bytes); a later one replaces an earlier one. Raises DependencyAway."""
        ...

    async def get(self, request_id: str, timeout_s: float) -> bytes | None:
        """Return what is kept under this id; None when there is nothing or not any more. Raises DependencyAway."""
        ...

    async def close(self) -> None:
        """Close the connections."""
        ...


class Explanations:
    """Keeps explanations in `store`; without one nothing is kept and everything is unknown."""

    def __init__(self, store: ExplanationStore | None, outcomes: Counter) -> None:
        self._store = store
        self._waiting: list[Answered | Shed | Refused] = []
        self._kept, self._dropped = outcomes.labels("kept"), outcomes.labels("dropped")
        self._is_away = False
        self._flushing = Repeating(self.flush, _FLUSH_EVERY_S)

    def offer(self, case: Answered | Shed | Refused) -> None:
        """Take in one request, or drop it when too many wait; the second half of the places is for slow requests."""
        if self._store is None or (isinstance(case, Refused) and case.code in _NOT_TOLD):
            return
        if len(self._waiting) < (_MAX_WAITING if case.is_slow else _MAX_WAITING // 2):
            self._waiting.append(case)
        else:
            self._dropped.inc()

    async def find(self, request_id: str) -> Explanation:
        """Return a recent request's explanation.

        Raises NotFound when it is unknown, too old, or was written by a gateway that tells it otherwise; DependencyAway.
        """
        stored = None if self._store is None else await self._store.get(request_id, _FIND_TIMEOUT_S)
        if stored is None:
            raise NotFound("no explanation of this request is kept", "ask sooner, or raise TAILRACE_EXPLAIN_KEEP_S")
        try:
            return decode_explanation(stored, FACT_NAMES)
        except (ValueError, TypeError) as error:  # during an upgrade gateways of two versions share the store
            raise NotFound(
                "the explanation of this request is another version's", "ask a gateway of that one"
            ) from error

    async def start(self) -> None:
        """Write in the background from now on."""
        if self._store is not None:
            self._flushing.start()

    async def stop(self) -> None:
        """Write what waits, and end."""
        await self._flushing.stop()
        await self.flush()
        if self._store is not None:
            await self._store.close()

    async def flush(self) -> None:
        """Write what waits now, in one exchange; it is dropped when the store is away."""
        if self._store is None or not self._waiting:
            return
        cases, self._waiting = self._waiting, []
        try:
            await self._store.put([(case.request_id, case.record()) for case in cases], _WRITE_TIMEOUT_S)
        except Exception as error:  # noqa: BLE001 - whatever breaks here, requests go on and are explained later
            self._lost(len(cases), error)
        else:
            self._kept.inc(len(cases))
            self._is_away = False

    def _lost(self, num_lost: int, error: Exception) -> None:
        self._dropped.inc(num_lost)
        if not self._is_away:
            level = log.warning if isinstance(error, DependencyAway) else log.exception
            level("explanations_dropped", error=repr(error))
        self._is_away = isinstance(error, DependencyAway)
