"""The LLM gate counts requests in flight, and reports each outcome to the breaker and the predictor."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.contracts.access import Priority
from services.contracts.rank import EngineLoad
from services.router.breaker import Breaker
from services.router.gate import LlmGate
from services.router.policy import LlmOutcome
from services.router.predictor import LatencyPredictor


@pytest.fixture
def gate() -> LlmGate:
    """A gate with eight places whose breaker opens at the second failure."""
    return new_gate()


def new_gate() -> LlmGate:
    """Build a gate."""
    return LlmGate(Breaker(2, open_s=10), LatencyPredictor(0.0), max_in_flight=8)


@given(st.lists(st.sampled_from(LlmOutcome), max_size=50))
def test_every_request_that_ends_frees_its_place(outcomes: list[LlmOutcome]) -> None:
    """Whatever the outcome, the request no longer counts as in flight."""
    gate = new_gate()
    for now_s, outcome in enumerate(outcomes):
        sent = gate.started(float(now_s))
        assert gate.view(float(now_s), Priority.HIGH).num_in_flight == 1
        gate.ended(outcome, sent, 0.1, float(now_s))

    assert gate.view(99.0, Priority.HIGH).num_in_flight == 0


@pytest.mark.parametrize("outcome", LlmOutcome)
def test_only_failures_open_the_breaker(gate: LlmGate, outcome: LlmOutcome) -> None:
    """A failed or unavailable LLM opens the breaker; lateness, overload and refusals do not."""
    for _ in range(20):
        gate.ended(outcome, gate.started(0), 0.1, 0)

    is_failure = outcome in {LlmOutcome.FAILED, LlmOutcome.AWAY}
    assert gate.is_open(0) is is_failure
    assert gate.view(0, Priority.HIGH).breaker_allows is not is_failure


def test_only_answers_and_timeouts_train_the_predictor(gate: LlmGate) -> None:
    """The time of an answer or of a timeout raises the prediction; the time of a refusal does not."""
    predicted_s = []
    for outcome, took_s in [(LlmOutcome.OVERLOADED, 5.0), (LlmOutcome.IN_TIME, 0.1), (LlmOutcome.LATE, 1.0)]:
        gate.ended(outcome, gate.started(0), took_s, 0)
        predicted_s.append(gate.view(0, Priority.HIGH).predicted_s)

    assert predicted_s[0] == 0
    assert predicted_s[1] >= 0.1
    assert predicted_s[2] > 0.2


def test_the_engines_reported_load_counts_for_a_second(gate: LlmGate) -> None:
    """The larger of the reported and the own load holds while the report is fresh."""
    gate.reported(EngineLoad(num_running=3, num_waiting=4, kv_cache_usage=0.5), now_s=10)

    assert gate.started(11.0).load == 7
    assert gate.started(11.1).load == 1
