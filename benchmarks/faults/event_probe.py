"""Probe events during a load: one every quarter of a second, each of a new user, followed until an answer includes it.

Records acknowledged and refused events, the time of the first accepted event after a fault, and acknowledged events
that never became visible.
"""

import asyncio
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass

import tailrace_client
from tailrace_client import AsyncClient, TailraceError

_EVERY_S = 0.25
_POLL_S = 0.05
_NEAR_S = 1.0
_LAST_CHANCE_S = 60.0
"""A stream worker that restarts together with all parts of its node takes longer on a busy machine."""
_LOOK_MS = 2_000.0


@dataclass(slots=True)
class ProbeEvent:
    """One event; times in seconds from the probe's start, None if it did not happen."""

    user_id: str
    event_time_ms: int
    sent_s: float
    acknowledged_s: float | None = None
    visible_s: float | None = None

    @property
    def was_seen_soon(self) -> bool:
        """Whether it was acknowledged and visible within a second."""
        if self.acknowledged_s is None or self.visible_s is None:
            return False
        return self.visible_s - self.acknowledged_s <= _NEAR_S


class EventProbe:
    """Sends and follows events between `start` and `finish`."""

    def __init__(self, client: AsyncClient, item_id: str) -> None:
        self._client = client
        self._item_id = item_id
        self._began_s = time.perf_counter()
        self._tasks: list[asyncio.Task[None]] = []
        self._sends: set[asyncio.Task[None]] = set()
        self.events: list[ProbeEvent] = []

    def start(self, began_s: float) -> None:
        """Start; times count from `began_s` (perf_counter)."""
        self._began_s = began_s
        self._tasks = [asyncio.create_task(self._send_all()), asyncio.create_task(self._watch_all())]

    async def finish(self) -> None:
        """Stop sending, and wait a bounded time for acknowledged events to become visible."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._sends, return_exceptions=True)
        give_up_s = time.perf_counter() + _LAST_CHANCE_S
        while (unseen := self.unseen()) and time.perf_counter() < give_up_s:
            for event in unseen:
                await self._look(event)
            await asyncio.sleep(_POLL_S)

    def unseen(self) -> list[ProbeEvent]:
        """Return acknowledged events that are not visible yet."""
        return [event for event in self.events if event.acknowledged_s is not None and event.visible_s is None]

    def recovered_s(self, back_at_s: float) -> float | None:
        """Return the seconds from the dependency's return to a new event accepted and soon visible; None if never."""
        for event in self.events:
            if event.sent_s >= back_at_s and event.was_seen_soon:
                return (event.visible_s or 0.0) - back_at_s
        return None

    async def _send_all(self) -> None:
        number = 0
        while True:
            number += 1
            await asyncio.sleep(max(0.0, self._began_s + number * _EVERY_S - time.perf_counter()))
            task = asyncio.create_task(self._send())
            self._sends.add(task)
            task.add_done_callback(self._sends.discard)

    async def _send(self) -> None:
        event = ProbeEvent(f"probe-{uuid.uuid4().hex}", time.time_ns() // 1_000_000, self._now_s())
        self.events.append(event)
        sent = tailrace_client.Event(event.user_id, self._item_id, event_time_ms=event.event_time_ms)
        with suppress(TailraceError):
            await self._client.record(sent)
            event.acknowledged_s = self._now_s()

    async def _watch_all(self) -> None:
        """Check the newest acknowledged event that is not visible, so that an older event cannot hide recovery."""
        while True:
            unseen = self.unseen()
            if unseen:
                await self._look(unseen[-1])
            await asyncio.sleep(_POLL_S)

    async def _look(self, event: ProbeEvent) -> None:
        with suppress(TailraceError):
            answer = await self._client.recommend(event.user_id, k=1, deadline_ms=_LOOK_MS)
            if answer.newest_event_time_ms == event.event_time_ms:
                event.visible_s = self._now_s()

    def _now_s(self) -> float:
        return time.perf_counter() - self._began_s
