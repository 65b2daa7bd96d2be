"""Decisions of the canary analysis, and their records."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.release.traffic import SimulatedTraffic, looks
from models.registry.canary import Canary, CanaryStage
from models.registry.release_report import ReleaseReport
from pipelines.experiments.user_sums import UserSums
from pipelines.experiments.verdict import Affected, Means, Outcome, State
from pipelines.release.counts import StageResults
from pipelines.release.decision import Act, decide
from pipelines.release.guards import GUARDS, MEANINGS, check_budgets, guards_of, judge, mismatch
from services.errors import ConfigError

CANARY = Canary(
    version="new",
    salt="s",
    stages=(CanaryStage(0.5, 600.0), CanaryStage(1.0, 60.0)),
    by="someone",
    at="2027-01-15T08:00:00Z",
    since_ms=1_000_000,
)
LATER_MS = CANARY.since_ms + 700_000


def means(candidate: float, control: float, num: int) -> Means:
    """Build users with four lists each, with this mean and a spread of a tenth."""
    spread = np.tile([0.9, 1.1], num // 2) * 4
    return Means(*(UserSums.of(spread * mean, np.full(num, 4.0)) for mean in (candidate, control)))


def rare(candidate: int, control: int, num: int = 5_000) -> Affected:
    """Build counts of a rare outcome that affects this many users of each version once."""
    hit = (np.arange(num) < num_hit for num_hit in (candidate, control))
    return Affected(candidate, control, Means(*(UserSums.of(hits.astype(float), np.full(num, 4.0)) for hits in hit)))


def seen(num: int = 5_000, **changes: Any) -> StageResults:
    """Build counts of two equal versions."""
    counts: dict[str, Means | Affected] = {
        "errors": rare(0, 0, num),
        "refusals": rare(0, 0, num),
        "missing": rare(0, 0, num),
        "deadline_misses": rare(3, 3, num),
        "popular": rare(0, 0, num),
        "variety": means(0.7, 0.7, num),
        "clicks": means(0.1, 0.1, num),
        **{name: means(20.0, 20.0, num) for name in ("latency", "latency:llm", "latency:student")},
        "latency:precomputed": means(20.0, 20.0, 2),
    }
    counts |= {name: value for name, value in changes.items() if name in counts}
    built = StageResults(counts=counts, share=0.5, num_users=(num, num), num_lists=(4 * num, 4 * num), stray_share=0.0)
    return replace(built, **{name: value for name, value in changes.items() if name not in counts})


def test_equal_goes_on_and_after_the_last_stage_live() -> None:
    """An equal candidate moves on after its stage's time without waiting for rare tiers, and is finally promoted."""
    decision = decide(CANARY, seen(), LATER_MS)
    assert (decision.act, decision.verdict and decision.verdict.outcome) == (Act.MOVE_ON, Outcome.NO_WORSE)

    last = replace(CANARY, stage=1)
    assert decide(last, seen(), LATER_MS).act is Act.PROMOTE
    assert decide(last, seen(), CANARY.since_ms + 59_000).act is Act.STAY


def test_worse_is_withdrawn_at_once_also_by_hand() -> None:
    """A worse candidate is withdrawn before the stage ends, also in a manual release, with the guard as reason."""
    for canary in (CANARY, replace(CANARY, by_hand=True)):
        decision = decide(canary, seen(latency=means(26.0, 20.0, 5_000)), CANARY.since_ms + 1_000)

        assert decision.act is Act.WITHDRAW
        assert decision.reason.startswith("latency worse: worse by +30.0%")


@pytest.mark.parametrize("guard", ["errors", "refusals", "missing"])
def test_what_gets_no_list_counts(guard: str) -> None:
    """Failures, refusals or empty lists for 30 % or 3 % of the candidate's users lead to withdrawal."""
    for hit in (1_500, 150):
        decision = decide(CANARY, seen(**{guard: rare(hit, 0)}), LATER_MS)
        assert (decision.act, guard in decision.reason) == (Act.WITHDRAW, True)


