"""The text writer's bounds: places by priority, a strained gateway, the breaker, the deadline."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import pytest

from services.contracts.access import Priority
from services.contracts.text import FinishReason, TextBegan, TextDone, TextEvent, TextModel, TextPiece, TextRequest
from services.errors import DeadlineExceeded, DependencyAway, InvalidRequest, Overloaded
from services.gateway.text.tier import TextLimits, TextTier
from services.router.breaker import Breaker
from tests.support.clock import Clock
from tests.support.parrot import MODEL, Parrot
from tests.unit.gateway.world import World, make_world

NUM_PLACES = 8


@pytest.fixture
def clock() -> Clock:
    """The tier's time, wall clock included."""
    return Clock()


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Metrics and load of a plane that is not started."""
    return make_world(tmp_path)


@pytest.fixture
def parrot() -> Parrot:
    """Who writes."""
    return Parrot()


def tier_of(writer: object, world: World, clock: Clock) -> TextTier:
    """A tier with eight places and a breaker that opens at the second failure for ten seconds."""
    return TextTier(
        writer=writer,  # type: ignore[arg-type]
        breaker=Breaker(2, 10.0),
        load=world.load,
        report=world.plane.text_report,
        limits=TextLimits(),
        num_places=NUM_PLACES,
        clock=clock,
        wall_clock=clock,
    )


@pytest.fixture
def tier(parrot: Parrot, world: World, clock: Clock) -> TextTier:
    """The parrot behind its bounds."""
    return tier_of(parrot, world, clock)


def request(**fields: object) -> TextRequest:
    """A request for two words."""
    wanted = {"request_id": "r", "model": MODEL, "prompt": "a b", "max_tokens": 2, **fields}
    return TextRequest(**wanted)  # type: ignore[arg-type]


async def all_of(tier: TextTier, asked: TextRequest) -> list[TextEvent]:
    """Everything that is written."""
    async with aclosing(tier.write(asked, "chat")) as events:
        return [event async for event in events]


@pytest.mark.parametrize(
    ("priority", "num_places"), [(Priority.HIGH, 8), (Priority.NORMAL, 6), (Priority.LOW, 4), (-5, 8), (9, 4)]
)
async def test_the_last_places_are_kept_for_higher_priorities(
    tier: TextTier, world: World, priority: int, num_places: int
) -> None:
    """Choices fill places; one too many is refused with the time to come back, and a place that is left is free."""
    writing = [tier.write(request(priority=priority), "chat") for _ in range(num_places)]
    for one in writing:
        await anext(one)

    with pytest.raises(Overloaded):
        await all_of(tier, request(priority=priority))
    assert world.metric("tailrace_text_in_flight") == num_places
    await writing[0].aclose()
    assert len(await all_of(tier, request(priority=priority))) == 4
    for one in writing:
        await one.aclose()
    assert world.metric("tailrace_text_in_flight") == 0


async def test_choices_count_one_by_one(tier: TextTier) -> None:
    """A request for more choices than there are places left is refused whole."""
    first = tier.write(request(n=4, priority=Priority.NORMAL), "chat")
    await anext(first)

    with pytest.raises(Overloaded):
        await all_of(tier, request(n=3, priority=Priority.NORMAL))
    assert len(await all_of(tier, request(n=2, priority=Priority.NORMAL))) == 6
    await first.aclose()


async def test_a_strained_gateway_takes_no_text(tier: TextTier, world: World, parrot: Parrot) -> None:
    """Where recommendations are answered from memory, text is refused: low priority first."""
    world.strain(1)

    with pytest.raises(Overloaded):
        await all_of(tier, request(priority=Priority.LOW))
    assert parrot.requests == []
    assert len(await all_of(tier, request(priority=Priority.NORMAL))) == 4


async def test_failures_in_a_row_open_the_breaker_and_one_trial_closes_it(
    tier: TextTier, world: World, parrot: Parrot, clock: Clock
) -> None:
    """While it is open nobody is asked; afterwards one is, and all are again when that went well."""
    parrot.error = DependencyAway("text", 1)
    for _ in range(2):
        with pytest.raises(DependencyAway):
            await all_of(tier, request())
    num_asked = len(parrot.requests)

    with pytest.raises(DependencyAway):
        await all_of(tier, request())
    assert (len(parrot.requests), world.metric("tailrace_text_breaker_open")) == (num_asked, 1)
    clock.now_s += 11
    parrot.error = None
    assert len(await all_of(tier, request())) == 4
    assert len(await all_of(tier, request())) == 4
    assert world.metric("tailrace_text_breaker_open") == 0


@pytest.mark.parametrize(
    "error", [Overloaded("text", 1), InvalidRequest("prompt", "long", "cut it"), DeadlineExceeded("text")]
)
async def test_refusals_and_lateness_are_no_failures(tier: TextTier, parrot: Parrot, error: Exception) -> None:
    """They say nothing of the writer's health."""
    parrot.error = error
    for _ in range(5):
        with pytest.raises(type(error)):
            await all_of(tier, request())

    assert len(parrot.requests) == 5


async def test_who_leaves_is_no_failure(tier: TextTier, parrot: Parrot) -> None:
    """Closing midway closes the writer and counts for nothing."""
    for _ in range(5):
        writing = tier.write(request(), "chat")
        await anext(writing)
        await writing.aclose()

    assert parrot.num_open == 0
    assert len(await all_of(tier, request())) == 4


async def test_a_writer_that_is_silent_after_the_deadline_is_ended(
    tier: TextTier, parrot: Parrot, clock: Clock
) -> None:
    """What is written stays, open choices end with DEADLINE, and the writer is closed."""
    parrot.hangs_after = 1
    events = await all_of(tier, request(deadline_unix_s=clock.now_s - 0.2))

    assert [event for event in events if isinstance(event, TextPiece)][1:] == [
        TextPiece(index=0, text="", num_tokens=0, finish_reason=FinishReason.DEADLINE)
    ]
    assert events[-1] == TextDone(num_prompt_tokens=2, num_cached_tokens=1, num_completion_tokens=1)
    assert parrot.num_open == 0


async def test_nothing_written_by_the_deadline_is_an_error(tier: TextTier, parrot: Parrot, clock: Clock) -> None:
    """There is nothing to give."""
    parrot.hangs_after = 0

    with pytest.raises(DeadlineExceeded):
        await all_of(tier, request(deadline_unix_s=clock.now_s - 0.2))
    assert parrot.num_open == 0


class Breaksoff:
    """A writer whose text just stops."""

    async def models(self) -> tuple[TextModel, ...]:
        """Return none."""
        return ()

    async def write(self, _: TextRequest) -> AsyncGenerator[TextEvent, None]:
        """Begin, and no more."""
        yield TextBegan(num_prompt_tokens=1)


async def test_a_text_without_an_end_is_a_failure(world: World, clock: Clock) -> None:
    """A cut text is never taken for a whole one."""
    with pytest.raises(DependencyAway):
        await all_of(tier_of(Breaksoff(), world, clock), request())
