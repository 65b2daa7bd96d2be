"""Admission: which priority is shed first, how strain rises and falls, and that it does not oscillate."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.contracts.access import Priority, places_for
from services.gateway.overload.admission import (
    MAX_STRAIN,
    Admission,
    AdmissionDecision,
    AdmissionLimits,
    strain_after,
    strain_that_sheds,
)

LIMITS = AdmissionLimits(max_in_flight=8, max_delay_s=0.02)
SEVERITY = {AdmissionDecision.ADMIT: 0, AdmissionDecision.SHED: 1, AdmissionDecision.REFUSE: 2}


def strained(strain: int) -> Admission:
    """Return an admission at this strain: one overloaded window for the first unit, two for each further unit."""
    admission = Admission(LIMITS)
    for window in range(2 * strain - 1):
        watch(admission, 20 * LIMITS.max_delay_s, window)
    return admission


def watch(admission: Admission, delay_s: float, window: int) -> None:
    """Report one window with this event-loop delay at both samples."""
    admission.looked(window + 0.0, delay_s, 0.0)
    admission.looked(window + 0.5, delay_s, 0.0)


def verdicts(admission: Admission, priority: Priority, num: int = 20) -> set[AdmissionDecision]:
    return {admission.judge(priority, 0) for _ in range(num)}


class AdmissionMachine(RuleBasedStateMachine):
    """Under any traffic and any event-loop delay, a lower priority is shed before a higher priority."""

    def __init__(self) -> None:
        super().__init__()
        self.admission = Admission(LIMITS)
        self.now_s = 0.0
        self.busy_s = 0.0

    @rule(
        delay_s=st.sampled_from([0.0, 0.007, 0.01, 0.021, 0.05, 2.0]),
        busy=st.sampled_from([0.0, 0.4, 0.9]),
        num=st.integers(1, 30),
    )
    def look(self, delay_s: float, busy: float, num: int) -> None:
        """Report this delay in a number of samples."""
        for _ in range(num):
            self.now_s += 0.02 + delay_s
            self.busy_s += busy * (0.02 + delay_s)
            self.admission.looked(self.now_s, delay_s, self.busy_s)

    @rule(num_in_flight=st.integers(0, 10))
    def arrive(self, num_in_flight: int) -> None:
        """Judge one request of each priority at the same moment."""
        high, normal, low = (SEVERITY[self.admission.judge(priority, num_in_flight)] for priority in Priority)
        if high:
            assert normal >= 1
        if normal:
            assert low >= 1
        if high == SEVERITY[AdmissionDecision.REFUSE]:
            assert (normal, low) == (2, 2)
        if normal == SEVERITY[AdmissionDecision.REFUSE]:
            assert low == SEVERITY[AdmissionDecision.REFUSE]

    @invariant()
    def strain_is_bounded(self) -> None:
        """Strain stays between 0 and its maximum."""
        assert 0 <= self.admission.strain <= MAX_STRAIN


TestAdmissionMachine = AdmissionMachine.TestCase
TestAdmissionMachine.settings = settings(max_examples=25, stateful_step_count=30)


def test_each_class_is_shed_and_refused_at_its_strain() -> None:
    """The verdict for each strain and priority equals the module's table."""
    table = [
        (0, {AdmissionDecision.ADMIT}, {AdmissionDecision.ADMIT}, {AdmissionDecision.ADMIT}),
        (1, {AdmissionDecision.ADMIT}, {AdmissionDecision.ADMIT}, {AdmissionDecision.SHED}),
        (2, {AdmissionDecision.ADMIT}, {AdmissionDecision.SHED}, {AdmissionDecision.SHED}),
        (3, {AdmissionDecision.ADMIT}, {AdmissionDecision.SHED}, {AdmissionDecision.REFUSE}),
        (4, {AdmissionDecision.SHED}, {AdmissionDecision.REFUSE}, {AdmissionDecision.REFUSE}),
        (5, {AdmissionDecision.REFUSE}, {AdmissionDecision.REFUSE}, {AdmissionDecision.REFUSE}),
    ]
    for strain, high, normal, low in table:
        admission = strained(strain)

        assert [verdicts(admission, priority) for priority in Priority] == [high, normal, low], strain


def test_half_a_unit_sheds_every_second_request() -> None:
    """At half a unit of strain, half of the low priority is still served."""
    admission = Admission(LIMITS)
    watch(admission, 1.001 * LIMITS.max_delay_s, 1)

    verdicts_of_low = [admission.judge(Priority.LOW, 0) for _ in range(10)]

    assert admission.strain == 0.5
    assert verdicts_of_low.count(AdmissionDecision.SHED) == 5
    assert verdicts(admission, Priority.NORMAL) == {AdmissionDecision.ADMIT}


def test_the_last_places_are_kept_for_higher_priorities() -> None:
    """Low priority may use half of the slots, normal three quarters, high all; further requests are shed."""
    admission = Admission(LIMITS)

    first_shed = {
        priority: next(num for num in range(20) if admission.judge(priority, num) is AdmissionDecision.SHED)
        for priority in Priority
    }

    assert first_shed == {Priority.LOW: 4, Priority.NORMAL: 6, Priority.HIGH: 8}


@given(st.integers(-3, 9), st.integers(1, 1_000))
def test_every_priority_has_a_place(priority: int, num_places: int) -> None:
    """Each priority has between one and all slots, and never more than a higher priority."""
    places = places_for(priority, num_places)

    assert 1 <= places <= num_places
    assert places >= places_for(priority + 1, num_places)


@given(st.floats(0, 1), st.floats(0.7, 1))
def test_between_calm_and_late_nothing_changes(strain: float, pressure: float) -> None:
    """Pressure between 0.7 and 1 leaves the strain unchanged (hysteresis)."""
    assert strain_after(strain, pressure) == strain


