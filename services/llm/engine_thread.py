"""The one thread that owns an engine: asyncio callers put requests in, it steps, and their futures get the answers.

The engine is touched by this thread alone. Callers wait on futures of their own event loop; a caller that is cancelled
cancels its request in the engine. If the engine fails, every caller is told and the thread ends: `failure` says why.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import torch

from services.contracts.rank import EngineLoad
from services.errors import DependencyAway, TailraceError
from services.llm.engine.engine import Engine
from services.llm.engine.outcome import Outcome

_RETRY_AFTER_S = 1.0

Ask = Callable[[Engine, str, float], None]
"""Adds a request to the engine: (engine, request id, now in monotonic seconds)."""


@dataclass(frozen=True, slots=True)
class Ended:
    """An outcome with the monotonic second at which its last step ended and the load after it."""

    outcome: Outcome
    finished_s: float
    load: EngineLoad


@dataclass(frozen=True, slots=True)
class _Caller:
    loop: asyncio.AbstractEventLoop
    future: "asyncio.Future[Ended]"


class EngineThread:
    """Runs one engine until stopped. `on_step` is told the load after each step and what ended in it, in this thread."""

    def __init__(self, engine: Engine, num_threads: int, on_step: Callable[[EngineLoad, list[Ended]], None]) -> None:
        self._engine = engine
        self._num_threads = num_threads
        self._on_step = on_step
        self._lock = threading.Lock()  # guards the four below
        self._inbox: deque[Callable[[], None]] = deque()
        self._callers: dict[str, _Caller] = {}
        self._stopping = False
        self._closed = False
        self._woken = threading.Event()
        self._ids = count()
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the thread still runs."""
        return self._thread.is_alive()

    async def ask(self, ask: Ask) -> Ended:
        """Have a request added and wait for its end. Raises what the engine refuses with, DependencyAway if it broke."""
        request_id = str(next(self._ids))
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Ended] = loop.create_future()
        with self._lock:
            if self._closed:
                raise DependencyAway("the engine", _RETRY_AFTER_S) from self.failure
            self._callers[request_id] = _Caller(loop, future)
            self._inbox.append(lambda: self._add(request_id, ask))
        self._woken.set()
        try:
            return await future
        except asyncio.CancelledError:
            with self._lock:
                self._callers.pop(request_id, None)
                self._inbox.append(lambda: self._cancel(request_id))
            self._woken.set()
            raise

    def stop(self) -> None:
        """Let what is in flight finish, then end the thread. Does not wait."""
        with self._lock:
            self._stopping = True
        self._woken.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to end."""
        self._thread.join(timeout_s)

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
        outcomes = self._engine.step(time.monotonic())
        load, now_s = self._engine.load(), time.monotonic()
        ended = [Ended(outcome, now_s, load) for outcome in outcomes]
        for end in ended:
            self._tell(end.outcome.request_id, end)
        self._on_step(load, ended)

    def _add(self, request_id: str, ask: Ask) -> None:
        try:
            ask(self._engine, request_id, time.monotonic())
        except TailraceError as error:
            self._tell(request_id, error)

    def _cancel(self, request_id: str) -> None:
        self._engine.cancel(request_id)

    def _tell(self, request_id: str, end: Ended | TailraceError) -> None:
        with self._lock:
            caller = self._callers.pop(request_id, None)
        if caller is not None:
            caller.loop.call_soon_threadsafe(_settle, caller.future, end)

    def _close_if_done(self) -> bool:
        with self._lock:
            self._closed = self._stopping and not self._inbox and not self._engine.has_work
            return self._closed

    def _break(self, error: BaseException) -> None:
        self.failure = error
        with self._lock:
            self._closed = True
            unanswered = tuple(self._callers)
        for request_id in unanswered:
            self._tell(request_id, DependencyAway("the engine", _RETRY_AFTER_S))


def _settle(future: "asyncio.Future[Ended]", end: Ended | TailraceError) -> None:
    if future.done():
        return
    if isinstance(end, Ended):
        future.set_result(end)
    else:
        future.set_exception(end)
