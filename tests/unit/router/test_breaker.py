"""The circuit breaker against a model of its history."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.router.breaker import Breaker, BreakerState


class BreakerMachine(RuleBasedStateMachine):
    """Concurrent requests, in any order of starts, outcomes and waits."""

    def __init__(self) -> None:
        super().__init__()
        self.breaker = Breaker(max_failures=3, open_s=5)
        self.now_s = 0.0
        self.failures_in_a_row = 0
        self.refuses_until_s = 0.0
        self.out: list[int] = []
        self.trial: int | None = None

    @property
    def is_broken(self) -> bool:
        """Return whether the last three or more requests failed."""
        return self.failures_in_a_row >= 3

    @rule(seconds=st.sampled_from([0.1, 2.0, 6.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @precondition(lambda self: self.breaker.allows(self.now_s))
    @rule()
    def start(self) -> None:
        """Start a request."""
        self.out.append(self.breaker.started(self.now_s))
        if self.is_broken:
            self.trial = self.out[-1]

    @precondition(lambda self: self.out)
    @rule(data=st.data(), outcome=st.sampled_from(["failed", "failed", "failed", "abandoned", "succeeded"]))
    def end(self, data: st.DataObject, outcome: str) -> None:
        """End one of the open requests, possibly one from before the breaker opened."""
        number = self.out.pop(data.draw(st.integers(0, len(self.out) - 1)))
        if outcome == "succeeded":
            self.breaker.succeeded()
            self.failures_in_a_row = 0
        elif outcome == "failed":
            self.breaker.failed(self.now_s)
            self.failures_in_a_row += 1
            self.refuses_until_s = self.now_s + 5
        else:
            self.breaker.abandoned(number)
        if outcome != "abandoned" or number == self.trial:
            self.trial = None

    @invariant()
    def allows_as_the_model(self) -> None:
        """The breaker rejects for open_s after the third or a later failure in a row, and during the single trial."""
        refuses = self.is_broken and (self.now_s < self.refuses_until_s or self.trial is not None)

        assert self.breaker.allows(self.now_s) is not refuses
        assert (self.breaker.state(self.now_s) is BreakerState.CLOSED) is not self.is_broken
        assert (self.breaker.state(self.now_s) is BreakerState.OPEN) is (
            self.is_broken and self.now_s < self.refuses_until_s
        )


TestBreakerMachine = BreakerMachine.TestCase
BreakerMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=40)


def test_failed_trials_double_the_time_until_the_next_and_stragglers_do_not() -> None:
    """Failures of requests from before the opening change nothing; a success resets the time."""
    breaker = Breaker(max_failures=1, open_s=1, max_open_s=3)
    first, straggler = breaker.started(0), breaker.started(0)
    breaker.failed(0, first)
    breaker.failed(0.5, straggler)
    opened_until_s = []
    for now_s in (1.0, 3.0, 6.0):
        assert breaker.allows(now_s)
        trial = breaker.started(now_s)
        assert not breaker.allows(now_s)
        breaker.failed(now_s, trial)
        opened_until_s.append(next(tenth / 10 for tenth in range(200) if breaker.allows(tenth / 10)))

    assert opened_until_s == [3.0, 6.0, 9.0]
    breaker.succeeded()
    breaker.failed(10.0, breaker.started(10.0))
    assert breaker.allows(11.0)


def test_only_an_abandoned_trial_lets_another_start() -> None:
    """A request from before the opening that is abandoned does not end the trial."""
    breaker = Breaker(max_failures=1, open_s=1)
    straggler = breaker.started(0)
    breaker.failed(0)
    trial = breaker.started(1)

    breaker.abandoned(straggler)
    assert not breaker.allows(1)
    breaker.abandoned(trial)
    assert breaker.allows(1)
