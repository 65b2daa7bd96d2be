"""The limits around the text writer: slots by priority, shedding, the breaker and the deadline."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, nullcontext

import pytest

from services.contracts.access import Priority
from services.contracts.text import FinishReason, TextBegan, TextDone, TextEvent, TextPiece, TextRequest
from services.errors import DeadlineExceeded, DependencyUnavailable, InvalidRequest, Overloaded, SchemaViolated
from services.gateway.text.deadline import in_time
from services.gateway.text.tier import TextLimits, TextTier
from tests.support.clock import Clock
from tests.support.engine.parrot import MODEL, Parrot
from tests.unit.gateway.world import World, let_write


@pytest.fixture
def tier(parrot: Parrot, world: World, clock: Clock) -> TextTier:
    return let_write(world, parrot, TextLimits(), clock)


def request(**fields: object) -> TextRequest:
    """Build a request for two words."""
    merged = {"request_id": "r", "model": MODEL, "prompt": "a b", "max_tokens": 2, **fields}
    return TextRequest(**merged)  # type: ignore[arg-type]


async def all_of(tier: TextTier, wanted: TextRequest) -> list[TextEvent]:
    async with aclosing(tier.write(wanted, "chat")) as events:
        return [event async for event in events]


@pytest.mark.parametrize(
    ("priority", "num_places"), [(Priority.HIGH, 8), (Priority.NORMAL, 6), (Priority.LOW, 4), (-5, 8), (9, 4)]
)
async def test_the_last_places_are_kept_for_higher_priorities(
    tier: TextTier, world: World, priority: int, num_places: int
) -> None:
    """Requests beyond the priority's slots are rejected, and a released slot can be reused."""
    writing = [tier.write(request(priority=priority), "chat") for _ in range(num_places)]
    for task in writing:
        await anext(task)

    with pytest.raises(Overloaded):
        await all_of(tier, request(priority=priority))
    assert world.metric("tailrace_text_in_flight") == num_places
    await writing[0].aclose()
    assert len(await all_of(tier, request(priority=priority))) == 4
    for task in writing:
        await task.aclose()
    assert world.metric("tailrace_text_in_flight") == 0


async def test_each_choice_fills_a_place(tier: TextTier) -> None:
    """A request for more choices than free slots is rejected as a whole."""
    first = tier.write(request(n=4, priority=Priority.NORMAL), "chat")
    await anext(first)

    with pytest.raises(Overloaded):
        await all_of(tier, request(n=3, priority=Priority.NORMAL))
    assert len(await all_of(tier, request(n=2, priority=Priority.NORMAL))) == 6
    await first.aclose()


async def test_a_strained_gateway_refuses_text(tier: TextTier, world: World, parrot: Parrot) -> None:
    """Text is rejected under the strain that sheds recommendations, low priority first."""
    world.strain(1)

    with pytest.raises(Overloaded):
        await all_of(tier, request(priority=Priority.LOW))
    assert parrot.requests == []
    assert len(await all_of(tier, request(priority=Priority.NORMAL))) == 4


async def test_failures_in_a_row_open_the_breaker_and_one_trial_closes_it(
    tier: TextTier, world: World, parrot: Parrot, clock: Clock
) -> None:
    """While the breaker is open the writer is not called; later a single trial is sent, and its success closes it."""
    parrot.error = DependencyUnavailable("text", 1)
    for _ in range(2):
        with pytest.raises(DependencyUnavailable):
            await all_of(tier, request())
    num_called = len(parrot.requests)

    with pytest.raises(DependencyUnavailable):
        await all_of(tier, request())
    assert (len(parrot.requests), world.metric("tailrace_text_breaker_open")) == (num_called, 1)
    clock.now_s += 11
    parrot.error = None
    assert len(await all_of(tier, request())) == 4
    assert len(await all_of(tier, request())) == 4
    assert world.metric("tailrace_text_breaker_open") == 0


@pytest.mark.parametrize(
    "error", [Overloaded("text", 1), InvalidRequest("prompt", "long", "cut it"), DeadlineExceeded("text"), None]
)
async def test_refusals_lateness_and_disconnects_are_no_failures(
    tier: TextTier, parrot: Parrot, error: Exception | None
) -> None:
    """Rejections, late texts and disconnects do not open the breaker; closing a text midway closes the writer."""
    parrot.error = error
    for _ in range(5):
        writing = tier.write(request(), "chat")
        with nullcontext() if error is None else pytest.raises(type(error)):
            await anext(writing)
        await writing.aclose()

    assert (len(parrot.requests), parrot.num_open) == (5, 0)


class TruncatedWriter(Parrot):
    """A writer whose stream ends without a final event."""

    async def write(self, request: TextRequest) -> AsyncGenerator[TextEvent, None]:
        yield TextBegan(num_prompt_tokens=1)


async def test_a_text_without_an_end_is_a_failure(world: World, clock: Clock) -> None:
    """A truncated text is never served as complete."""
    with pytest.raises(DependencyUnavailable):
        await all_of(let_write(world, TruncatedWriter(), TextLimits(), clock), request())


class LateWriter(Parrot):
    """A writer that continues after the deadline."""

    async def write(self, request: TextRequest) -> AsyncGenerator[TextEvent, None]:
        """Write two pieces with a pause in between."""
        yield TextPiece(index=0, text="a", num_tokens=1)
        await asyncio.sleep(0.1)
        yield TextPiece(index=0, text="b", num_tokens=1, finish_reason=FinishReason.LENGTH)
        yield TextDone(num_prompt_tokens=1, num_cached_tokens=0, num_completion_tokens=2)


@pytest.mark.parametrize(("grace_s", "texts"), [(0.0, ["a", ""]), (60.0, ["a", "b"])])
async def test_a_server_that_knows_no_deadline_is_left_at_the_deadline(
    world: World, clock: Clock, grace_s: float, texts: list[str]
) -> None:
    """Without grace the text so far is the answer; our own writer has time to report what it ended itself."""
    tier = let_write(world, LateWriter(), TextLimits(grace_s=grace_s), clock)

    events = await all_of(tier, request(deadline_unix_s=0.0 if not grace_s else time.time()))

    assert [event.text for event in events if isinstance(event, TextPiece)] == texts


@pytest.mark.parametrize("step_s", [7_200.0, -7_200.0])
async def test_a_step_of_the_wall_clock_neither_ends_nor_prolongs_a_text(step_s: float) -> None:
    """The deadline is counted on the event loop's clock from the text's beginning."""
    wall, late = Clock(), LateWriter()
    for deadline_s, texts in ((60.0, ["a", "b"]), (0.05, ["a", ""])):
        wanted = request(deadline_unix_s=wall.now_s + deadline_s)
        pieces = []
        async with aclosing(in_time(late, wanted, wall, 0.0)) as events:
            async for event in events:
                pieces += [event.text] if isinstance(event, TextPiece) else []
                wall.now_s += step_s * (len(pieces) == 1)

        assert pieces == texts


async def test_a_violated_schema_is_counted(tier: TextTier, world: World, parrot: Parrot) -> None:
    """A schema violation is our error, not a failure of the writer."""
    parrot.error = SchemaViolated("/lr: 0 is too small")
    for number in range(1, 4):
        with pytest.raises(SchemaViolated) as violation:
            await all_of(tier, request())

        assert violation.value.is_ours
        assert world.metric("tailrace_text_schema_violations_total") == number
    assert world.metric("tailrace_text_breaker_open") == 0
