"""A stream's results: in order, all at once, and an error after the results before it."""

import asyncio

import pytest

from services.errors import DependencyAway
from services.llm.engine.outcome import NewToken
from services.llm.engine.text.parameters import SampledToken
from services.llm.serving.streams import EngineStream


def grown(token_id: int) -> NewToken:
    """Return a new token."""
    return NewToken("0.0", SampledToken(token_id), 0, 0.0)


async def test_results_come_in_order_and_at_once() -> None:
    """All results since the last call are returned together."""
    stream = EngineStream(("0.0",))
    stream.put(grown(1))
    stream.put(grown(2))
    first = await stream.take()
    stream.put(grown(3))

    assert [one.sampled.token_id for one in first] == [1, 2]
    assert [one.sampled.token_id for one in await stream.take()] == [3]


async def test_an_error_is_raised_after_the_results_before_it() -> None:
    """If the engine fails before the caller took its results, the caller gets both and does not wait for more."""
    stream = EngineStream(("0.0",))
    stream.put(grown(1))
    stream.put(DependencyAway("the engine", 1.0))

    assert [one.sampled.token_id for one in await stream.take()] == [1]
    for _ in range(2):
        with pytest.raises(DependencyAway):
            await asyncio.wait_for(stream.take(), 5.0)
