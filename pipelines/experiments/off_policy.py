"""Off-policy evaluation: estimates the value of a policy that did not serve from logged propensities, or refuses to.

A list's weight is the policy's probability of it over its logged propensity. The estimates are IPS (Horvitz and
Thompson 1952), SNIPS (Swaminathan and Joachims, NeurIPS 2015) and doubly robust (Dudik, Langford and Li, ICML 2011),
with 95 % intervals by users, for one look.

The mean weight also measures support. It is 1 if the log could have shown every list of the policy; a mean below 1 is
the fraction of the policy covered by the log. No estimate can cover the rest: then the result is a refusal, as it is
for a log without random draws. Pure; numpy only, except `read_logged`.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from pipelines.experiments.join import unit
from pipelines.experiments.user_sums import UserSums
from services.errors import DataError

_NORMAL = 1.959964
_REFUSED_AT = 2.575829
"""Maximum standard errors of the mean weight below 1: 99 %, two-sided."""
MAX_SUPPORT_ERROR = 0.2
"""Largest half width of the support's interval that still allows an estimate."""
MIN_EFFECTIVE = 100.0
_LIST = ["request_id", "user_id", "shown_time_ms"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedLists:
    """Lists of a log, one entry per list.

    Args:
        user: Number of the user.
        reward: The list's reward.
        propensity: Probability that the list was shown (NaN: not recorded).
        probability: Probability that the policy shows it.
        reward_of_shown: A model's predicted reward of the shown list; None: no model.
        reward_of_policy: The model's mean predicted reward of the policy's lists.
    """

    user: np.ndarray
    reward: np.ndarray
    propensity: np.ndarray
    probability: np.ndarray
    reward_of_shown: np.ndarray | None = None
    reward_of_policy: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean per list with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OffPolicy:
    """The estimates; empty if `refusal` gives a reason.

    `support` is the fraction of the policy that the log can show; `effective_lists` is the effective sample size.
    """

    num_lists: int
    num_users: int
    refusal: str = ""
    logged: Estimate | None = None
    ips: Estimate | None = None
    snips: Estimate | None = None
    doubly_robust: Estimate | None = None
    support: Estimate | None = None
    effective_lists: float | None = None


def estimate(logged: LoggedLists) -> OffPolicy:
    """Estimate the policy's mean reward per list, or refuse. Raises DataError for an invalid propensity."""
    _, user = np.unique(logged.user, return_inverse=True)
    num_lists, num_users = len(user), int(user.max()) + 1 if len(user) else 0

    def refused(why: str, support: Estimate | None = None, effective: float | None = None) -> OffPolicy:
        return OffPolicy(
            num_lists=num_lists, num_users=num_users, refusal=why, support=support, effective_lists=effective
        )

    if num_users < 2:
        return refused(f"{num_users} users are too few for an interval")
    known = np.isfinite(logged.propensity)
    if not ((logged.propensity[known] > 0) & (logged.propensity[known] <= 1)).all():
        raise DataError(
            "propensity", "the log has a value outside of (0, 1]", "0.25: an impression had a probability above 0"
        )
    if not known.any() or (logged.propensity[known] >= 1).all():
        return refused(
            "the log is deterministic: no list was drawn at random, so propensities and estimates do not exist"
        )
    if not known.all():
        return refused(f"{1 - known.mean():.1%} of the lists have no propensity, so their alternatives are unknown")
    weight = logged.probability / logged.propensity
    ones = np.ones(num_lists)

    def mean(values: np.ndarray, exposures: np.ndarray = ones) -> Estimate:
        return _mean(user, values, exposures, num_users)

    support = mean(weight)
    error = (support.high - support.value) / _NORMAL
    effective = float(weight.sum() ** 2 / (weight @ weight)) if weight.any() else 0.0
    if support.value + _REFUSED_AT * error < 1:
        return refused(
            f"no support: {1 - support.value:.1%} of the policy's lists ({max(0.0, 1 - support.high):.1%} to "
            f"{min(1.0, 1 - support.low):.1%}) never occur in the log",
            support,
            effective,
        )
    if _NORMAL * error > MAX_SUPPORT_ERROR or effective < MIN_EFFECTIVE:
        return refused(
            f"too few lists like the policy's: {num_lists} count as {effective:.0f}, and its support lies between "
            f"{max(0.0, support.low):.0%} and {support.high:.0%}",
            support,
            effective,
        )
    robust = None
    if logged.reward_of_shown is not None and logged.reward_of_policy is not None:
        robust = mean(logged.reward_of_policy + weight * (logged.reward - logged.reward_of_shown))
    return OffPolicy(
        num_lists=num_lists,
        num_users=num_users,
        logged=mean(logged.reward),
        ips=mean(weight * logged.reward),
        snips=mean(weight * logged.reward, weight),
        doubly_robust=robust,
        support=support,
        effective_lists=effective,
    )


def _mean(user: np.ndarray, values: np.ndarray, exposures: np.ndarray, num_users: int) -> Estimate:
    """Return the sum of the values over that of the exposures, with the interval by users."""
    sums = UserSums.of(np.bincount(user, values, num_users), np.bincount(user, exposures, num_users))
    half = _NORMAL * math.sqrt(sums.variance)
    return Estimate(sums.mean, sums.mean - half, sums.mean + half)


def read_logged(table: Path, policy: Path, reward: str = "clicks", surface: str | None = None) -> LoggedLists:
    """Read a joined table and a policy's probabilities.

    Args:
        table: The folder that `join` writes, or one file. The propensity of a list is the product of its items'.
        policy: Parquet: `request_id`, `probability` (that the policy shows this request's list) and, for doubly
            robust estimates, a model's `reward_of_shown` and `reward_of_policy`.
        reward: The column of the table that is summed for each list.
        surface: Only lists of this surface; None: all.

    Raises:
        DataError: A column is missing, a probability is invalid, no list is on the surface, or lists of the table are
            missing from the policy's file.
    """
    propensities = pl.read_parquet(policy)
    for name in ("request_id", "probability"):
        if name not in propensities.columns:
            raise DataError(name, f"{policy} lacks it", "request_id, probability")
    if propensities["request_id"].is_duplicated().any():
        raise DataError("request_id", f"{policy} repeats one", "each request once")
    if not propensities["probability"].is_between(0, 1).all() or propensities["probability"].null_count():
        raise DataError("probability", f"{policy} has a value outside of 0 to 1", "0.25")
    lists = (
        pl.scan_parquet(sorted(table.glob("*.parquet")) if table.is_dir() else table)
        .filter(True if surface is None else pl.col("surface") == surface)
        .group_by(_LIST)
        .agg(
            session=pl.col("session").first(),
            reward=pl.col(reward).sum().cast(pl.Float64),
            propensity=pl.when(pl.col("propensity").null_count() == 0).then(pl.col("propensity").product()),
        )
        .collect(engine="streaming")
    )
    if surface is not None and lists.is_empty():
        raise DataError("surface", f"{table} has no list on {surface}", "home, a surface with impressions")
    lists = lists.sort(_LIST).join(propensities, on="request_id", how="left", maintain_order="left")
    if missing := lists["probability"].null_count():
        raise DataError(
            "request_id", f"{policy} lacks {missing / len(lists):.1%} of the table's requests", "a row for each request"
        )
    user = unit().rank("dense")
    models = {
        name: lists[name].to_numpy().astype(float) if name in lists.columns else None
        for name in ("reward_of_shown", "reward_of_policy")
    }
    return LoggedLists(
        user=lists.select(user).to_series().to_numpy(),
        reward=lists["reward"].to_numpy(),
        propensity=lists["propensity"].cast(pl.Float64).fill_null(math.nan).to_numpy(),
        probability=lists["probability"].to_numpy().astype(float),
        reward_of_shown=models["reward_of_shown"],
        reward_of_policy=models["reward_of_policy"],
    )
