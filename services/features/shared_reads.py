"""Sends reads of the store together while other reads are under way.

Under load many requests read at once. With a connection for each, most requests open theirs first, and each reply on
the way waits for its turn of the event loop: reads took twice a deadline in a trace. So at most two exchanges run at a
time, and the next contains all reads that have come meanwhile. A read that comes alone is sent at once.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

Asked = TypeVar("Asked")
Found = TypeVar("Found")
_MAX_EXCHANGES = 2
_MAX_READS = 64
"""Of one exchange, whose reply is parsed in one turn of the loop."""


class SharedReads(Generic[Asked, Found]):
    """Owns the waiting reads and the running exchanges. `exchange` returns a result for each read, in order."""

    def __init__(self, exchange: Callable[[Sequence[Asked]], Awaitable[Sequence[Found]]]) -> None:
        self._exchange = exchange
        self._waiting: list[tuple[Asked, asyncio.Future[Found]]] = []
        self._running: dict[asyncio.Task[None], list[asyncio.Future[Found]]] = {}

    async def read(self, asked: Asked) -> Found:
        """Return the result of a read. Raises the error of its exchange, which ends when no caller waits for it."""
        result: asyncio.Future[Found] = asyncio.get_running_loop().create_future()
        self._waiting.append((asked, result))
        self._send()
        try:
            return await result
        except asyncio.CancelledError:
            self._cancel_abandoned()
            raise

    def _send(self) -> None:
        self._waiting = [one for one in self._waiting if not one[1].done()]
        while self._waiting and len(self._running) < _MAX_EXCHANGES:
            batch, self._waiting = self._waiting[:_MAX_READS], self._waiting[_MAX_READS:]
            task = asyncio.get_running_loop().create_task(self._run(batch))
            self._running[task] = [result for _, result in batch]
            task.add_done_callback(self._ended)

    async def _run(self, batch: Sequence[tuple[Asked, asyncio.Future[Found]]]) -> None:
        try:
            found = await self._exchange([asked for asked, _ in batch])
            for (_, result), value in zip(batch, found, strict=True):
                if not result.done():
                    result.set_result(value)
        except Exception as error:  # noqa: BLE001 - each caller raises it
            for _, result in batch:
                if not result.done():
                    result.set_exception(error)
                    result.exception()  # its caller may have been cancelled meanwhile

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._running.pop(task, None)
        self._send()

    def _cancel_abandoned(self) -> None:
        """Cancel exchanges without a waiting caller, not awaiting them: the next reads need not wait for them."""
        for task, results in list(self._running.items()):
            if all(result.done() for result in results):
                del self._running[task]
                task.cancel()
                self._send()
