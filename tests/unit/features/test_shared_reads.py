"""Reads of the store that are sent together."""

import asyncio
from collections.abc import Sequence

import pytest

from services.features.shared_reads import SharedReads
from tests.support.wait import until


class Store:
    """Answers an exchange when it is told to; doubles what is asked."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.answers: list[asyncio.Future[None]] = []
        self.num_cancelled = 0

    async def exchange(self, asked: Sequence[int]) -> Sequence[int]:
        """Wait for the answer of this exchange."""
        self.asked.append(list(asked))
        self.answers.append(asyncio.get_running_loop().create_future())
        try:
            await self.answers[-1]
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        return [2 * number for number in asked]

    async def answer(self, index: int, error: Exception | None = None) -> None:
        """End an exchange, after it was sent."""
        await until(lambda: len(self.answers) > index, 5)
        if error is None:
            self.answers[index].set_result(None)
        else:
            self.answers[index].set_exception(error)


def begin(reads: SharedReads[int, int], *numbers: int) -> list["asyncio.Task[int]"]:
    return [asyncio.create_task(reads.read(number)) for number in numbers]


async def test_a_read_that_comes_alone_is_sent_at_once() -> None:
    """The first reads have an exchange of their own; later reads share the next exchange, in order."""
    store = Store()
    tasks = begin(SharedReads(store.exchange), *range(6))
    for index in range(3):
        await store.answer(index)

    assert await asyncio.gather(*tasks) == [0, 2, 4, 6, 8, 10]
    assert store.asked == [[0], [1], [2, 3, 4, 5]]


async def test_an_exchange_is_bounded() -> None:
    """A burst is read in exchanges of at most 64."""
    store = Store()
    tasks = begin(SharedReads(store.exchange), *range(200))
    for index in range(6):
        await store.answer(index)

    assert await asyncio.gather(*tasks) == [2 * number for number in range(200)]
    assert [len(asked) for asked in store.asked] == [1, 1, 64, 64, 64, 6]


async def test_an_error_reaches_all_callers_of_its_exchange_only() -> None:
    """A failed exchange fails its own reads, and the next exchange is sent."""
    store = Store()
    tasks = begin(SharedReads(store.exchange), *range(4))
    await store.answer(0, OSError("reset"))
    await store.answer(1)
    await store.answer(2)
    failed, *answered = await asyncio.gather(*tasks, return_exceptions=True)

    assert isinstance(failed, OSError)
    assert answered == [2, 4, 6]


async def test_exchanges_that_nobody_awaits_hold_up_nothing() -> None:
    """When all callers of the silent exchanges have gone, they are cancelled and waiting reads are sent."""
    store = Store()
    reads = SharedReads(store.exchange)
    silent = begin(reads, 0, 1)
    await until(lambda: len(store.asked) == 2, 5)
    waiting, given_up = begin(reads, 2, 3)
    await asyncio.sleep(0)
    for task in (*silent, given_up):
        task.cancel()
    await store.answer(2)

    assert await waiting == 4
    assert store.asked == [[0], [1], [2]]
    assert store.num_cancelled == 2
    with pytest.raises(asyncio.CancelledError):
        await given_up
