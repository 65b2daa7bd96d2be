"""The canary analysis: its outcomes, reasons, and error rates on simulated traffic."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.release.simulated import found_after_s
from benchmarks.release.traffic import SimulatedTraffic, looks
from pipelines.experiments.user_sums import UserSums, difference_variance
from pipelines.experiments.verdict import Affected, Guard, Means, Outcome, State, verdict
from services.errors import ConfigError

CLICKS = Guard(name="clicks", higher_is_worse=False, is_objective=True)
ERRORS = Guard(name="errors")
MINUTES = SimulatedTraffic(rate=50, minutes=10, num_users=5_000)


def users(rate: float, num: int = 5_000, num_lists: int = 4) -> UserSums:
    """Build sums of users with `num_lists` lists and clicks at this exact rate."""
    clicked = round(rate * num * num_lists)
    return UserSums.of(
        np.bincount(np.arange(clicked) % num, minlength=num).astype(float), np.full(num, float(num_lists))
    )


def judge(candidate: float, control: float = 0.1, guard: Guard = CLICKS, num: int = 5_000, limit_s: float = math.inf):
    """Return the verdict on click rates."""
    counts = {"clicks": Means(users(candidate, num), users(control, num))}
    return verdict((guard,), counts, share=0.5, elapsed_s=600, limit_s=limit_s)


@pytest.mark.parametrize(
    ("candidate", "outcome"),
    [(0.07, Outcome.WORSE), (0.14, Outcome.BETTER), (0.1, Outcome.NO_WORSE), (0.094, Outcome.CONTINUE)],
)
def test_outcomes(candidate: float, outcome: Outcome) -> None:
    """Fewer clicks are worse, more are better, about equal no worse; in between, the canary continues."""
    assert judge(candidate, num=20_000 if outcome is Outcome.NO_WORSE else 5_000).outcome is outcome


def test_a_budget_is_what_may_be_lost() -> None:
    """A loss that is detected without a budget is tolerated within the budget."""
    assert judge(0.07, guard=replace(CLICKS, budget=0.35, effect=0.4)).outcome is not Outcome.WORSE
    assert judge(0.05, guard=replace(CLICKS, budget=0.35, effect=0.4)).outcome is Outcome.WORSE


def test_worse_wins_and_says_where() -> None:
    """A single worse guard decides over a better objective, and the reason names it with its interval."""
    counts = {"clicks": Means(users(0.2), users(0.1)), "errors": Affected(40, 2)}

    result = verdict((CLICKS, ERRORS), counts, share=0.5, elapsed_s=60)

    assert result.outcome is Outcome.WORSE
    assert result.reason.startswith("errors worse: worse by +1900.0%, interval +")
    assert [reading.state for reading in result.readings] == [State.BETTER, State.WORSE]


def test_no_verdict_in_time_says_what_it_lacks() -> None:
    """After the time limit, the reason names each open guard and the additional users that it needs."""
    result = judge(0.097, num=150, limit_s=600)

    assert result.outcome is Outcome.UNDECIDED
    assert "times the users" in result.reason
    assert "users, a mean needs 100" in judge(0.1, num=50).reason
    few = verdict((ERRORS,), {"errors": Affected(1, 0)}, share=0.5, elapsed_s=1)
    assert "1 users of the candidate and 0 of the control" in few.reason


def test_errors_count_users_by_their_share() -> None:
    """Four failing users against zero are worse at a traffic fraction of 5 %, but not at 50 %."""
    counts = {"errors": Affected(4, 0)}

    assert verdict((ERRORS,), counts, share=0.05, elapsed_s=1).outcome is Outcome.WORSE
    assert verdict((ERRORS,), counts, share=0.5, elapsed_s=1).outcome is Outcome.CONTINUE


@pytest.mark.parametrize("field", ["budget", "effect", "weight"])
def test_a_guard_without_sense_is_refused_by_field(field: str) -> None:
    """Negative fields, a guard without counts and an invalid fraction are rejected by name."""
    with pytest.raises(ConfigError, match=f"guard clicks: {field}"):
        replace(CLICKS, **{field: -1.0})
    with pytest.raises(ConfigError, match="guard errors: no counts"):
        verdict((ERRORS,), {}, share=0.5, elapsed_s=1)
    with pytest.raises(ConfigError, match="share"):
        verdict((), {}, share=1.0, elapsed_s=1)


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 20)), min_size=2, max_size=30), st.integers(0, 30))
def test_sums_of_users_add(rows: list[tuple[float, int]], cut: int) -> None:
    """Sums of two groups add up, and the mean's variance equals the delta method computed user by user."""
    totals, exposures = (np.array(column, dtype=float) for column in zip(*rows, strict=True))

    both = UserSums.of(totals[:cut], exposures[:cut]) + UserSums.of(totals[cut:], exposures[cut:])

    mean = totals.sum() / exposures.sum()
    slow = len(rows) / (len(rows) - 1) * sum((totals - mean * exposures) ** 2) / exposures.sum() ** 2
    assert both.mean == pytest.approx(mean)
    assert both.variance == pytest.approx(slow, rel=1e-6, abs=1e-9 * (1 + totals.max()) ** 2)


def test_a_small_group_with_few_events_is_not_certain() -> None:
    """Zero clicks of 120 users do not give a difference with almost zero variance."""
    few, many = users(0.0, num=120), users(0.1)

    assert few.variance == 0
    assert difference_variance(few, many) > 20 * many.variance


def test_the_running_sums_of_simulated_traffic_are_those_of_its_users() -> None:
    """The simulation's cumulative sums match its users and never decrease."""
    seen = list(looks(replace(MINUTES, minutes=3), seed=1))
    clicks = [look["clicks"] for look in seen]

    assert all(isinstance(means, Means) for means in clicks)
    grown = [(means.candidate.exposure, means.candidate.total_squared) for means in clicks if isinstance(means, Means)]
    assert grown == sorted(grown)
    assert sum(abs(sums.exposure - 50 * 180 / 2) for sums in (clicks[-1].candidate, clicks[-1].control)) < 600


@pytest.mark.parametrize("change", [{"latency_factor": 1.2}, {"added_errors": 0.01}], ids=["latency", "errors"])
def test_what_is_worse_is_found_within_ten_minutes(change: dict[str, float]) -> None:
    """Higher latency and failing calls are detected in each of five runs at 50 requests per second."""
    assert all(found_after_s(replace(MINUTES, **change), seed) for seed in range(5))


def test_equal_candidates_are_rarely_found_worse() -> None:
    """Of 60 equal candidates with 60 looks each, at most 8 are found worse (at most 3 are expected)."""
    traffic = SimulatedTraffic(rate=4, minutes=60, num_users=2_000)

    assert sum(found_after_s(traffic, seed) is not None for seed in range(60)) <= 8
