"""The thread that owns an engine: asyncio callers add requests, the thread steps the engine and delivers results.

Only this thread touches the engine. When a caller leaves, by an error or by cancellation, its requests are cancelled in
the engine before the next step. If a step fails, the requests run again one stream at a time, so that only requests
that make a step fail end with an error. If several fail in a row, the engine has failed: every stream ends with an
error and the thread ends; `failure` holds the cause. A thread that hangs in a step cannot end by itself: `check_health`
detects it by comparing the step's time with its predicted time.
"""

import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count

import structlog
import torch

from services.contracts.engine_load import EngineLoad
from services.errors import DependencyUnavailable, TailraceError
from services.llm.engine.engine import Engine
from services.llm.engine.outcome import NewToken, SequenceStatus
from services.llm.serving.streams import EngineStream, FinishedRequest, OpenStreams

log = structlog.get_logger()

_RETRY_AFTER_S = 1.0
_BLOCKED_PAUSE_S = 0.001
"""Pause between checks for free blocks while another bundle's engine holds them."""
_MAX_FAILURES = 3
"""After this number of failed streams in a row the engine itself counts as failed."""
_HUNG_FACTOR = 10
"""A step that takes this many times its predicted time counts as hung."""

AddRequest = Callable[[Engine, str, float], None]
"""Adds a request to the engine: (engine, request id, monotonic seconds of the request's arrival)."""

AddRequests = Callable[[Engine, Sequence[str], float], None]
"""Adds a request to the engine under each of the given ids; adds no request if it raises."""

Command = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Stepped:
    """The results of a step, the load after it, and the monotonic seconds at which it began and ended.

    A step that the previous call started began when that call returned.
    """

    load: EngineLoad
    new_tokens: Sequence[NewToken]
    ended: Sequence[FinishedRequest]
    began_s: float
    finished_s: float


