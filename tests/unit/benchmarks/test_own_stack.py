"""A benchmark that could measure nothing says so before it begins."""

import pytest

from benchmarks.load.clients import RestClient
from benchmarks.load.own_stack import require_ready


class Door(RestClient):
    """Answers with these statuses, one after another, and keeps nobody waiting."""

    def __init__(self, *statuses: int) -> None:
        super().__init__("localhost", 8000)
        self._statuses = iter(statuses)

    async def call(self, method: bytes, path: bytes, body: bytes) -> tuple[int, bytes]:
        """Return the next status."""
        return next(self._statuses), b""


async def test_a_stack_that_answers_is_ready() -> None:
    """Ready by its own word, and it takes this caller."""
    await require_ready(Door(200, 200))


@pytest.mark.parametrize(
    ("statuses", "words"),
    [
        ((0,), "no stack is ready at localhost:8000; run `tailrace up` first"),
        ((503,), "no stack is ready at localhost:8000; run `tailrace up` first"),
        ((200, 401), "localhost:8000 answers 401: it requires an API key"),
        ((200, 403), "localhost:8000 answers 403: it requires an API key"),
    ],
)
async def test_a_stack_that_would_answer_nothing_ends_the_benchmark(statuses: tuple[int, ...], words: str) -> None:
    """In one line, with what to do."""
    with pytest.raises(SystemExit, match=words):
        await require_ready(Door(*statuses))
