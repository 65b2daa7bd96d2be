"""Erases users: an erasure is an event in the same topic as the user's events, and a receipt reports its progress."""

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import structlog

from services.contracts.erasure import Erasure, ErasureProgress, ErasureStore, remaining_after
from services.contracts.message import check_id
from services.contracts.tenant import scoped, scoped_name, tenant_of_name
from services.errors import DependencyUnavailable, NotFound
from services.gateway.events.record import EventLog

log = structlog.get_logger()

_RECEIPT_TIMEOUT_S = 1.0


class Receipts(Protocol):
    """The receipts, which the stream worker writes."""

    async def open(self, erasure_id: str, accepted_ms: int, timeout_s: float) -> None:
        """Create a receipt unless the worker already has. Raises DependencyUnavailable."""
        ...

    async def get(self, erasure_id: str, timeout_s: float) -> ErasureProgress | None:
        """Return a receipt, or None. Raises DependencyUnavailable."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerKeeps:
    """The broker's retention in ms: of events and impressions, and of dead letters."""

    events_ms: int
    dead_letters_ms: int


class EraseUsers:
    """Accepts erasures and reads their receipts."""

    def __init__(
        self, events: EventLog, receipts: Receipts, keeps: BrokerKeeps, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._events = events
        self._receipts = receipts
        self._keeps = keeps
        self._wall_clock = wall_clock

    async def erase(self, user_id: str, tenant: str, door: str, request_id: str) -> ErasureProgress:
        """Erase a tenant's user; returns when the broker has the event. Later events begin a new history.

        Raises InvalidRequest; DependencyUnavailable or Overloaded if the broker has not acknowledged it. May be
        repeated.
        """
        check_id("user_id", user_id)
        now_ms = int(self._wall_clock() * 1_000)
        erasure = Erasure(
            erasure_id=scoped_name(tenant, uuid.uuid4().hex), user_id=scoped(tenant, user_id), accepted_time_ms=now_ms
        )
        await self._events.record([(erasure.key, erasure.encode())])
        log.info("erasure_accepted", erasure_id=erasure.erasure_id, door=door, request_id=request_id)
        try:
            await self._receipts.open(erasure.erasure_id, now_ms, _RECEIPT_TIMEOUT_S)
        except DependencyUnavailable as error:  # the worker writes the receipt too
            log.warning("receipt_not_opened", erasure_id=erasure.erasure_id, error=repr(error))
        return self._complete(
            ErasureProgress(
                erasure_id=erasure.erasure_id, accepted_time_ms=now_ms, stores=dict.fromkeys(ErasureStore, None)
            )
        )

    async def receipt(self, erasure_id: str, tenant: str) -> ErasureProgress:
        """Return the receipt of a tenant's erasure. Raises NotFound, InvalidRequest or DependencyUnavailable."""
        check_id("erasure_id", erasure_id)
        is_own = tenant_of_name(erasure_id) == tenant
        progress = await self._receipts.get(erasure_id, _RECEIPT_TIMEOUT_S) if is_own else None
        if progress is None:
            raise NotFound("no such erasure", "receipts are kept for 90 days, under the erasure_id of the answer")
        return self._complete(progress)

    async def stop(self) -> None:
        await self._receipts.close()

    def _complete(self, receipt: ErasureProgress) -> ErasureProgress:
        keeps = self._keeps
        return replace(
            receipt, remaining=remaining_after(receipt.accepted_time_ms, keeps.events_ms, keeps.dead_letters_ms)
        )
