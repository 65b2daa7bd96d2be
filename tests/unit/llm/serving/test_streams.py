"""One asker's news: in order, all there are at once, and an error after all that came before it."""

import asyncio

import pytest

from services.errors import DependencyAway
from services.llm.engine.outcome import NewToken
from services.llm.engine.text.parameters import SampledToken
from services.llm.serving.streams import EngineStream


def grown(token_id: int) -> NewToken:
    """Build the news of one token."""
    return NewToken("0.0", SampledToken(token_id), 0, 0.0)


async def test_news_come_in_order_and_at_once() -> None:
    """All that came since the last time is given together."""
    stream = EngineStream(("0.0",))
    stream.put(grown(1))
    stream.put(grown(2))
    first = await stream.take()
    stream.put(grown(3))

    assert [one.sampled.token_id for one in first] == [1, 2]
    assert [one.sampled.token_id for one in await stream.take()] == [3]


async def test_an_error_right_behind_news_is_told_after_them() -> None:
    """Where the engine broke before the asker could take what came, it still hears both, and does not wait for more."""
    stream = EngineStream(("0.0",))
    stream.put(grown(1))
    stream.put(DependencyAway("the engine", 1.0))

    assert [one.sampled.token_id for one in await stream.take()] == [1]
    for _ in range(2):
        with pytest.raises(DependencyAway):
            await asyncio.wait_for(stream.take(), 5.0)
