"""The figures of a row, against numbers calculated by hand."""

import pytest

from benchmarks.load.open_loop import RequestOutcome, Shot
from benchmarks.load.scoring import answers_recovered_s, summarise, tier_weights

REPORT = {
    "metrics": {"decoder": {"ndcg@10": 0.125}, "student": {"ndcg@10": 0.1}, "popularity": {"ndcg@10": 0.05}},
}
WEIGHTS = tier_weights(REPORT)
REASONS = {"llm": "llm_in_time", "precomputed": "precomputed_fresh", "student": "llm_away", "popular": "unknown_user"}


def shot(tier: str, ms: float = 10.0, at_s: float = 0.0, reason: str = "") -> Shot:
    """Build a shot answered by this tier, or failed ("none")."""
    outcome = RequestOutcome(is_ok=tier != "none", tier=tier, reason=reason or REASONS.get(tier, "http_500"))
    return Shot(ms / 1_000, 0.0, outcome, at_s)


def test_a_tier_is_worth_its_ndcg_over_the_llms() -> None:
    """Stored lists have the LLM's weight."""
    assert pytest.approx({"llm": 1.0, "precomputed": 1.0, "student": 0.8, "popular": 0.4}) == WEIGHTS


def test_a_row_by_hand() -> None:
    """Ten requests: one failed, one late, one at the last moment; a fast failure is worth nothing."""
    shots = [shot("llm")] * 4 + [shot("precomputed")] * 2 + [shot("student", ms=200), shot("popular")]
    row = summarise([*shots, shot("none"), shot("llm", ms=201)], 200, WEIGHTS)

    assert row["availability"] == 0.9
    assert row["deadline_met"] == 0.8
    assert row["goodput"] == pytest.approx((4 + 2 + 0.8 + 0.4) / 10)
    assert (row["p50_ms"], row["p99_ms"], row["max_ms"]) == (10, 201, 201)
    assert row["tiers"] == {"llm": 0.5, "none": 0.1, "popular": 0.1, "precomputed": 0.2, "student": 0.1}
    fast = summarise([shot("none", ms=1)], 200, WEIGHTS)
    assert (fast["availability"], fast["deadline_met"], fast["goodput"]) == (0, 0, 0)


def test_recovery_is_the_beginning_of_two_calm_seconds() -> None:
    """A shorter calm is no recovery."""
    back_s = 10.0
    good = {10.0 + number / 10 for number in range(100)}
    bad = {at_s for at_s in good if at_s < 11.5 or 12.0 <= at_s < 13.0}
    shots = [shot("student" if at_s in bad else "llm", at_s=at_s) for at_s in sorted(good)]

    assert answers_recovered_s(shots, back_s, usual_share=0.0) == 3.0
    assert answers_recovered_s(shots[::-1], back_s, usual_share=0.0) == 3.0


@pytest.mark.parametrize(("usual_share", "recovered_s"), [(0.0, None), (0.5, 0.0)])
def test_recovery_is_relative_to_the_usual_share(usual_share: float, recovered_s: float | None) -> None:
    """Degradation to the end is no recovery, unless it was as usual before; without requests there is none."""
    shots = [shot("student" if number % 2 else "llm", at_s=number / 10) for number in range(100)]

    assert answers_recovered_s(shots, 2.0, usual_share) == recovered_s
    assert answers_recovered_s([], 2.0, usual_share) is None
