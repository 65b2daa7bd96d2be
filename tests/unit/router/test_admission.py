"""Admission: who gives way to whom, how strain rises and falls, and that it does not flap."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.contracts.access import Priority, places_for
from services.router.admission import MAX_STRAIN, Admission, AdmissionLimits, Verdict, strain_after

LIMITS = AdmissionLimits(max_in_flight=8, max_delay_s=0.02)
SEVERITY = {Verdict.ADMIT: 0, Verdict.SHED: 1, Verdict.REFUSE: 2}


def strained(strain: int) -> Admission:
    """An admission that has come to this strain by two windows of far too much delay for each unit, and one for the first."""
    admission = Admission(LIMITS)
    for window in range(2 * strain - 1):
        watch(admission, 20 * LIMITS.max_delay_s, window)
    return admission


def watch(admission: Admission, delay_s: float, window: int) -> None:
    """One window in which the loop runs as late as this at both looks."""
    admission.looked(window + 0.0, delay_s, 0.0)
    admission.looked(window + 0.5, delay_s, 0.0)


def verdicts(admission: Admission, priority: Priority, num: int = 20) -> set[Verdict]:
    """What becomes of this many requests in a row."""
    return {admission.judge(priority, 0) for _ in range(num)}


class AdmissionMachine(RuleBasedStateMachine):
    """Any traffic over any event loop: the less important give way before the more important."""

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
        """The loop runs as late as this for a while."""
        for _ in range(num):
            self.now_s += 0.02 + delay_s
            self.busy_s += busy * (0.02 + delay_s)
            self.admission.looked(self.now_s, delay_s, self.busy_s)

    @rule(num_in_flight=st.integers(0, 10))
    def arrive(self, num_in_flight: int) -> None:
        """One of each class arrives at the same moment."""
        high, normal, low = (SEVERITY[self.admission.judge(priority, num_in_flight)] for priority in Priority)
        if high:
            assert normal >= 1
        if normal:
            assert low >= 1
        if high == SEVERITY[Verdict.REFUSE]:
            assert (normal, low) == (2, 2)
        if normal == SEVERITY[Verdict.REFUSE]:
            assert low == SEVERITY[Verdict.REFUSE]

    @invariant()
    def strain_is_bounded(self) -> None:
        """Between calm and the worst."""
        assert 0 <= self.admission.strain <= MAX_STRAIN


TestAdmissionMachine = AdmissionMachine.TestCase
TestAdmissionMachine.settings = settings(max_examples=50, stateful_step_count=40)


def test_each_class_gives_way_at_its_strain() -> None:
    """The table of the module, row by row."""
    table = [
        (0, {Verdict.ADMIT}, {Verdict.ADMIT}, {Verdict.ADMIT}),
        (1, {Verdict.ADMIT}, {Verdict.ADMIT}, {Verdict.SHED}),
        (2, {Verdict.ADMIT}, {Verdict.SHED}, {Verdict.SHED}),
        (3, {Verdict.ADMIT}, {Verdict.SHED}, {Verdict.REFUSE}),
        (4, {Verdict.SHED}, {Verdict.REFUSE}, {Verdict.REFUSE}),
        (5, {Verdict.REFUSE}, {Verdict.REFUSE}, {Verdict.REFUSE}),
    ]
    for strain, high, normal, low in table:
        admission = strained(strain)

        assert [verdicts(admission, priority) for priority in Priority] == [high, normal, low], strain


def test_half_a_unit_sheds_every_second() -> None:
    """What capacity there is gets used."""
    admission = Admission(LIMITS)
    watch(admission, 1.001 * LIMITS.max_delay_s, 1)

    given_up = [admission.judge(Priority.LOW, 0) for _ in range(10)]

    assert admission.strain == 0.5
    assert given_up.count(Verdict.SHED) == 5
    assert verdicts(admission, Priority.NORMAL) == {Verdict.ADMIT}


def test_the_last_places_are_kept_for_the_more_important() -> None:
    """Low fills half, normal three quarters, high all; beyond that the answer comes from memory."""
    admission = Admission(LIMITS)

    first_shed = {
        priority: next(num for num in range(20) if admission.judge(priority, num) is Verdict.SHED)
        for priority in Priority
    }

    assert first_shed == {Priority.LOW: 4, Priority.NORMAL: 6, Priority.HIGH: 8}


@given(st.integers(-3, 9), st.integers(1, 1_000))
def test_nobody_is_kept_out_wholly(priority: int, num_places: int) -> None:
    """One place at least, never more than there are, and no more for the less important."""
    places = places_for(priority, num_places)

    assert 1 <= places <= num_places
    assert places >= places_for(priority + 1, num_places)


def test_a_single_stall_sheds_nobody() -> None:
    """One late look between punctual ones, however late, is a pause and no queue."""
    admission = Admission(LIMITS)
    for number in range(200):
        admission.looked(number * 0.02, 3.0 if number % 7 == 0 else 0.0, 0.0)

    assert admission.strain == 0
    assert verdicts(admission, Priority.LOW) == {Verdict.ADMIT}


def test_a_standing_queue_sheds_low_within_a_quarter_of_a_second() -> None:
    """Looks that are all late count at once."""
    admission, now_s = Admission(LIMITS), 0.0
    while admission.judge(Priority.LOW, 0) is Verdict.ADMIT and now_s < 10:
        now_s += 0.02 + 0.05
        admission.looked(now_s, 0.05, 0.0)

    assert now_s < 0.25


@pytest.mark.parametrize(("delay_s", "worst"), [(0.021, 1), (0.049, 1), (0.051, 2), (0.099, 2), (0.101, 4), (0.3, 5)])
def test_each_unit_takes_a_later_loop(delay_s: float, worst: int) -> None:
    """However long it lasts: low is shed from 20 ms on, normal from 50, low refused and high shed from 100, high refused from 200."""
    admission = Admission(LIMITS)
    for window in range(100):
        watch(admission, delay_s, window)

    assert admission.strain == worst


def test_recovery_is_slow_and_in_order() -> None:
    """After the overload the more important are served in full first, and low is let in little by little."""
    admission = strained(2)
    served_in_full = dict.fromkeys(Priority, 0)
    for window in range(100, 200):
        watch(admission, 0.0, window)
        for priority in Priority:
            if not served_in_full[priority] and verdicts(admission, priority) == {Verdict.ADMIT}:
                served_in_full[priority] = window - 99

    assert served_in_full[Priority.HIGH] == 1
    assert 30 <= served_in_full[Priority.NORMAL] < served_in_full[Priority.LOW]
    assert admission.strain == 0


def test_a_busy_process_sheds_low_alone() -> None:
    """Nine tenths of the time busy, its loop punctual: its neighbours wait for it, so low gives way, and nobody else."""
    admission = Admission(LIMITS)
    for number in range(1_000):
        admission.looked(number * 0.02, 0.0, number * (0.018 if number < 900 or number > 940 else 0.002))

    assert admission.strain == 1
    assert verdicts(admission, Priority.LOW) == {Verdict.SHED}
    assert verdicts(admission, Priority.NORMAL) == {Verdict.ADMIT}


def test_a_flood_sheds_low_at_once_and_nobody_else() -> None:
    """One window of half as much again as may be: all of low gives way, while normal would take two more."""
    admission = Admission(LIMITS)

    watch(admission, 1.6 * LIMITS.max_delay_s, 1)

    assert admission.strain == 1
    assert verdicts(admission, Priority.LOW) == {Verdict.SHED}
    assert verdicts(admission, Priority.NORMAL) == {Verdict.ADMIT}


@given(st.floats(0, 1), st.floats(0.7, 1))
def test_between_calm_and_late_nothing_changes(strain: float, pressure: float) -> None:
    """The band that keeps it from flapping."""
    assert strain_after(strain, pressure) == strain


@given(st.floats(0, MAX_STRAIN), st.floats(0, 20))
def test_it_rises_twenty_times_as_fast_as_it_falls(strain: float, pressure: float) -> None:
    """A step is half a unit up, the whole first one in a flood, or a fortieth down, never both ways at one pressure."""
    step = strain_after(strain, pressure) - strain

    assert -0.026 <= step <= (1.0 if strain < 1 and pressure > 1.5 else 0.501)
    assert step >= 0 or strain_after(strain, pressure + 20) > strain or strain == MAX_STRAIN
