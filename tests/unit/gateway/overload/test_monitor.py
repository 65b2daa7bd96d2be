"""Load shedding: under strain the lower priorities are answered from memory, without calls to features or LLM."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge
from structlog.testing import capture_logs

from services.contracts.access import Priority
from services.contracts.recommend import Filters, Reason, Tier
from services.errors import Overloaded
from services.gateway.overload.admission import Admission, AdmissionLimits, Verdict
from services.gateway.overload.monitor import LoadMonitor
from tests.support.wait import until
from tests.unit.gateway.world import World


async def test_low_priority_is_shed_while_the_others_are_served(world: World) -> None:
    """At one unit of strain a low request gets popular items, read from neither features nor LLM."""
    world.strain(1)
    world.features.error = ZeroDivisionError()

    shed = await world.recommend(priority=Priority.LOW)
    world.features.error = None
    served = [await world.recommend(priority=priority) for priority in (Priority.HIGH, Priority.NORMAL)]

    assert (shed.tier, shed.reason, len(shed.items)) == (Tier.POPULAR, Reason.SHED, 3)
    assert [answer.reason for answer in served] == [Reason.LLM_IN_TIME] * 2
    assert len(world.llm.requests) == 2


async def test_a_shed_answer_is_counted_but_neither_logged_nor_sent_to_kafka(world: World) -> None:
    """A served answer has a log line and an impression; a shed one has only its count."""
    world.strain(1)

    with capture_logs() as lines:
        await world.recommend(priority=Priority.LOW)
        assert lines == []
        await world.recommend(priority=Priority.HIGH)
    await asyncio.sleep(0)  # impressions are offered after the answer

    labels = {"door": "rest", "tier": "popular", "reason": "shed", "code": "ok"}
    assert world.metric("tailrace_requests_total", **labels) == 1
    assert [line["event"] for line in lines] == ["recommended"]
    assert len(world.impressions.records) == 1


async def test_filters_hold_for_shed_requests(world: World) -> None:
    """A shed request with filters is ranked by popularity under its masks, without the LLM."""
    world.strain(1)

    answer = await world.recommend(priority=Priority.LOW, filters=Filters(categories=("odd",)))

    assert (answer.reason, [item.item_id for item in answer.items]) == (Reason.SHED, ["i01", "i03", "i05"])
    assert world.llm.requests == []


async def test_low_priority_is_refused_at_higher_strain(world: World) -> None:
    """At three units low gets a retry time, normal is shed, high is served."""
    world.strain(3)

    with pytest.raises(Overloaded) as refused:
        await world.recommend(priority=Priority.LOW)

    assert refused.value.retry_after_s >= 1
    assert (await world.recommend(priority=Priority.NORMAL)).reason is Reason.SHED
    assert (await world.recommend(priority=Priority.HIGH)).reason is Reason.LLM_IN_TIME


class SteppingClock:
    """A clock that advances by a fixed step at each reading."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self.num_readings = 0

    def __call__(self) -> float:
        """Return the time."""
        self.num_readings += 1
        return self._step_s * self.num_readings


def monitor_on(clock: SteppingClock) -> tuple[LoadMonitor, Gauge]:
    """Return a load monitor with four places, on this clock."""
    gauge = Gauge("strain", "strain", registry=CollectorRegistry())
    admission = Admission(AdmissionLimits(max_in_flight=4, max_busy=1e9))
    refused = Counter("refused", "refused", ["cause"], registry=CollectorRegistry())
    return LoadMonitor(admission, gauge, refused, clock=clock), gauge


@pytest.mark.parametrize(("step_s", "is_late"), [(1.0, True), (0.021, False)])
async def test_a_late_event_loop_raises_the_strain(step_s: float, is_late: bool) -> None:
    """Timers that fire a second late shed low priority and show in the gauge; punctual ones do not."""
    clock = SteppingClock(step_s)
    monitor, gauge = monitor_on(clock)

    monitor.start()
    await until(lambda: clock.num_readings > 10)
    monitor.stop()

    assert (monitor.judge(Priority.LOW) is not Verdict.ADMIT) is is_late
    assert (gauge.collect()[0].samples[0].value >= 1) is is_late


async def test_a_wait_at_the_edge_degrades_normal_priority_and_refuses_nobody() -> None:
    """Requests that wait a second before they are read are a strain of two units, no more."""
    clock = SteppingClock(0.021)
    monitor, gauge = monitor_on(clock)

    monitor.waited_at_edge("grpc", 1.0, 1_000.0)
    monitor.start()
    await until(lambda: clock.num_readings > 40)
    monitor.stop()

    assert gauge.collect()[0].samples[0].value == 2


def test_requests_in_flight_fill_the_places() -> None:
    """A request counts from start to end, also when it ends with an error."""
    monitor, _ = monitor_on(SteppingClock(0.0))

    with monitor.working(), monitor.working():
        verdict_while_full = monitor.judge(Priority.LOW)
    with pytest.raises(ZeroDivisionError), monitor.working():
        raise ZeroDivisionError

    assert verdict_while_full is Verdict.SHED
    assert monitor.judge(Priority.LOW) is Verdict.ADMIT