@given(st.floats(0, MAX_STRAIN), st.floats(0, 20))
def test_it_rises_twenty_times_as_fast_as_it_falls(strain: float, pressure: float) -> None:
    """A step is at most half a unit up (a whole unit in a flood) or 1/40 down, and monotonic in the pressure."""
    step = strain_after(strain, pressure) - strain

    assert -0.026 <= step <= (1.0 if strain < 1 and pressure > 1.5 else 0.501)
    assert step >= 0 or strain_after(strain, pressure + 20) > strain or strain == MAX_STRAIN
    assert strain_after(strain, 0.0) == max(0.0, strain - 0.025)


@pytest.mark.parametrize(
    ("looks", "strain"),
    [
        ([(number * 0.02, 3.0 if number % 7 == 0 else 0.0, 0.0) for number in range(200)], 0),
        ([(number * 0.02, 0.0, number * (0.018 if abs(number - 920) > 20 else 0.002)) for number in range(1_000)], 1),
        ([(0.07, 0.05, 0.0), (0.14, 0.05, 0.0), (0.21, 0.05, 0.0)], 1),
    ],
    ids=["single stalls are no queue", "a busy process", "a standing queue counts within a quarter of a second"],
)
def test_a_course_of_looks_leads_to_its_strain(looks: list[tuple[float, float, float]], strain: float) -> None:
    """Only a sustained delay or a busy process raises the strain; a busy process raises it to at most one unit."""
    admission = Admission(LIMITS)
    for look in looks:
        admission.looked(*look)

    assert admission.strain == strain


@pytest.mark.parametrize("priority", [Priority.HIGH, Priority.NORMAL])
def test_after_the_edge_refused_a_priority_it_is_served_again_by_and_by(priority: Priority) -> None:
    """A priority that the edge refuses is shed; afterwards a tenth more is served in full per calm window."""
    admission = Admission(LIMITS)
    watch(admission, 0.0, 0)
    admission.looked(1.0, 0.0, 0.0, strain_that_sheds(priority))
    during = verdicts(admission, priority)
    shed = []
    for window in range(1, 12):
        watch(admission, 0.0, window)
        shed.append([admission.judge(priority, 0) for _ in range(20)].count(AdmissionDecision.SHED))

    assert during == {AdmissionDecision.SHED}
    assert shed == pytest.approx([18, 16, 14, 12, 10, 8, 6, 4, 2, 0, 0], abs=1)


def test_lower_priorities_than_the_edge_refuses_are_answered_from_memory() -> None:
    """A burst of high priority beyond the edge's limit makes the gateway refuse nobody, whose loop has no delay."""
    admission = Admission(LIMITS)
    watch(admission, 0.0, 0)
    admission.looked(1.0, 0.0, 0.0, strain_that_sheds(Priority.HIGH))

    assert [verdicts(admission, priority) for priority in Priority] == [{AdmissionDecision.SHED}] * 3


def test_a_loop_that_stays_late_serves_no_more() -> None:
    """While the loop is as late as at the strain of its priority, no more of that priority is served in full."""
    admission = Admission(LIMITS)
    watch(admission, 0.0, 0)
    admission.looked(1.0, 4 * LIMITS.max_delay_s, 0.0, strain_that_sheds(Priority.HIGH))
    for window in range(1, 5):
        watch(admission, 4 * LIMITS.max_delay_s, window)

    assert verdicts(admission, Priority.HIGH) == {AdmissionDecision.SHED}


@pytest.mark.parametrize(
    ("queued", "shed"),
    [(0.9, set()), (1.1, {Priority.LOW}), (2.6, {Priority.LOW, Priority.NORMAL}), (5.1, set(Priority))],
)
def test_a_long_queue_sheds_at_once(queued: float, shed: set[Priority]) -> None:
    """A burst is shed by its queue, in multiples of the permitted delay, before any window has passed."""
    admission = Admission(LIMITS)

    shed_priorities = {
        priority
        for priority in Priority
        if admission.judge(priority, 0, queue_s=queued * LIMITS.max_delay_s) is AdmissionDecision.SHED
    }

    assert shed_priorities == shed


@pytest.mark.parametrize(("delay_s", "worst"), [(0.021, 1), (0.049, 1), (0.051, 2), (0.099, 2), (0.101, 4), (0.3, 5)])
def test_each_unit_requires_a_longer_delay(delay_s: float, worst: int) -> None:
    """A constant delay raises the strain to its own limit and no further, however long it lasts."""
    admission = Admission(LIMITS)
    for window in range(100):
        watch(admission, delay_s, window)

    assert admission.strain == worst


@pytest.mark.parametrize(
    ("strain", "priority", "num_shed"), [(0.5, Priority.NORMAL, 25), (1.5, Priority.LOW, 70)], ids=["half", "above one"]
)
def test_only_the_part_of_a_tenant_above_its_share_is_shed_as_low_priority(
    strain: float, priority: Priority, num_shed: int
) -> None:
    """Of 90 requests, 50 are above the share: those are shed as low priority, the others one unit of strain later."""
    admission = Admission(LIMITS)
    for tenant, num in (("a", 90), ("b", 10)):
        for _ in range(num):
            admission.arrived(priority, tenant, 1.0)
    for _ in range(50):
        admission.judge(Priority.HIGH, 0, "a")
    for now_s in (0.0, 0.5):
        admission.looked(now_s, 0.0, 0.0, strain)

    decisions = [admission.judge(priority, 0, "a") for _ in range(90)]

    assert decisions.count(AdmissionDecision.SHED) == num_shed
