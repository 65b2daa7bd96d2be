"""The one thread that owns an engine: asyncio callers put requests in, it steps, and their streams get the news.

The engine is touched by this thread alone. A caller that goes away, by an error or by being cancelled, cancels its requests
in the engine before the next step. If the engine fails, every caller is told and the thread ends: `failure` says why.
"""

import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count

import torch

from services.contracts.rank import EngineLoad
from services.errors import DependencyAway, TailraceError
from services.llm.engine.engine import Engine
from services.llm.engine.outcome import Grown, Status
from services.llm.engine_stream import Ended, EngineStream, Post

_RETRY_AFTER_S = 1.0

Ask = Callable[[Engine, str, float], None]
"""Adds a request to the engine: (engine, request id, now in monotonic seconds)."""

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
        self._lock = threading.Lock()  # guards the four below
        self._inbox: deque[Callable[[], object]] = deque()
        self._streams: dict[str, EngineStream] = {}
        self._stopping = False
        self._closed = False
        self._woken = threading.Event()
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
        number = next(self._ids)
        stream = EngineStream(tuple(f"{number}.{place}" for place in range(num_requests)))
        with self._lock:
            if self._closed:
                raise DependencyAway("the engine", _RETRY_AFTER_S) from self.failure
            self._streams.update(dict.fromkeys(stream.request_ids, stream))
            self._inbox.append(lambda: self._add(stream, ask))
        self._woken.set()
        try:
            yield stream
        finally:
            self._leave(stream)

    def finish(self, request_id: str) -> None:
        """End a request whose caller has all that it wanted; it counts as done. Does not wait."""
        self._send(lambda: self._engine.cancel(request_id, Status.DONE))

    def stop(self) -> None:
        """Let what is in flight finish, then end the thread. Does not wait."""
        with self._lock:
            self._stopping = True
        self._woken.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to end."""
        self._thread.join(timeout_s)

    def _leave(self, stream: EngineStream) -> None:
        with self._lock:
            left = [request_id for request_id in stream.request_ids if self._streams.pop(request_id, None)]
        if left:
            self._send(lambda: self._cancel(left))

    def _send(self, command: Callable[[], object]) -> None:
        with self._lock:
            self._inbox.append(command)
        self._woken.set()

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)
        try:
            while not self._close_if_done():
                self._turn()
        except BaseException as error:  # noqa: BLE001 - whatever broke the engine, its callers must hear of it
            self._break(error)

    def _turn(self) -> None:
        if not self._engine.has_work:
            self._woken.wait()
        self._woken.clear()
        with self._lock:
            commands = tuple(self._inbox)
            self._inbox.clear()
        for command in commands:
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
        self._tell(stepped)
        self._on_step(stepped)

    def _tell(self, stepped: Stepped) -> None:
        post = Post()
        with self._lock:
            for grown in stepped.grown:
                if (stream := self._streams.get(grown.request_id)) is not None:
                    post.add(stream, grown)
            for end in stepped.ended:
                if (stream := self._streams.pop(end.outcome.request_id, None)) is not None:
                    post.add(stream, end)
        post.send()

    def _add(self, stream: EngineStream, ask: AskAll) -> None:
        try:
            ask(self._engine, stream.request_ids, time.monotonic())
        except TailraceError as error:
            self._cancel(stream.request_ids)
            self._fail([stream], error)

    def _cancel(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._engine.cancel(request_id)

    def _fail(self, streams: Sequence[EngineStream], error: TailraceError) -> None:
        post = Post()
        with self._lock:
            for stream in streams:
                for request_id in stream.request_ids:
                    self._streams.pop(request_id, None)
                post.add(stream, error)
        post.send()

    def _close_if_done(self) -> bool:
        with self._lock:
            self._closed = self._stopping and not self._inbox and not self._engine.has_work
            return self._closed

    def _break(self, error: BaseException) -> None:
        self.failure = error
        with self._lock:
            self._closed = True
            unanswered = list({id(stream): stream for stream in self._streams.values()}.values())
        self._fail(unanswered, DependencyAway("the engine", _RETRY_AFTER_S))
