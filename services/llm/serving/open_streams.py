"""Which streams are owed news: from a request's asking until its end is told, its asker leaves, or the engine breaks.

Callers enter and leave in their event loops, the engine's thread tells. It knows no engine.
"""

import threading
from collections.abc import Iterable, Sequence

from services.errors import TailraceError
from services.llm.engine.outcome import Grown
from services.llm.serving.stream import Ended, EngineStream, Post


class OpenStreams:
    """The streams by the ids of their requests that have not ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: dict[str, EngineStream] = {}

    def enter(self, stream: EngineStream) -> None:
        """Owe a stream the news of all its requests."""
        with self._lock:
            self._streams.update(dict.fromkeys(stream.request_ids, stream))

    def leave(self, stream: EngineStream) -> list[str]:
        """Owe a stream nothing any more. Gives its requests that have not ended."""
        with self._lock:
            return [request_id for request_id in stream.request_ids if self._streams.pop(request_id, None)]

    def tell(self, grown: Sequence[Grown], ended: Sequence[Ended]) -> None:
        """Hand out what a step brought."""
        post = Post()
        with self._lock:
            for one in grown:
                if (stream := self._streams.get(one.request_id)) is not None:
                    post.add(stream, one)
            for end in ended:
                if (stream := self._streams.pop(end.outcome.request_id, None)) is not None:
                    post.add(stream, end)
        post.send()

    def fail(self, stream: EngineStream, error: TailraceError) -> None:
        """Tell a stream that nothing more comes, and why."""
        self.leave(stream)
        _send([stream], error)

    def fail_all(self, error: TailraceError) -> None:
        """Tell every stream that nothing more comes, and why."""
        with self._lock:
            unanswered = {id(stream): stream for stream in self._streams.values()}
            self._streams.clear()
        _send(unanswered.values(), error)


def _send(streams: Iterable[EngineStream], error: TailraceError) -> None:
    post = Post()
    for stream in streams:
        post.add(stream, error)
    post.send()
