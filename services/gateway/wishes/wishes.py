"""Reads the wish of a request: its bundle's reader and, for a search, the titles. Each learns new items by itself."""

import asyncio

from services.contracts.recommend import RecommendRequest, SearchFor
from services.gateway.periodic_task import PeriodicTask
from services.gateway.request.live_bundle import Live
from services.gateway.request.wish import ReadWish
from services.gateway.wishes.readers import WishReaders
from services.gateway.wishes.search import TitleSearch

REFRESH_S = 0.25


class Wishes:
    """The readers and the title search of one process."""

    def __init__(self, readers: WishReaders, titles: TitleSearch) -> None:
        self._readers = readers
        self._titles = titles
        self._refreshing = (
            PeriodicTask("wish_items", readers.refresh, REFRESH_S),
            PeriodicTask("search_titles", titles.refresh, REFRESH_S),  # does not wait for a reader of many items
        )

    async def start(self) -> None:
        """Start handing new items to both."""
        for task in self._refreshing:
            task.start()

    async def stop(self) -> None:
        """Stop; wishes are still read."""
        for task in self._refreshing:
            await task.stop()

    async def refresh(self) -> None:
        """Hand new items to both now."""
        await asyncio.gather(self._readers.refresh(), self._titles.refresh())

    async def read(self, request: RecommendRequest, live: Live, timeout_s: float) -> ReadWish:
        """Read the wishes of a request, and search its words in titles, within `timeout_s`. Never raises."""
        reading = self._readers.read(request.wishes, live, timeout_s)
        if not isinstance(request.subject, SearchFor):
            return ReadWish(await reading)
        return ReadWish(*await asyncio.gather(reading, self._titles.matches(request.subject.q, live, timeout_s)))
