"""Load shedding: under strain, lower priorities are answered from memory, without calls to features or LLM."""

import asyncio
from collections.abc import Callable
from itertools import count

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge
from structlog.testing import capture_logs

from services.contracts.access import Priority
from services.contracts.recommend import Reason, Tier
from services.errors import Overloaded
from services.gateway.overload.admission import Admission, AdmissionDecision, AdmissionLimits
from services.gateway.overload.edge_limit import EdgeLimit
from services.gateway.overload.monitor import LoadMonitor
from services.router.deadline import Deadline
from tests.support.wait import until
from tests.unit.gateway.world import World


async def test_low_priority_is_shed_while_the_others_are_served(world: World) -> None:
    """At one unit of strain a low request gets popular items without features or LLM, and is only counted."""
    world.strain(1)
    world.features.error = ZeroDivisionError()

    with capture_logs() as lines_of_shed:
        shed = await world.recommend(priority=Priority.LOW)
    world.features.error = None
    with capture_logs() as lines:
        served = [await world.recommend(priority=priority) for priority in (Priority.HIGH, Priority.NORMAL)]
    await asyncio.sleep(0)  # impressions are sent after the answer

    assert (shed.tier, shed.reason) == (Tier.POPULAR, Reason.SHED)
    assert len(shed.items) == 3
    assert [answer.reason for answer in served] == [Reason.LLM_IN_TIME] * 2
    assert len(world.llm.requests) == len(world.impressions.records) == 2
    assert (lines_of_shed, [line["event"] for line in lines]) == ([], ["recommended"] * 2)
    labels = {"door": "rest", "tier": "popular", "reason": "shed", "code": "ok"}
    assert world.metric("tailrace_requests_total", **labels) == 1


async def test_low_priority_is_refused_at_higher_strain(world: World) -> None:
    """At three units low priority gets a retry time, normal is shed, high is served."""
    world.strain(3)

    with pytest.raises(Overloaded) as refused:
        await world.recommend(priority=Priority.LOW)

    assert refused.value.retry_after_s >= 1
    assert (await world.recommend(priority=Priority.NORMAL)).reason is Reason.SHED
    assert (await world.recommend(priority=Priority.HIGH)).reason is Reason.LLM_IN_TIME


def monitor_on(step_s: float) -> tuple[LoadMonitor, Gauge, Callable[[], int]]:
    """Return a load monitor with four slots, its gauge, and its number of clock readings, each `step_s` later."""
    ticks = count(1)
    readings: list[float] = []

    def clock() -> float:
        readings.append(step_s * next(ticks))
        return readings[-1]

    gauge = Gauge("strain", "strain", registry=CollectorRegistry())
    admission = Admission(AdmissionLimits(max_in_flight=4, max_busy=1e9))
    refused = Counter("refused", "refused", ["cause"], registry=CollectorRegistry())
    return LoadMonitor(admission, gauge, refused, clock=clock), gauge, lambda: len(readings)


@pytest.mark.parametrize(
    ("step_s", "edge_wait_s", "strains"),
    [(1.0, 0.0, range(1, 9)), (0.021, 0.0, range(1)), (0.021, 1.0, range(2, 3))],
    ids=["a late event loop", "a punctual one", "a wait at the edge"],
)
async def test_what_is_late_raises_the_strain(step_s: float, edge_wait_s: float, strains: range) -> None:
    """Late timers raise strain and gauge and shed low priority; a second's wait at the edge counts as two units."""
    monitor, gauge, num_readings = monitor_on(step_s)

    if edge_wait_s:
        monitor.waited_at_edge("grpc", edge_wait_s, 1_000.0)
    await monitor.start()
    await until(lambda: num_readings() > 40)
    await monitor.stop()

    assert int(gauge.collect()[0].samples[0].value) in strains
    assert (monitor.judge(Priority.LOW) is AdmissionDecision.ADMIT) is (0 in strains)


async def test_the_usual_lateness_of_the_loop_is_known() -> None:
    """A loop that is always a second late is reported as that late: deadlines keep this much in reserve."""
    monitor, _, num_readings = monitor_on(1.0)
    await monitor.start()
    await until(lambda: num_readings() > 10)
    await monitor.stop()

    assert monitor.tail_delay_s == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("deadline_s", [0.05, 0.2, 2.0])