def test_an_analysis_that_lost_users_stays() -> None:
    """With users missing from the candidate, it is not promoted, but a measured loss still withdraws it."""
    lost = {"num_new": (4_500, 5_000), "new_share": 0.5}

    stays = decide(CANARY, seen(**lost), LATER_MS)
    assert (stays.act, stays.lost_users, "users are missing" in stays.reason) == (Act.STAY, True, True)
    assert decide(CANARY, seen(num_new=(4_960, 5_000), new_share=0.5), LATER_MS).act is Act.MOVE_ON
    assert decide(CANARY, seen(errors=rare(1_500, 0), **lost), LATER_MS).act is Act.WITHDRAW


def test_the_last_stage_asks_for_requests_that_do_not_fail() -> None:
    """The last stage lacks a control, but failing requests still prevent the promotion."""
    last = replace(CANARY, stage=1)

    assert decide(last, seen(errors=rare(1_500, 0)), LATER_MS).act is Act.STAY


def test_equal_candidates_are_seldom_stopped_and_lost_users_are_found() -> None:
    """Over 200 looks, the ratio test rarely stops an equal release, and detects lost users."""
    draw, equal = np.random.default_rng(7), seen()

    def stopped(kept: float) -> bool:
        """Return whether any look stops a release that keeps this fraction of the candidate's users."""
        mine = draw.binomial(20, 0.5, 200)
        candidate, control = np.cumsum(draw.binomial(mine, kept)), np.cumsum(20 - mine)
        looks = zip(candidate.tolist(), control.tolist(), strict=True)
        return any(mismatch(CANARY, replace(equal, num_new=users, new_share=0.5)) for users in looks)

    assert sum(stopped(1.0) for _ in range(200)) <= 3
    assert all(stopped(0.8) for _ in range(5))


def test_a_budget_tolerates_what_it_names_and_its_tiers() -> None:
    """A latency budget also applies to latency by tier."""
    slower: dict[str, Any] = {name: means(23.0, 20.0, 5_000) for name in ("latency", "latency:llm")}

    assert decide(CANARY, seen(**slower), LATER_MS).act is Act.WITHDRAW
    assert decide(replace(CANARY, budgets={"latency": 0.3}), seen(**slower), LATER_MS).act is Act.MOVE_ON


@pytest.mark.parametrize(
    ("changes", "now_ms", "lacking"),
    [
        ({"num": 60}, LATER_MS, "a mean needs 100"),
        ({"num_lists": (0, 10)}, LATER_MS, "no user has received a list of it yet"),
        ({"stray_share": 0.4}, LATER_MS, "the live version made 40% of its users' lists"),
        ({}, CANARY.since_ms + 500_000, "the stage lasts 100 s more"),
        ({"errors": rare(60, 50, 1_000)}, LATER_MS, "errors: happened to 60 users of the candidate and 50"),
    ],
)
def test_what_is_not_known_stays_and_is_named(changes: dict[str, Any], now_ms: int, lacking: str) -> None:
    """Too few users, foreign answers, remaining time and inconclusive failures keep the stage, with the reason."""
    decision = decide(CANARY, seen(**changes), now_ms)

    assert decision.act is Act.STAY
    assert lacking in decision.reason


def test_clicks_and_variety_are_waited_for_where_there_are_any() -> None:
    """Without clicks in the control or without variety, the other guards decide."""
    none = means(0.0, 0.0, 5_000)

    assert decide(CANARY, seen(clicks=none, variety=none), LATER_MS).act is Act.MOVE_ON
    assert decide(CANARY, seen(clicks=means(0.1, 0.1, 80)), LATER_MS).act is Act.STAY


def test_by_hand_it_stays_with_the_next_command() -> None:
    """A manual release stays and names the command to continue."""
    decision = decide(replace(CANARY, by_hand=True), seen(), LATER_MS)

    assert (decision.act, "tailrace release --next" in decision.reason) == (Act.STAY, True)


