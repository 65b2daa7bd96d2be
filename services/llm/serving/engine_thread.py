"""The one thread that owns an engine: asyncio callers put requests in, it steps, and their streams get the news.

The engine is touched by this thread alone. A caller that goes away, by an error or by being cancelled, cancels its requests
in the engine before the next step. If the engine fails, every caller is told and the thread ends: `failure` says why.
"""

import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count

import torch

from services.contracts.rank import EngineLoad
from services.errors import DependencyAway, TailraceError
from services.llm.engine.engine import Engine
from services.llm.engine.outcome import Grown, Status
from services.llm.serving.inbox import Inbox
from services.llm.serving.open_streams import OpenStreams
from services.llm.serving.stream import Ended, EngineStream

_RETRY_AFTER_S = 1.0

Ask = Callable[[Engine, str, float], None]
"""Adds a request to the engine: (engine, request id, monotonic seconds at which it was asked)."""

AskAll = Callable[[Engine, Sequence[str], float], None]
"""Adds a request to the engine under each of the given ids, or raises: then none of them counts."""


@dataclass(frozen=True, slots=True)
class Stepped:
    """What a step brought, the load after it, and the monotonic seconds at which it began and ended.

    A step that was started by the call before began when that one returned.
    """

    load: EngineLoad
    grown: Sequence[Grown]
    ended: Sequence[Ended]
    began_s: float
    finished_s: float


class EngineThread:
    """Runs one engine until stopped. `on_step` is told of each step, in this thread."""

    def __init__(self, engine: Engine, num_threads: int, on_step: Callable[[Stepped], None]) -> None:
        self._engine = engine
        self._num_threads = num_threads
        self._on_step = on_step
        self._inbox = Inbox()
        self._streams = OpenStreams()
        self._ids = count()
        self._returned_s = 0.0
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the thread still runs."""
        return self._thread.is_alive()

    async def ask(self, ask: Ask) -> Ended:
        """Have a request added and wait for its end. Raises what the engine refuses with, DependencyAway if it broke."""
        async with self.open(1, lambda engine, request_ids, now_s: ask(engine, request_ids[0], now_s)) as stream:
            while True:
                for news in await stream.take():
                    if isinstance(news, Ended):
                        return news

    @asynccontextmanager
    async def open(self, num_requests: int, ask: AskAll) -> AsyncIterator[EngineStream]:
        """Have requests added and give the stream of their news; what has not ended on leaving is cancelled.

        Raises DependencyAway when the engine broke or was stopped; what it refuses with comes from the stream.
        """
        number, asked_s = next(self._ids), time.monotonic()
        stream = EngineStream(tuple(f"{number}.{place}" for place in range(num_requests)))
        self._streams.enter(stream)
        try:
            if not self._inbox.put(lambda: self._add(stream, ask, asked_s)):
                raise DependencyAway("the engine", _RETRY_AFTER_S) from self.failure
            yield stream
        finally:
            if left := self._streams.leave(stream):
                self._inbox.put(lambda: self._cancel(left))

    def finish(self, request_id: str) -> None:
        """End a request whose caller has all that it wanted; it counts as done. Does not wait."""
        self._inbox.put(lambda: self._engine.cancel(request_id, Status.DONE))

    def stop(self) -> None:
        """Let what is in flight finish, then end the thread. Does not wait."""
        self._inbox.stop()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to end."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)
        try:
            while not self._inbox.close_if_done(has_work=self._engine.has_work):
                self._turn()
        except BaseException as error:  # noqa: BLE001 - whatever broke the engine, its callers must hear of it
            self.failure = error
            self._inbox.close()
            self._streams.fail_all(DependencyAway("the engine", _RETRY_AFTER_S))

    def _turn(self) -> None:
        for command in self._inbox.take(waits=not self._engine.has_work):
            command()
        if self._engine.has_work:
            self._step()

    def _step(self) -> None:
        called_s = time.monotonic()
        began_s = self._returned_s if self._engine.is_ahead else called_s
        outcomes = self._engine.step(called_s)
        load, now_s = self._engine.load(), time.monotonic()
        self._returned_s = now_s
        ended = [Ended(outcome, now_s, load) for outcome in outcomes]
        stepped = Stepped(load, self._engine.grown, ended, began_s, now_s)
        self._streams.tell(stepped.grown, ended)
        self._on_step(stepped)

    def _add(self, stream: EngineStream, ask: AskAll, asked_s: float) -> None:
        try:
            ask(self._engine, stream.request_ids, asked_s)
        except TailraceError as error:
            self._cancel(stream.request_ids)
            self._streams.fail(stream, error)

    def _cancel(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._engine.cancel(request_id)
