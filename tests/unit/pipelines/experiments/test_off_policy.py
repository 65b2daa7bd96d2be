"""Off-policy estimates against policies of known value, and refusals without support."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from pipelines.experiments.off_policy import LoggedLists, estimate, read_logged
from services.errors import DataError
from tests.support.joined_table import write_table
from tests.support.policies import World, best_list, coverage, plackett_luce, run

BY_HAND = LoggedLists(
    user=np.repeat(np.arange(200), 2),
    reward=np.tile([1.0, 0.0, 1.0, 1.0], 100),
    propensity=np.full(400, 0.5),
    probability=np.tile([1.0, 0.0], 200),
)


@pytest.mark.parametrize("kind", ["drawn by Plackett-Luce", "hashed variants"])
def test_intervals_hold_the_truth(kind: str) -> None:
    """Most of the 25 intervals contain the policy's true value."""
    row = coverage(kind, 25)

    assert row["refused"] <= 3
    for name in ("ips", "snips", "doubly_robust"):
        assert row[name]["covered_share"] > 0.8


def test_by_hand() -> None:
    """With every second list from the policy and weight 2, the value is 1 and half of the lists are effective."""
    estimates = estimate(BY_HAND)

    assert estimates.ips is not None
    assert estimates.snips is not None
    assert (estimates.ips.value, estimates.snips.value, estimates.effective_lists) == (1.0, 1.0, 200.0)
    assert estimates.doubly_robust is None


def test_a_perfect_model_needs_no_weights() -> None:
    """With an exact reward model, the doubly robust estimate is the model's mean for the policy."""
    ones = np.ones(400)

    estimates = estimate(replace(BY_HAND, reward_of_shown=BY_HAND.reward, reward_of_policy=ones * 0.7))

    assert estimates.doubly_robust is not None
    assert estimates.doubly_robust.value == pytest.approx(0.7)


def test_a_share_that_is_never_shown_is_refused_and_named() -> None:
    """If the log never shows an item first, the estimate is refused with the unsupported fraction."""
    estimates, _, supported = run("an item is never shown first", 0)

    assert estimates.ips is None
    assert estimates.refusal.startswith("no support: ")
    assert estimates.support is not None
    assert estimates.support.low <= supported <= estimates.support.high


def test_a_deterministic_log_has_no_number() -> None:
    """With propensities missing or all 1, the result is only a reason."""
    world = World(1)
    fixed = world.log(best_list(world.scores), plackett_luce(world.scores))

    for propensity in (fixed.propensity, np.full(len(fixed.user), math.nan)):
        estimates = estimate(replace(fixed, propensity=propensity))
        assert "deterministic" in estimates.refusal
        assert (estimates.ips, estimates.snips, estimates.doubly_robust, estimates.logged) == (None,) * 4


def test_lists_without_propensity_and_too_few_lists_are_refused() -> None:
    """Missing propensities in a tenth of the lists, and too few effective lists, are reported."""
    partly = np.where(np.arange(400) % 10 == 0, math.nan, 0.5)

    assert "10.0% of the lists have no propensity" in estimate(replace(BY_HAND, propensity=partly)).refusal
    columns = ("user", "reward", "propensity", "probability")
    few = replace(BY_HAND, **{name: getattr(BY_HAND, name)[:40] for name in columns})
    assert "too few" in estimate(few).refusal
    with pytest.raises(DataError, match="propensity"):
        estimate(replace(BY_HAND, propensity=np.zeros(400)))


def test_a_table_and_a_policy_s_file(tmp_path: Path) -> None:
    """A list's propensity is the product over its items; requests missing from the policy file are reported."""
    table = write_table(tmp_path / "t", num_days=1, num_users=300, num_lists=600)
    (file,) = table.glob("*.parquet")
    drawn = pl.col("position").replace_strict({1: 0.5, 2: 1.0, 3: 0.5}, return_dtype=pl.Float64)
    pl.read_parquet(file).with_columns(propensity=drawn).write_parquet(file)
    requests = pl.read_parquet(file)["request_id"].unique(maintain_order=True)
    policy = tmp_path / "policy.parquet"

    pl.DataFrame({"request_id": requests, "probability": [0.25] * len(requests)}).write_parquet(policy)
    estimates = estimate(read_logged(table, policy))

    assert estimates.ips is not None
    assert estimates.ips.value == pytest.approx(pl.read_parquet(file)["clicks"].sum() / 600)
    pl.DataFrame({"request_id": requests[:300], "probability": [0.25] * 300}).write_parquet(policy)
    with pytest.raises(DataError, match=r"50\.0% of the table's requests"):
        read_logged(table, policy)
    pl.DataFrame({"request_id": requests, "probability": [1.5] * 600}).write_parquet(policy)
    with pytest.raises(DataError, match="probability"):
        read_logged(table, policy)
