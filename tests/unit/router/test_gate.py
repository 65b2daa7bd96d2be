"""The LLM gate counts requests in flight, chooses their replicas, and reports outcomes to the replica's state."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.contracts.access import Priority
from services.contracts.engine_load import EngineLoad
from services.router.breaker import Breaker
from services.router.gate import LlmGate, LlmView
from services.router.policy import LlmOutcome
from services.router.predictor import LatencyPredictor
from services.router.replica import RankSize, Replica

NAMES = ("a", "b", "c")


def size_of(session: str = "s", tokens: int = 100) -> RankSize:
    return RankSize(session=session, window_start=0, num_prompt_tokens=tokens, num_beam_rows=0)


def new_gate(first_s: float = 0.0) -> LlmGate:
    return LlmGate(lambda: Replica(Breaker(2, open_s=10), LatencyPredictor(first_s)), max_in_flight=8)


def view(gate: LlmGate, now_s: float, names: tuple[str, ...] = (), session: str = "s") -> LlmView:
    return gate.view(names, size_of(session), Priority.HIGH, 0.1, now_s)


def rank(gate: LlmGate, name: str, outcome: LlmOutcome, took_s: float, at_s: float = 0.0, tokens: int = 100) -> None:
    """Send a request that ends after `took_s`."""
    gate.ended(outcome, gate.started(name, size_of(tokens=tokens), at_s), at_s + took_s)


@given(st.lists(st.sampled_from(LlmOutcome), max_size=50))
def test_every_request_that_ends_frees_its_place(outcomes: list[LlmOutcome]) -> None:
    """After any outcome, the request no longer counts as in flight."""
    gate = new_gate()
    for now_s, outcome in enumerate(outcomes):
        sent = gate.started("", size_of(), float(now_s))
        assert view(gate, float(now_s)).num_in_flight == 1
        gate.ended(outcome, sent, now_s + 0.1)

    assert view(gate, 99.0).num_in_flight == 0


@pytest.mark.parametrize("outcome", LlmOutcome)
def test_failures_and_silence_open_the_gate(outcome: LlmOutcome) -> None:
    """Failures open the breaker, silence raises the prediction, and otherwise only answers train the predictor."""
    gate = new_gate()
    for _ in range(20):
        rank(gate, "", outcome, 0.1)

    is_failure, is_silence = (
        outcome in kinds
        for kinds in ({LlmOutcome.FAILED, LlmOutcome.UNAVAILABLE}, {LlmOutcome.LATE, LlmOutcome.ABANDONED})
    )
    assert gate.is_open(0.1) is (is_failure or is_silence)
    assert view(gate, 0.1).breaker_allows is not is_failure
    assert (view(gate, 0.1).predicted_s > 0.1) is is_silence
    assert (view(gate, 0.1).predicted_s > 0.05) is (is_silence or outcome is LlmOutcome.IN_TIME)


def test_the_engines_reported_load_counts_for_a_second() -> None:
    """The larger of the reported and the own load applies while the report is fresh."""
    gate = new_gate()
    gate.reported("", EngineLoad(num_running=3, num_waiting=4, kv_cache_usage=0.5), now_s=10)

    assert gate.started("", size_of(), 11.0).load == 7
    assert gate.started("", size_of(), 11.1).load == 1


@given(st.sets(st.sampled_from("abcdefgh"), min_size=2, max_size=6), st.text("ab", max_size=5))
def test_a_session_keeps_its_order_when_another_replica_goes(names: set[str], session: str) -> None:
    """The remaining replicas keep their order."""
    gate = new_gate()
    before = view(gate, 0.0, tuple(names), session).replicas
    for removed in before:
        left = tuple(name for name in before if name != removed)
        assert view(gate, 0.0, left, session).replicas == left


def test_a_hung_replica_is_left_before_any_deadline_has_passed_and_tried_ever_more_rarely() -> None:
    """Overdue requests divert the next requests; later, trials use copies at doubling intervals."""
    gate = new_gate(first_s=0.02)
    home, *_ = view(gate, 0.0, NAMES).replicas
    for _ in range(30):
        rank(gate, home, LlmOutcome.IN_TIME, 0.02)
    stuck = gate.started(home, size_of(), 1.0)
    assert view(gate, 1.01, NAMES).replicas[0] == home

    assert home not in view(gate, 1.1, NAMES).replicas
    gate.ended(LlmOutcome.LATE, stuck, 1.2)
    trials_s = []
    for tenth in range(12, 600):
        seen = view(gate, tenth / 10, NAMES)
        assert home not in seen.replicas
        if seen.trial is not None:
            assert seen.trial == home
            trials_s.append(tenth / 10)
            rank(gate, home, LlmOutcome.LATE, 0.1, at_s=tenth / 10)
    assert 10 < len(trials_s) < 25
    pauses_s = [later - earlier for earlier, later in pairwise(trials_s)]
    assert pauses_s[-1] > 4 * pauses_s[0]


def test_a_replica_that_is_predicted_to_need_all_that_is_left_is_in_time() -> None:
    """A replica whose prediction equals the remaining time is preferred over the session's silent first replica."""
    gate = new_gate(first_s=0.1)
    home, other = view(gate, 0.0, NAMES[:2]).replicas
    rank(gate, home, LlmOutcome.LATE, 0.5)

    assert view(gate, 0.5, NAMES[:2]).replicas[0] == other