def test_the_edges_limit_tolerates_the_same_fraction_of_any_deadline(deadline_s: float) -> None:
    """A standing wait of a tenth of the usual deadline keeps the limit, a wait of a fifth of it lowers it."""
    kept, lowered = EdgeLimit(deadline_s), EdgeLimit(deadline_s)
    for number in range(50):
        kept.observed(0.1 * deadline_s, 100, 0.1 * number)
        lowered.observed(0.2 * deadline_s, 100, 10.0 * number)

    assert (kept.limit, lowered.limit < 100) == (EdgeLimit().limit, True)


async def test_at_rest_the_loop_is_sampled_rarely_until_a_request_arrives() -> None:
    """The first request ends the rest at once."""
    now_s = 0.0
    gauge = Gauge("strain", "strain", registry=CollectorRegistry())
    refused = Counter("refused", "refused", ["cause"], registry=CollectorRegistry())
    monitor = LoadMonitor(Admission(AdmissionLimits(max_in_flight=4)), gauge, refused, clock=lambda: now_s)
    loop = asyncio.get_running_loop()

    def next_in_s() -> float:
        """Return the time until the next sample."""
        assert monitor._next_sample is not None
        return monitor._next_sample.when() - loop.time()

    await monitor.start()
    busy_s = next_in_s()
    now_s = 60.0
    await until(lambda: next_in_s() > 0.1)
    _ = monitor.has_spare_capacity
    resting_s = next_in_s()
    monitor.judge(Priority.LOW)
    woken_s = next_in_s()
    await monitor.stop()

    assert max(busy_s, woken_s) < 0.1 < resting_s


async def test_requests_that_come_one_by_one_are_sampled_less_often_than_a_burst() -> None:
    """A wake-up costs more than its sample: the loop is sampled often once two requests come close together."""
    now_s = 60.0
    gauge = Gauge("strain", "strain", registry=CollectorRegistry())
    refused = Counter("refused", "refused", ["cause"], registry=CollectorRegistry())
    monitor = LoadMonitor(Admission(AdmissionLimits(max_in_flight=4)), gauge, refused, clock=lambda: now_s)
    monitor.judge(Priority.LOW)
    now_s += 0.05
    monitor._sample()
    next_in_s = []
    for gap_s in (0.05, 0.001):
        now_s += gap_s
        monitor.judge(Priority.LOW)
        assert monitor._next_sample is not None
        next_in_s.append(monitor._next_sample.when() - asyncio.get_running_loop().time())
    await monitor.stop()

    assert next_in_s[1] < 0.03 < next_in_s[0]


def test_requests_in_flight_fill_the_places() -> None:
    """A request counts from start to end, also if it ends with an error."""
    monitor, *_ = monitor_on(0.0)

    with monitor.working(), monitor.working():
        verdict_while_full = monitor.judge(Priority.LOW)
    with pytest.raises(ZeroDivisionError), monitor.working():
        raise ZeroDivisionError

    assert verdict_while_full is AdmissionDecision.SHED
    assert monitor.judge(Priority.LOW) is AdmissionDecision.ADMIT


@pytest.mark.parametrize("known", ["_full_cpu_s", "_alone_cpu_s"])
async def test_begun_requests_are_work_at_hand_while_others_wait(known: str) -> None:
    """Three requests of 40 ms each shed any priority on a busy loop; requests that wait for another server do not."""
    monitor, *_ = monitor_on(0.0)
    setattr(monitor, known, 0.04)
    with monitor.working(), monitor.working(), monitor.working():
        verdict_while_idle = monitor.judge(Priority.HIGH)
        begin = monitor.queue.begin
        waiting = [asyncio.create_task(begin(Priority.HIGH, Deadline(0.0, 60.0, 0.0))) for _ in range(2)]
        await asyncio.sleep(0)
        verdict_while_busy = monitor.judge(Priority.HIGH)
    await asyncio.gather(*waiting)

    assert (verdict_while_idle, verdict_while_busy) == (AdmissionDecision.ADMIT, AdmissionDecision.SHED)


