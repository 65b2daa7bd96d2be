"""Streams of engine results to callers: new tokens, then the end of each request, or the error that ends the stream.

A stream lives in its caller's event loop. The engine's thread delivers the results of a step to all streams of a loop
with a single wake-up. The module does not know the engine.
"""

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from services.contracts.engine_load import EngineLoad
from services.errors import TailraceError
from services.llm.engine.outcome import EngineOutcome, NewToken


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """The outcome of a request, the monotonic second at which its last step ended, and the engine's load after it."""

    outcome: EngineOutcome
    finished_s: float
    load: EngineLoad

    @property
    def started_s(self) -> float:
        """Start of its first step; its end if it never ran."""
        return self.finished_s if self.outcome.started_s is None else self.outcome.started_s

    @property
    def decoding_s(self) -> float:
        """Time at which its prompt was computed; its end if it never was."""
        return self.finished_s if self.outcome.decoding_s is None else self.outcome.decoding_s


StreamItem = NewToken | FinishedRequest | TailraceError


class EngineStream:
    """The results of one caller's requests.

    `request_ids` are the engine's ids, in the order of the caller's requests.
    """

    def __init__(self, request_ids: tuple[str, ...]) -> None:
        self.request_ids = request_ids
        self.restart: Callable[[], object] | None = None
        """Adds the requests to the engine again; None once a result was delivered. Only for the engine's thread."""
        self.loop = asyncio.get_running_loop()
        self._items: list[NewToken | FinishedRequest] = []
        self._error: TailraceError | None = None
        self._has_items = asyncio.Event()

    async def take(self) -> list[NewToken | FinishedRequest]:
        """Wait for results and return all available results.

        Raises the engine's refusal, or DependencyUnavailable when the engine failed.
        """
        await self._has_items.wait()
        if self._error is None:
            self._has_items.clear()
        elif not self._items:
            raise self._error
        items, self._items = self._items, []
        return items

    def put(self, item: StreamItem) -> None:
        """Add a result; an error is raised after all results before it. Call only in the stream's event loop."""
        if isinstance(item, TailraceError):
            self._error = item
        else:
            self._items.append(item)
        self._has_items.set()


class OpenStreams:
    """The streams of all requests in flight, by request id.

    Callers add and remove streams in their event loops; the engine's thread delivers.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: dict[str, EngineStream] = {}

    def add(self, stream: EngineStream) -> None:
        """Deliver all later results of the stream's requests to it."""
        with self._lock:
            self._streams.update(dict.fromkeys(stream.request_ids, stream))

    def remove(self, stream: EngineStream) -> list[str]:
        """Stop delivering to a stream. Returns its requests that have not ended."""
        with self._lock:
            return [request_id for request_id in stream.request_ids if self._streams.pop(request_id, None)]

    def all(self) -> list[EngineStream]:
        """Return each stream once, the oldest first."""
        with self._lock:
            return self._each()

    def deliver(self, new_tokens: Sequence[NewToken], ended: Sequence[FinishedRequest]) -> None:
        """Deliver the results of a step."""
        batch = _Delivery()
        with self._lock:
            for token in new_tokens:
                if (stream := self._streams.get(token.request_id)) is not None:
                    batch.add(stream, token)
            for end in ended:
                if (stream := self._streams.pop(end.outcome.request_id, None)) is not None:
                    batch.add(stream, end)
        batch.send()

    def fail(self, stream: EngineStream, error: TailraceError) -> None:
        """End a stream with an error."""
        self.remove(stream)
        _send_error([stream], error)

    def fail_all(self, error: TailraceError) -> None:
        """End every stream with an error."""
        with self._lock:
            unfinished = self._each()
            self._streams.clear()
        _send_error(unfinished, error)

    def _each(self) -> list[EngineStream]:
        return list({id(stream): stream for stream in self._streams.values()}.values())


class _Delivery:
    """Results for many streams, handed over with one wake-up per event loop."""

    def __init__(self) -> None:
        self._by_loop: dict[asyncio.AbstractEventLoop, list[tuple[EngineStream, StreamItem]]] = {}

    def add(self, stream: EngineStream, item: StreamItem) -> None:
        stream.restart = None
        self._by_loop.setdefault(stream.loop, []).append((stream, item))

    def send(self) -> None:
        for loop, items in self._by_loop.items():
            with suppress(RuntimeError):  # the caller's loop is closed
                loop.call_soon_threadsafe(_put_all, items)


def _put_all(items: Iterable[tuple[EngineStream, StreamItem]]) -> None:
    for stream, item in items:
        stream.put(item)


def _send_error(streams: Iterable[EngineStream], error: TailraceError) -> None:
    batch = _Delivery()
    for stream in streams:
        batch.add(stream, error)
    batch.send()