def test_a_silent_replica_is_tried_if_it_may_answer_in_all_that_is_left() -> None:
    """The silent replica gets a trial if its prediction equals the remaining time, and none if it exceeds it."""
    gate = new_gate(first_s=0.1)
    home, _ = view(gate, 0.0, NAMES[:2]).replicas
    rank(gate, home, LlmOutcome.LATE, 0.5)
    predicted_s = gate._replicas[home].predict_s(size_of(), 1.0)

    for budget_s, trial in ((predicted_s, home), (predicted_s - 0.001, None)):
        assert gate.view(NAMES[:2], size_of(), Priority.HIGH, budget_s, 1.0).trial == trial


def test_an_answer_that_comes_as_a_request_leaves_is_no_silence() -> None:
    """A late request sent at the time of the last answer does not open the breaker; a request sent after it does."""
    for left_s, is_open in ((1.0, False), (1.001, True)):
        gate = new_gate()
        rank(gate, "", LlmOutcome.IN_TIME, 1.0)
        rank(gate, "", LlmOutcome.LATE, 3.0, at_s=left_s)

        assert gate.is_open(left_s + 3.0) is is_open


def test_where_no_other_replica_can_answer_in_time_a_request_is_the_trial() -> None:
    """If only the silent replica is fast enough, the request itself is the trial, one at a time."""
    gate = new_gate()
    home, other, *_ = view(gate, 0.0, NAMES[:2]).replicas
    for number in range(20):
        rank(gate, other, LlmOutcome.IN_TIME, 0.5, float(number))
    gate.started(other, size_of(), 20.0)
    rank(gate, home, LlmOutcome.LATE, 0.1, at_s=20.0)

    seen = view(gate, 20.2, (home, other))

    assert (seen.replicas[0], seen.trial) == (home, None)
    gate.started(home, size_of(), 20.2)
    assert view(gate, 20.2, (home, other)).trial is None


def test_one_answer_brings_a_silent_replica_back() -> None:
    """The trial of a silent replica is one request; its answer makes the replica available again."""
    gate = new_gate()
    for _ in range(30):
        rank(gate, "a", LlmOutcome.IN_TIME, 0.01, at_s=-1.0)
    rank(gate, "a", LlmOutcome.LATE, 0.1)
    trial = gate.started("a", size_of(), 1.0)
    assert view(gate, 1.0, ("a",)).predicted_s == pytest.approx(0.4)

    gate.ended(LlmOutcome.IN_TIME, trial, 1.05)

    assert view(gate, 1.05, ("a",)).predicted_s < 0.1


def test_long_prompts_do_not_make_short_ones_slow() -> None:
    """The prediction grows with the tokens to compute, excluding the cached part of the prompt."""
    gate = new_gate()
    for number in range(40):
        rank(gate, "a", LlmOutcome.IN_TIME, 0.5 if number % 2 else 0.02, float(number), 5_000 if number % 2 else 100)
        gate._replicas["a"]._prompts.clear()

    short, long = (gate.view(("a",), size_of("t", tokens), Priority.HIGH, 1.0, 39.5) for tokens in (100, 5_000))

    assert short.predicted_s < 0.1
    assert long.predicted_s > 0.4
    rank(gate, "a", LlmOutcome.IN_TIME, 0.5, 39.5, tokens=5_000)
    assert gate.view(("a",), size_of("s", 5_010), Priority.HIGH, 1.0, 40.0).predicted_s < 0.15


def test_a_slow_replica_is_passed_over_for_one_that_is_predicted_in_time() -> None:
    """If no prediction fits the budget, the session's own replica is first, and the policy finds it too slow."""
    gate = new_gate()
    home, other, *_ = view(gate, 0.0, NAMES[:2]).replicas
    for number in range(20):
        rank(gate, home, LlmOutcome.IN_TIME, 0.5, float(number))
    gate.started(home, size_of(), 20.0)

    assert view(gate, 20.01, (home, other)).replicas == (other, home)
    assert view(gate, 20.01, (home,)).predicted_s > 0.1