@pytest.mark.parametrize(("step_s", "is_known"), [(0.02, True), (1.5, False)], ids=["busy", "nearly at rest"])
async def test_the_cost_of_a_request_is_learned_only_while_there_are_many(step_s: float, is_known: bool) -> None:
    """Between rare requests, the process's work at rest would count as their cost."""
    monitor, *_ = monitor_on(step_s)
    for _ in range(200):
        monitor.judge(Priority.HIGH)
        monitor._sample()
    await monitor.stop()

    assert (monitor.next_cpu_s is not None) is is_known


async def test_a_flood_after_a_pause_is_expected_to_cost_what_full_answers_cost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Answers from memory were cheap, but the first of the next flood are ranked, though strain has remained."""
    now_s, cpu_s = 0.0, 0.0
    monkeypatch.setattr("services.gateway.overload.monitor.time.process_time", lambda: cpu_s)
    gauge = Gauge("strain", "strain", registry=CollectorRegistry())
    refused = Counter("refused", "refused", ["cause"], registry=CollectorRegistry())
    monitor = LoadMonitor(Admission(AdmissionLimits(max_in_flight=4, max_busy=1e9)), gauge, refused, lambda: now_s)

    async def passed(num_samples: int, strain: float, cost_s: float | None) -> float | None:
        """Pass samples of 20 ms, each with a request of normal priority if it has a cost; return the next one's."""
        nonlocal now_s, cpu_s
        for _ in range(num_samples):
            monitor.admission._strain, now_s = strain, now_s + 0.02
            if cost_s is not None:
                monitor.judge(Priority.NORMAL)
                cpu_s += cost_s
            monitor._due_s = now_s
            monitor._sample()
        return monitor.next_cpu_s

    costs_s = [await passed(200, 0.5, 0.003), await passed(200, 2.0, 0.001), await passed(200, 2.0, None)]
    await monitor.stop()

    assert costs_s == pytest.approx([0.003, 0.001, 0.003], rel=0.1)


@pytest.mark.parametrize(("is_in_time", "is_known"), [(True, True), (False, False)], ids=["in time", "late"])
async def test_late_requests_do_not_show_what_a_full_answer_costs(*, is_in_time: bool, is_known: bool) -> None:
    """Admission would serve them in full, but they began late and are answered from memory."""
    monitor, *_ = monitor_on(0.01)
    verdicts = set()
    for _ in range(40):
        verdicts.add(monitor.judge(Priority.HIGH, is_in_time=is_in_time))
        monitor._sample()
    await monitor.stop()

    assert verdicts == {AdmissionDecision.ADMIT if is_in_time else AdmissionDecision.SHED}
    assert (monitor._full_cpu_s is not None) is is_known


async def test_the_process_s_work_at_rest_is_no_cost_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """At rest a tenth of a core is used; with 25 requests a second of 3 ms each, their cost is still 3 ms."""
    now_s, cpu_s = 0.0, 0.0
    gauge = Gauge("strain", "strain", registry=CollectorRegistry())
    refused = Counter("refused", "refused", ["cause"], registry=CollectorRegistry())
    monkeypatch.setattr("services.gateway.overload.monitor.time.process_time", lambda: cpu_s)
    monitor = LoadMonitor(Admission(AdmissionLimits(max_in_flight=4, max_busy=1e9)), gauge, refused, lambda: now_s)
    for number in range(400):
        now_s, cpu_s = now_s + 0.04, cpu_s + 0.004
        if number >= 100:
            monitor.judge(Priority.HIGH)
            cpu_s += 0.003
        monitor._due_s = now_s
        monitor._sample()
    await monitor.stop()

    assert monitor.next_cpu_s == pytest.approx(0.003, rel=0.1)


def test_the_first_flood_finds_the_cost_of_requests_that_came_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that overlap another, or that fail, show no cost; a gateway without a cost would limit no burst."""
    cpu_s = 0.0
    monkeypatch.setattr("services.gateway.overload.monitor.time.process_time", lambda: cpu_s)
    monitor, *_ = monitor_on(0.0)
    with monitor.handling(), monitor.handling():
        cpu_s += 0.02
    with pytest.raises(ZeroDivisionError), monitor.handling():
        raise ZeroDivisionError
    before_s = monitor.next_cpu_s
    with monitor.handling():
        cpu_s += 0.003

    assert before_s is None
    assert monitor.next_cpu_s == pytest.approx(0.003)
