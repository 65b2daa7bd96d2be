"""What a gateway keeps of the requests that it has answered."""

import gc

import pytest

from services.errors import DependencyUnavailable
from tests.unit.gateway.world import World

USERS = ("listed", "long", "short", "nobody")
NUM_REQUESTS = 100
UNAVAILABLE = DependencyUnavailable("it", 1.0)


async def num_objects_after(world: World, kind: str) -> int:
    """Return how many objects the collector tracks after so many requests with ids of their own, without what the fakes keep."""
    for number in range(NUM_REQUESTS):
        await world.recommend(USERS[number % len(USERS)], request_id=f"{kind} {number}")
    await world.plane.explanations.flush()
    world.llm.requests.clear()
    world.events.records.clear()
    world.impressions.records.clear()
    world.shelf.records.clear()
    UNAVAILABLE.__traceback__ = None  # grows each time that a fake raises it
    gc.collect()
    return len(gc.get_objects())


@pytest.mark.parametrize("fault", ["none", "store", "llm", "student", "log"])
async def test_an_answer_leaves_no_object_behind(world: World, fault: str) -> None:
    """A gateway keeps the id of a recent answer and one source for all answers of its kind, but no object for each, whatever is unavailable."""
    world.features.error = UNAVAILABLE if fault == "store" else None
    world.llm.error = UNAVAILABLE if fault == "llm" else None
    world.student.error = UNAVAILABLE if fault == "student" else None
    world.impressions.is_full = fault == "log"
    before = await num_objects_after(world, "first")

    assert await num_objects_after(world, "second") - before < NUM_REQUESTS // 4
