"""Which timeouts show a silent server, and which a late event loop, on a loop whose time is virtual."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from services.features.redis_calls import LoopStalled, within

LIMIT_S = 1.0


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose time passes only while it has nothing to do, or by `stall`."""

    now_s = 0.0

    def __init__(self) -> None:
        super().__init__()
        select = self._selector.select

        def advance(timeout_s: float | None = None) -> Any:
            self.now_s += timeout_s or 0.0
            return select(0)

        self._selector.select = advance

    def time(self) -> float:
        return self.now_s

    def stall(self, seconds: float) -> None:
        """Let time pass without a turn of the loop."""
        self.now_s += seconds


def outcome(stalls: Sequence[tuple[float, float]], replies: Callable[[], Awaitable[Any]]) -> tuple[str, float]:
    """Return how a call ends on a loop that stalls at these times for so long, and when."""
    loop = VirtualLoop()

    async def call() -> str:
        await replies()
        return "reply"

    async def run() -> str:
        for at_s, seconds in stalls:
            loop.call_later(at_s, loop.stall, seconds)
        try:
            return await within(LIMIT_S, call())
        except TimeoutError as error:
            return type(error).__name__

    try:
        return loop.run_until_complete(run()), loop.now_s
    finally:
        loop.close()


@pytest.mark.parametrize(
    "stalls",
    [
        pytest.param([], id="no stall"),
        pytest.param([(0.1, 0.2)], id="a short stall"),
        pytest.param([(0.05 + number / 10, 0.01) for number in range(9)], id="a busy loop"),
    ],
)
def test_silence_on_a_loop_that_could_read_is_a_timeout(stalls: Sequence[tuple[float, float]]) -> None:
    """Without a reply the call ends at its limit, as a failure of the server."""
    assert outcome(stalls, asyncio.Event().wait) == (TimeoutError.__name__, pytest.approx(LIMIT_S))


@pytest.mark.parametrize(
    "stalls",
    [
        pytest.param([(0.0, 1.0)], id="until the limit"),
        pytest.param([(0.1, 0.7)], id="and over before the limit"),
        pytest.param([(0.1, 30.0)], id="far beyond the limit"),
        pytest.param([(number / 4, 0.12) for number in range(4)], id="four short ones"),
    ],
)
def test_silence_on_a_stalled_loop_is_no_failure_of_the_server(stalls: Sequence[tuple[float, float]]) -> None:
    """A limit that passed while the loop was late ends a quarter later, as a stall."""
    how, ended_s = outcome(stalls, asyncio.Event().wait)

    assert how == LoopStalled.__name__
    assert ended_s <= max(LIMIT_S, sum(stalls[-1])) + LIMIT_S / 4


def test_a_reply_that_lies_unread_is_read_after_the_stall() -> None:
    """A reply of several exchanges, the last of them unread when the limit passes, is returned."""

    async def exchanges() -> None:
        for _ in range(5):
            await asyncio.sleep(0.02)

    assert outcome([(0.01, 5.0)], exchanges)[0] == "reply"
