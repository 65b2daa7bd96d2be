"""Decides from measurements which variants are published, and which one is promoted. Pure.

A variant is within the budget if the 95 % interval of its NDCG@10, as a paired relative difference from its parent's on
the same users, lies above the allowed loss. It wins if it is within the budget, its gain is worth a bundle (`Worth`),
and no other variant within the budget is at least as good in NDCG, time and bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from services.errors import ConfigError

_RESAMPLES = 2_000
_DRAWN_AT_ONCE = 1 << 22
_EQUAL = 0.95
"""Times within this ratio count as equal."""
DEFAULT_BUDGET = "ndcg=1%"


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantRow:
    """One variant of the table.

    `loss_low` to `loss_high` is the interval of its relative NDCG@10 difference from the parent.

    `weight_kind` is None for an export, which the engine does not serve.
    """

    name: str
    weight_kind: str | None
    ndcg: float
    difference: float
    low: float
    high: float
    request_ms: float
    tokens_per_s: float
    weight_bytes: int
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worth:
    """Requirements of a win: a noticeable gain in time or bytes, without a noticeable loss in the other.

    Args:
        gain: Minimum saved fraction of the parent's time or bytes.
        loss: Maximum increase of the other quantity, as a fraction.
        saved_bytes: Minimum gain in bytes: less memory cannot hold another replica, model or cache block.
    """

    gain: float = 0.05
    loss: float = 0.05
    saved_bytes: int = 1_000_000

    def why_not(self, parent: VariantRow, row: VariantRow) -> str:
        """Return why a variant is not worth publishing; empty if it is."""
        time, size = row.request_ms / parent.request_ms - 1, row.weight_bytes / parent.weight_bytes - 1
        is_smaller = size <= -self.gain and parent.weight_bytes - row.weight_bytes >= self.saved_bytes
        if time > self.loss:
            return f"{time:.0%} slower than its parent"
        if size > self.loss:
            return f"{size:.0%} larger than its parent"
        if time > -self.gain and not is_smaller:
            saved = f"{self.gain:.0%} and {self.saved_bytes / 1e6:g} MB"
            return f"neither {self.gain:.0%} faster nor {saved} smaller than its parent"
        return ""


WORTH = Worth()


@dataclass(frozen=True, slots=True)
class VariantDecision:
    """Decision on a row: whether it is within the budget, on the Pareto front, and published, or why not.

    The front is that of rows within the budget.
    """

    is_inside: bool
    is_on_front: bool
    wins: bool
    why: str


def parse_budget(text: str) -> float:
    """Return the fraction of NDCG@10 that may be lost, from `ndcg=1%`. Raises ConfigError."""
    name, _, amount = text.partition("=")
    try:
        share = float(amount.removesuffix("%")) / (100 if amount.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if name != "ndcg" or not 0 <= share < 1:
        raise ConfigError(
            f"--budget: {text!r} is not a budget; give the share of NDCG@10 that may be lost, such as {DEFAULT_BUDGET}"
        )
    return share


def relative_difference(child: np.ndarray, parent: np.ndarray) -> tuple[float, float, float]:
    """Return the relative difference of two means over the same users, and its 95 % interval.

    Paired bootstrap over users. 0 if the parent's mean is 0.
    """
    if not parent.any():
        return 0.0, 0.0, 0.0
    rng, num = np.random.default_rng(0), len(parent)
    size = max(1, _DRAWN_AT_ONCE // num)
    shares = []
    for done in range(0, _RESAMPLES, size):
        drawn = rng.integers(0, num, (min(size, _RESAMPLES - done), num))
        before = parent[drawn].mean(axis=1)
        shares.append((child[drawn].mean(axis=1) - before) / np.where(before > 0, before, np.inf))
    low, high = np.percentile(np.concatenate(shares), (2.5, 97.5))
    return float((child.mean() - parent.mean()) / parent.mean()), float(low), float(high)


def judge(
    parent: VariantRow, rows: Sequence[VariantRow], budget: float, worth: Worth = WORTH
) -> dict[str, VariantDecision]:
    """Return the decision on each row by its name."""
    inside = [row for row in rows if row.low > -budget]
    served = [row for row in inside if row.weight_kind is not None and not worth.why_not(parent, row)]
    verdicts = {}
    for row in rows:
        is_inside = row in inside
        better = next((other.name for other in served if other is not row and _dominates(other, row)), None)
        if row.weight_kind is None:
            why = row.note or "an export, which the engine does not serve"
        elif not is_inside:
            why = f"may lose {-row.low:.1%} of NDCG@10, and the budget is {budget:.1%}"
        elif not (why := worth.why_not(parent, row)):
            why = "" if better is None else f"{better} is as good in everything"
        verdicts[row.name] = VariantDecision(is_inside, is_inside and better is None, not why, why)
    return verdicts


def best(rows: Sequence[VariantRow], verdicts: Mapping[str, VariantDecision]) -> VariantRow | None:
    """Return the winner with the lowest time times bytes; None if no row wins."""
    winners = [row for row in rows if verdicts[row.name].wins]
    return min(winners, key=lambda row: row.request_ms * row.weight_bytes, default=None)


def _dominates(variant: VariantRow, other: VariantRow) -> bool:
    """Whether a row is at least as good in NDCG, bytes and (within noise) time, and better in one of them."""
    is_as_good = variant.ndcg >= other.ndcg and variant.weight_bytes <= other.weight_bytes
    is_as_fast, is_faster = (
        variant.request_ms * _EQUAL <= other.request_ms,
        variant.request_ms <= _EQUAL * other.request_ms,
    )
    is_better = variant.ndcg > other.ndcg or variant.weight_bytes < other.weight_bytes
    return is_as_good and is_as_fast and (is_better or is_faster)
