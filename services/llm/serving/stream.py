"""What the engine brings to one asker, in order: new tokens, ends, or why nothing comes any more.

It lives in the asker's event loop. The engine's thread hands over all that a step brought, to all askers of one loop, by a
single wake-up.
"""

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from services.contracts.rank import EngineLoad
from services.errors import TailraceError
from services.llm.engine.outcome import Grown, Outcome


@dataclass(frozen=True, slots=True)
class Ended:
    """An outcome with the monotonic second at which its last step ended and the load after it."""

    outcome: Outcome
    finished_s: float
    load: EngineLoad

    @property
    def started_s(self) -> float:
        """When its first step began; its end where it never had one."""
        return self.finished_s if self.outcome.started_s is None else self.outcome.started_s

    @property
    def decoding_s(self) -> float:
        """When its prompt was done; its end where it never was."""
        return self.finished_s if self.outcome.decoding_s is None else self.outcome.decoding_s


News = Grown | Ended | TailraceError


class EngineStream:
    """One asker's news. `request_ids` are the engine's names of what was asked, in the order in which it was."""

    def __init__(self, request_ids: tuple[str, ...]) -> None:
        self.request_ids = request_ids
        self.loop = asyncio.get_running_loop()
        self._news: list[Grown | Ended] = []
        self._error: TailraceError | None = None
        self._arrived = asyncio.Event()

    async def take(self) -> list[Grown | Ended]:
        """Wait for news and give all there are. Raises what the engine refused with, or DependencyAway when it broke."""
        await self._arrived.wait()
        if self._error is None:
            self._arrived.clear()
        elif not self._news:
            raise self._error
        news, self._news = self._news, []
        return news

    def put(self, news: News) -> None:
        """Add news; an error is told after all that came before it. Only in the asker's loop."""
        if isinstance(news, TailraceError):
            self._error = news
        else:
            self._news.append(news)
        self._arrived.set()


class Post:
    """Collects news for many askers in the engine's thread, and hands them over with one wake-up for each event loop."""

    def __init__(self) -> None:
        self._by_loop: dict[asyncio.AbstractEventLoop, list[tuple[EngineStream, News]]] = {}

    def add(self, stream: EngineStream, news: News) -> None:
        """Add news for an asker."""
        self._by_loop.setdefault(stream.loop, []).append((stream, news))

    def send(self) -> None:
        """Hand everything over. An asker whose loop has ended hears nothing."""
        for loop, letters in self._by_loop.items():
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_deliver, letters)


def _deliver(letters: Iterable[tuple[EngineStream, News]]) -> None:
    for stream, news in letters:
        stream.put(news)
