"""The gate counts what is in flight, and tells breaker and predictor how each request ended."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.contracts.access import Priority
from services.contracts.rank import EngineLoad
from services.router.breaker import Breaker
from services.router.gate import LlmGate
from services.router.policy import LlmOutcome
from services.router.predictor import LatencyPredictor


def gate(max_failures: int = 2) -> LlmGate:
    """A fresh gate with room for eight."""
    return LlmGate(Breaker(max_failures, open_s=10), LatencyPredictor(0.0), max_in_flight=8)


@given(st.lists(st.sampled_from(LlmOutcome), max_size=50))
def test_every_request_that_ends_frees_its_place(outcomes: list[LlmOutcome]) -> None:
    """Whatever the outcome."""
    counted = gate()
    for now_s, outcome in enumerate(outcomes):
        sent = counted.started(float(now_s))
        assert counted.view(float(now_s), Priority.HIGH).num_in_flight == 1
        counted.ended(outcome, sent, 0.1, float(now_s))

    assert counted.view(99.0, Priority.HIGH).num_in_flight == 0


@pytest.mark.parametrize("outcome", [LlmOutcome.FAILED, LlmOutcome.AWAY])
def test_failures_open_the_breaker(outcome: LlmOutcome) -> None:
    """Broken and away alike."""
    broken = gate()
    for _ in range(2):
        broken.ended(outcome, broken.started(0), 0.1, 0)

    assert broken.is_open(0)
    assert not broken.view(0, Priority.HIGH).breaker_allows


@pytest.mark.parametrize(
    "outcome", [LlmOutcome.LATE, LlmOutcome.OVERLOADED, LlmOutcome.REFUSED, LlmOutcome.MISMATCH, LlmOutcome.ABANDONED]
)
def test_other_outcomes_do_not(outcome: LlmOutcome) -> None:
    """They say nothing of a broken tier."""
    fine = gate()
    for _ in range(20):
        fine.ended(outcome, fine.started(0), 0.1, 0)

    assert fine.view(0, Priority.HIGH).breaker_allows


def test_answers_and_late_answers_teach_the_predictor() -> None:
    """Refusals do not."""
    taught = gate()
    taught.ended(LlmOutcome.OVERLOADED, taught.started(0), 5.0, 0)
    assert taught.view(0, Priority.HIGH).predicted_s == 0
    taught.ended(LlmOutcome.IN_TIME, taught.started(0), 0.1, 0)
    assert taught.view(0, Priority.HIGH).predicted_s >= 0.1
    taught.ended(LlmOutcome.LATE, taught.started(0), 1.0, 0)

    assert taught.view(0, Priority.HIGH).predicted_s > 0.2


def test_an_engines_own_report_counts_other_gateways_requests_for_a_second() -> None:
    """The larger of the two loads holds while the report is fresh."""
    told = gate()
    told.reported(EngineLoad(num_running=3, num_waiting=4, kv_cache_usage=0.5), now_s=10)

    assert told.started(11.0).load == 7
    assert told.started(11.1).load == 1
