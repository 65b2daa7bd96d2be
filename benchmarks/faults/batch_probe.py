"""Batches of events during a load: every few seconds two callers send 500 events each of a new user.

They repeat until acknowledged, use both doors and the client that products install, with its retries; a call that fails
is made again with the same events. So events that a fault left unacknowledged are sent again while the other caller's
events arrive, and the store's count shows lost and doubled events.
"""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from services.errors import DependencyUnavailable
from tailrace_client import AsyncClient, Event, TailraceError

_EVERY_S = 4.0
_EVENTS = 500
_AGAIN_AFTER_S = 0.5
_LOOK_S = 0.2
_LAST_CHANCE_S = 60.0


@dataclass(slots=True)
class SentEvents:
    """One caller's events, how often they were sent, and whether all were acknowledged."""

    events: list[Event]
    num_attempts: int = 0
    is_acknowledged: bool = False


@dataclass(slots=True)
class BatchUser:
    """One user, a batch of each caller, and the store's final number of events."""

    batches: list[SentEvents]
    user_id: str = field(default_factory=lambda: f"batch-{uuid.uuid4().hex}")
    num_stored: int = 0

    @property
    def num_lost(self) -> int:
        """Number of acknowledged events that the store lacks."""
        acknowledged = sum(len(batch.events) for batch in self.batches if batch.is_acknowledged)
        return max(0, acknowledged - self.num_stored)

    @property
    def num_doubled(self) -> int:
        """Number of events in the store above the number sent."""
        return max(0, self.num_stored - sum(len(batch.events) for batch in self.batches))


class BatchProbe:
    """Sends batches between `start` and `finish`."""

    def __init__(
        self, callers: Sequence[AsyncClient], item_id: str, num_events: Callable[[str], Awaitable[int]]
    ) -> None:
        """Take the callers, one per door, the item of all events, and the count of a user's events in the store."""
        self._callers = callers
        self._item_id = item_id
        self._num_events = num_events
        self._starts: asyncio.Task[None] | None = None
        self._sends: set[asyncio.Task[None]] = set()
        self.users: list[BatchUser] = []

    def start(self) -> None:
        self._starts = asyncio.create_task(self._send_all())

    async def finish(self, last_chance_s: float = _LAST_CHANCE_S) -> None:
        """Start no more batches, and wait a bounded time until all are acknowledged and stored."""
        if self._starts is not None:
            self._starts.cancel()
        give_up_s = time.perf_counter() + last_chance_s
        if self._sends:
            await asyncio.wait(self._sends, timeout=last_chance_s)
        for task in self._sends:
            task.cancel()
        for user in self.users:
            await self._count(user)
            while user.num_lost and time.perf_counter() < give_up_s:
                await asyncio.sleep(_LOOK_S)
                await self._count(user)

    async def send(self, caller: AsyncClient, batch: SentEvents) -> None:
        """Send a batch, with the client's retries, until it is acknowledged."""
        while not batch.is_acknowledged:
            try:
                batch.num_attempts += (await caller.record(batch.events)).num_attempts
                batch.is_acknowledged = True
            except TailraceError as error:
                batch.num_attempts += error.num_attempts
                await asyncio.sleep(_AGAIN_AFTER_S)

    def result(self) -> dict[str, int]:
        """Return the counts for the row."""
        batches = [batch for user in self.users for batch in user.batches]
        return {
            "events_each": _EVENTS,
            "sent": len(batches),
            "attempts": sum(batch.num_attempts for batch in batches),
            "acknowledged": sum(batch.is_acknowledged for batch in batches),
            "lost": sum(user.num_lost for user in self.users),
            "doubled": sum(user.num_doubled for user in self.users),
        }

    async def _count(self, user: BatchUser) -> None:
        with suppress(DependencyUnavailable):
            user.num_stored = await self._num_events(user.user_id)

    async def _send_all(self) -> None:
        while True:
            await asyncio.sleep(_EVERY_S)
            user = BatchUser([])
            self.users.append(user)
            for caller in self._callers:
                batch = SentEvents([Event(user.user_id, self._item_id) for _ in range(_EVENTS)])
                user.batches.append(batch)
                task = asyncio.create_task(self.send(caller, batch))
                self._sends.add(task)
                task.add_done_callback(self._sends.discard)
