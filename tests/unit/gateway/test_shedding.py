"""Overload at the data plane: the less important are answered from memory, and nobody is asked for them."""

import asyncio
import time
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry, Gauge
from structlog.testing import capture_logs

from services.contracts.access import ANYONE, Priority
from services.contracts.recommend import Filters, Reason, Recommendation, RecommendRequest, Tier
from services.errors import Overloaded
from services.gateway.request.load_monitor import LoadMonitor
from services.router.admission import Admission, AdmissionLimits, Verdict
from tests.support.wait import until
from tests.unit.gateway.world import World

NUM_LOOKS = 10
"""Enough for the watch to make up its mind."""


async def ask(world: World, priority: Priority) -> Recommendation:
    """Ask as a caller of this priority, for a user whom the LLM answers in calm times."""
    request = RecommendRequest(request_id="r", user_id="long", k=3)
    return await world.plane.recommend(request, time.monotonic(), "rest", replace(ANYONE, priority=priority))


async def test_low_priority_is_answered_from_memory_while_the_others_are_served(world: World) -> None:
    """One unit of strain: the low caller gets popularity at once, with neither features nor LLM asked for it."""
    world.strain(1)
    world.features.error = ZeroDivisionError()

    shed = await ask(world, Priority.LOW)
    world.features.error = None
    served = [await ask(world, priority) for priority in (Priority.HIGH, Priority.NORMAL)]

    assert (shed.tier, shed.reason, len(shed.items)) == (Tier.POPULAR, Reason.SHED, 3)
    assert [answer.reason for answer in served] == [Reason.LLM_IN_TIME] * 2
    assert len(world.llm.requests) == 2


async def test_an_answer_from_memory_is_counted_and_leaves_no_impression(world: World) -> None:
    """The counters know of it; neither Kafka nor the log hears of it, while of a served one both do."""
    world.strain(1)

    with capture_logs() as said_of_shed:
        await ask(world, Priority.LOW)
    with capture_logs() as said_of_served:
        await ask(world, Priority.HIGH)
    await asyncio.sleep(0)  # impressions are offered after the answer

    labels = {"door": "rest", "tier": "popular", "reason": "shed", "code": "ok"}
    assert world.metric("tailrace_requests_total", **labels) == 1
    assert said_of_shed == []
    assert [line["event"] for line in said_of_served] == ["recommended"]
    assert len(world.impressions.records) == 1


async def test_filters_hold_for_the_shed_too(world: World) -> None:
    """What memory cannot answer at once takes the long way, and still asks nobody."""
    world.strain(1)
    request = RecommendRequest(request_id="r", user_id="long", k=3, filters=Filters(categories=("odd",)))

    answer = await world.plane.recommend(request, time.monotonic(), "rest", replace(ANYONE, priority=Priority.LOW))

    assert (answer.reason, [item.item_id for item in answer.items]) == (Reason.SHED, ["i01", "i03", "i05"])
    assert world.llm.requests == []


async def test_low_priority_is_refused_when_even_memory_is_too_much(world: World) -> None:
    """Three units: low is told when to come back, normal is shed, high is served."""
    world.strain(3)

    with pytest.raises(Overloaded) as refused:
        await ask(world, Priority.LOW)

    assert refused.value.retry_after_s >= 1
    assert (await ask(world, Priority.NORMAL)).reason is Reason.SHED
    assert (await ask(world, Priority.HIGH)).reason is Reason.LLM_IN_TIME


class Clock:
    """Moves on by so many seconds at each reading."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self.num_readings = 0

    def __call__(self) -> float:
        """Tell the time."""
        self.num_readings += 1
        return self._step_s * self.num_readings


def watch_on(clock: Clock) -> tuple[LoadMonitor, Gauge]:
    """A watch with room for four, on this clock."""
    gauge = Gauge("strain", "strain", registry=CollectorRegistry())
    admission = Admission(AdmissionLimits(max_in_flight=4, max_busy=1e9))
    return LoadMonitor(admission, gauge, clock=clock), gauge


async def test_a_loop_that_runs_late_strains_the_watch() -> None:
    """Timers that fire a second late: low gives way, and the gauge says so."""
    clock = Clock(1.0)
    watch, gauge = watch_on(clock)

    watch.start()
    await until(lambda: clock.num_readings > NUM_LOOKS)
    watch.stop()

    assert watch.judge(Priority.LOW) is not Verdict.ADMIT
    assert gauge.collect()[0].samples[0].value >= 1


async def test_a_punctual_loop_does_not() -> None:
    """On time, look after look."""
    clock = Clock(0.021)
    watch, gauge = watch_on(clock)

    watch.start()
    await until(lambda: clock.num_readings > NUM_LOOKS)
    watch.stop()

    assert watch.judge(Priority.LOW) is Verdict.ADMIT
    assert gauge.collect()[0].samples[0].value == 0


def test_requests_in_work_fill_the_places() -> None:
    """They count from beginning to end, also when they end with an error."""
    watch, _ = watch_on(Clock(0.0))

    with watch.working(), watch.working():
        while_two_work = watch.judge(Priority.LOW)
    with pytest.raises(ZeroDivisionError), watch.working():
        raise ZeroDivisionError

    assert while_two_work is Verdict.SHED
    assert watch.judge(Priority.LOW) is Verdict.ADMIT
