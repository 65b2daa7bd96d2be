"""A benchmark checks that its stack is ready before it begins."""

import pytest

from benchmarks.load.clients import RestClient
from benchmarks.load.own_stack import require_ready


class Door(RestClient):
    """A client that returns these statuses, one after another."""

    def __init__(self, *statuses: int) -> None:
        super().__init__("localhost", 8000)
        self._statuses = iter(statuses)

    async def call(self, method: bytes, path: bytes, body: bytes) -> tuple[int, bytes]:
        """Return the next status."""
        return next(self._statuses), b""


@pytest.mark.parametrize(
    ("statuses", "words"),
    [
        ((0,), "no stack is ready at localhost:8000; run `tailrace up` first"),
        ((503,), "no stack is ready at localhost:8000; run `tailrace up` first"),
        ((200, 401), "localhost:8000 answers 401: it requires an API key"),
        ((200, 403), "localhost:8000 answers 403: it requires an API key"),
    ],
)
async def test_a_benchmark_ends_without_a_stack_that_accepts_it(statuses: tuple[int, ...], words: str) -> None:
    """The error has one line with the fix; a ready stack that accepts the caller is none."""
    await require_ready(Door(200, 200))
    with pytest.raises(SystemExit, match=words):
        await require_ready(Door(*statuses))