class EngineThread:
    """Runs one engine until stopped. `on_step` is called after each step, in this thread."""

    def __init__(self, engine: Engine, num_threads: int, on_step: Callable[[Stepped], None]) -> None:
        self._engine = engine
        self._num_threads = num_threads
        self._on_step = on_step
        self._inbox = Inbox()
        self._streams = OpenStreams()
        self._ids = count()
        self._returned_s = 0.0
        self._step_called_s: float | None = None
        self._num_failures = 0
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def check_health(self, max_step_s: float) -> None:
        """Raise RuntimeError with the cause if the thread has died, or if a step hangs.

        A step hangs when it has been running for longer than `max_step_s` and for longer than a multiple of its
        predicted time.
        """
        if not self.is_alive:
            raise RuntimeError("the engine thread died") from self.failure
        called_s = self._step_called_s
        longest_s = max(max_step_s, _HUNG_FACTOR * self._engine.expected_step_s)
        if called_s is not None and time.monotonic() - called_s > longest_s:
            raise RuntimeError(f"a step of the engine has been running for more than {longest_s:g} s")

    async def run_request(self, add: AddRequest) -> FinishedRequest:
        """Add a request and wait for its end.

        Raises the engine's refusal, or DependencyUnavailable if the engine failed.
        """
        async with self.open_stream(1, lambda engine, request_ids, now_s: add(engine, request_ids[0], now_s)) as stream:
            while True:
                for item in await stream.take():
                    if isinstance(item, FinishedRequest):
                        return item

    @asynccontextmanager
    async def open_stream(self, num_requests: int, add: AddRequests) -> AsyncIterator[EngineStream]:
        """Add requests and yield the stream of their results; requests that have not ended on exit are cancelled.

        Raises DependencyUnavailable when the engine failed or was stopped; the stream raises the engine's refusals.
        """
        number, arrival_s = next(self._ids), time.monotonic()
        stream = EngineStream(tuple(f"{number}.{index}" for index in range(num_requests)))
        self._streams.add(stream)
        try:
            if not self._inbox.put(lambda: self._add_first(stream, add, arrival_s)):
                raise DependencyUnavailable("the engine", _RETRY_AFTER_S) from self.failure
            yield stream
        finally:
            if unfinished := self._streams.remove(stream):
                self._inbox.put(lambda: self._cancel(unfinished))

    def finish(self, request_id: str) -> None:
        """End a request whose caller needs no more of it; its status is DONE. Does not wait."""
        self._inbox.put(lambda: self._engine.cancel(request_id, SequenceStatus.DONE))

    def call(self, act: Callable[[Engine], object]) -> Future[None]:
        """Run a function on the engine between two steps. The future has its error. Does not wait.

        The error is DependencyUnavailable when the engine failed or was stopped.
        """
        done: Future[None] = Future()

        def run() -> None:
            try:
                act(self._engine)
            except Exception as error:  # noqa: BLE001 - the engine must keep serving
                done.set_exception(error)
            else:
                done.set_result(None)

        if not self._inbox.put(run):
            done.set_exception(DependencyUnavailable("the engine", _RETRY_AFTER_S))
        return done

    def stop(self) -> None:
        """End the thread after all requests in flight have finished. Does not wait."""
        self._inbox.stop()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)
        try:
            while not self._inbox.close_if_done(has_work=self._engine.has_work):
                for command in self._inbox.take(waits=not self._engine.has_work):
                    command()
                if self._engine.has_work:
                    self._step()
        except BaseException as error:  # noqa: BLE001 - whatever failed, every caller must get an answer
            self.failure = error
            self._inbox.close()
            self._streams.fail_all(DependencyUnavailable("the engine", _RETRY_AFTER_S))
            self._engine.close()

    def _step(self) -> None:
        try:
            self._advance()
        except Exception as error:
            log.exception("engine_step_failed")
            self._run_apart(error)

    def _run_apart(self, error: Exception) -> None:
        """Run each stream's requests again by themselves; streams that fail again, or had results, end with an error.

        Raises the error of a stream after `_MAX_FAILURES` failures in a row.
        """
        dropped = self._engine.restart()
        for stream in self._streams.all():
            if not dropped.isdisjoint(stream.request_ids):
                failure = error if stream.restart is None else self._failure_of(stream)
                if self._num_failures >= _MAX_FAILURES:
                    raise failure or error
                if failure is not None:
                    self._streams.fail(stream, DependencyUnavailable("the engine", _RETRY_AFTER_S))
        self._step_called_s = None

    def _failure_of(self, stream: EngineStream) -> Exception | None:
        """Run a stream's requests until they end; return the error of a step that fails."""
        try:
            self._add(stream)
            while self._engine.has_work:
                self._advance()
        except Exception as error:  # noqa: BLE001 - the other streams must get their answers
            self._num_failures += 1
            self._engine.restart()
            return error
        return None

    def _advance(self) -> None:
        self._step_called_s = called_s = time.monotonic()
        began_s = self._returned_s if self._engine.is_ahead else called_s
        outcomes = self._engine.step(called_s)
        self._step_called_s = None
        load, now_s = self._engine.load(), time.monotonic()
        self._returned_s = now_s
        self._engine.record_step_time(now_s - began_s)
        ended = [FinishedRequest(outcome, now_s, load) for outcome in outcomes]
        self._num_failures = 0 if ended else self._num_failures
        stepped = Stepped(load, self._engine.new_tokens, ended, began_s, now_s)
        self._streams.deliver(stepped.new_tokens, ended)
        self._on_step(stepped)
        if self._engine.is_blocked:
            time.sleep(_BLOCKED_PAUSE_S)

    def _add_first(self, stream: EngineStream, add: AddRequests, arrival_s: float) -> None:
        stream.restart = lambda: add(self._engine, stream.request_ids, arrival_s)
        self._add(stream)

    def _add(self, stream: EngineStream) -> None:
        assert stream.restart is not None, "results come after the request was added"
        try:
            stream.restart()
        except TailraceError as error:
            self._cancel(stream.request_ids)
            self._streams.fail(stream, error)

    def _cancel(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._engine.cancel(request_id)


class Inbox:
    """Commands from any thread, in order, for the engine's owner thread.

    A command is either taken, or refused after closing.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the next three
        self._commands: deque[Command] = deque()
        self._stopping = False
        self._closed = False
        self._wake_up = threading.Event()

    def put(self, command: Command) -> bool:
        """Add a command and wake the owner. Returns False, and drops the command, if the inbox is closed."""
        with self._lock:
            if self._closed:
                return False
            self._commands.append(command)
        self._wake_up.set()
        return True

    def take(self, *, waits: bool) -> tuple[Command, ...]:
        """Return all commands; with `waits`, first sleep until there is one or `stop` is called."""
        if waits:
            self._wake_up.wait()
        self._wake_up.clear()
        with self._lock:
            commands = tuple(self._commands)
            self._commands.clear()
        return commands

    def stop(self) -> None:
        """Request that the owner closes the inbox when all work is done."""
        with self._lock:
            self._stopping = True
        self._wake_up.set()

    def close_if_done(self, *, has_work: bool) -> bool:
        """Close the inbox if `stop` was called and neither commands nor other work are left. Return whether closed."""
        with self._lock:
            self._closed = self._stopping and not self._commands and not has_work
            return self._closed

    def close(self) -> None:
        """Refuse all further commands and drop the pending commands."""
        with self._lock:
            self._closed = True
            self._commands.clear()