def test_small_stages_are_asked_to_exclude_large_losses_alone() -> None:
    """Required effects shrink with the root of the stage's traffic fraction; budgets do not change."""
    canary = replace(CANARY, stages=(CanaryStage(0.01, 60.0), CanaryStage(0.25, 60.0), CanaryStage(1.0, 0.0)))
    first, second = (
        {guard.name: guard for guard in guards_of(replace(canary, stage=stage), seen())} for stage in (0, 1)
    )

    assert second["clicks"] == {guard.name: guard for guard in GUARDS}["clicks"]
    assert first["clicks"].effect == pytest.approx(0.5)
    assert first["errors"].tolerance == pytest.approx(0.025)
    assert first["latency"].budget == second["latency"].budget == 0.1


def test_stages_share_the_false_alarms() -> None:
    """With more stages, each stage needs more evidence."""
    few = seen(errors=rare(11, 0))
    five = replace(
        CANARY, stages=(*(CanaryStage(0.1 * step, 1.0) for step in range(1, 5)), CanaryStage(0.5, 1.0)), stage=4
    )

    assert judge(CANARY, few, LATER_MS).outcome is Outcome.WORSE
    assert judge(five, few, LATER_MS).outcome is not Outcome.WORSE


def test_a_report_has_a_row_for_each_guard_and_is_read_again() -> None:
    """The report is strict JSON for any numbers, with non-finite bounds as None."""
    text = decide(CANARY, seen(errors=rare(1, 0)), LATER_MS).report.encode()

    report = ReleaseReport.decode(text)

    assert report is not None
    assert json.loads(text, parse_constant=pytest.fail)["outcome"] == report.outcome
    assert [guard.name for guard in report.guards] == [guard.name for guard in GUARDS]
    assert (report.share, report.elapsed_s, report.act) == (0.5, 700, "move on")
    assert report.guards[0].high is None


def test_budgets_name_guards() -> None:
    """Guards other than those by tier accept budgets; unknown guards are rejected with the list."""
    check_budgets(dict.fromkeys(MEANINGS, 0.5))
    assert {guard.name.partition(":")[0] for guard in GUARDS} == set(MEANINGS)
    with pytest.raises(ConfigError, match="give one of errors, refusals, missing, deadline_misses"):
        check_budgets({"speed": 0.1})
    with pytest.raises(ConfigError, match="give 0% to below 100%"):
        check_budgets({"latency": 1.0})


@given(st.integers(0, 400), st.integers(0, 400), st.integers(400, 5_000))
def test_rare_failures_are_tolerated_only_while_few_lists_have_more_of_them(hit: int, other: int, num: int) -> None:
    """A rare guard is worse if the user ratio is; no worse requires close list rates or evidence in the ratio."""
    result = judge(CANARY, seen(errors=rare(hit, other, num)), LATER_MS)
    errors = result.readings[0]

    assert (errors.state is State.WORSE) == (errors.low > 0)
    if errors.state is State.NO_WORSE and not errors.high < 0.5:
        assert (hit - other) / (4 * num) < 0.005


def test_a_worse_candidate_is_found_within_ten_minutes_of_traffic() -> None:
    """At 50 requests per second with half of the users, losses are found and an equal candidate is not."""
    traffic = SimulatedTraffic(rate=50, minutes=10)
    one_stage = replace(CANARY, stages=(CanaryStage(0.5, 600.0),))

    def outcomes(worse: SimulatedTraffic, seed: int) -> set[Outcome]:
        return {judge(one_stage, replace(seen(), counts=counts), LATER_MS).outcome for counts in looks(worse, seed)}

    assert Outcome.WORSE in outcomes(replace(traffic, added_errors=0.01), 1)
    assert Outcome.WORSE in outcomes(replace(traffic, latency_factor=1.3), 1)
    assert Outcome.WORSE in outcomes(replace(traffic, click_factor=0.75), 1)
    assert Outcome.WORSE not in outcomes(traffic, 1)
