"""Publication and promotion of variants: the budget, the Pareto front, and the paired interval."""

import numpy as np
import pytest
from scipy import stats

from pipelines.optimize.choice import VariantRow, best, judge, parse_budget, relative_difference
from services.errors import ConfigError

MB = 10**6


def row(
    name: str, ndcg: float = 0.1, low: float = -0.005, ms: float = 1.0, size: float = 100, kind: str | None = "int8"
) -> VariantRow:
    """Build a row whose interval ends at `low`."""
    return VariantRow(
        name=name,
        weight_kind=kind,
        ndcg=ndcg,
        difference=0.0,
        low=low,
        high=0.01,
        request_ms=ms,
        tokens_per_s=1.0,
        weight_bytes=round(size * MB),
    )


PARENT = row("parent", low=0.0)


@pytest.mark.parametrize(("text", "share"), [("ndcg=1%", 0.01), ("ndcg=0.02", 0.02), ("ndcg=0%", 0.0)])
def test_a_budget_is_a_share(text: str, share: float) -> None:
    """A budget is given in percent or as a number."""
    assert parse_budget(text) == share


@pytest.mark.parametrize("text", ["1%", "ndcg", "hr=1%", "ndcg=-1%", "ndcg=100%", "ndcg=nan"])
def test_what_is_no_budget_is_refused(text: str) -> None:
    """The error names the option and an example."""
    with pytest.raises(ConfigError, match=r"--budget: .* give the share of NDCG@10 that may be lost, such as ndcg=1%"):
        parse_budget(text)


def test_the_interval_is_scipy_s_paired_bootstrap() -> None:
    """Interval and mean agree with scipy's paired bootstrap of the ratio of means."""
    rng = np.random.default_rng(3)
    before = rng.random(800) * (rng.random(800) < 0.3)
    after = before * (rng.random(800) < 0.9) + 0.02 * rng.random(800)

    difference, low, high = relative_difference(after, before)

    wanted = stats.bootstrap(
        (after, before),
        lambda a, b, axis: a.mean(axis) / b.mean(axis) - 1,
        paired=True,
        vectorized=True,
        method="percentile",
        rng=4,
    )
    assert difference == pytest.approx(after.mean() / before.mean() - 1)
    assert (low, high) == pytest.approx((wanted.confidence_interval.low, wanted.confidence_interval.high), abs=0.01)


def test_equal_lists_differ_by_nothing() -> None:
    """Variants with equal lists have an interval of zero width."""
    gains = np.random.default_rng(0).random(50)

    assert relative_difference(gains, gains) == (0.0, 0.0, 0.0)
    assert relative_difference(gains, np.zeros(50)) == (0.0, 0.0, 0.0)


def test_what_wins_is_inside_the_budget_worth_it_and_on_the_front() -> None:
    """Each reason for not winning is named."""
    rows = [
        row("small", ms=0.9, size=60),
        row("fast", ms=0.5, size=100),
        row("dominated", ms=0.95, size=70),
        row("lossy", low=-0.02, ms=0.1, size=10),
        row("same", ndcg=0.2, ms=1.0, size=99),
        row("export", ms=0.1, size=50, kind=None),
    ]

    verdicts = judge(PARENT, rows, 0.01)

    assert [name for name, verdict in verdicts.items() if verdict.wins] == ["small", "fast"]
    assert verdicts["dominated"].why == "small is as good in everything"
    assert verdicts["lossy"].why == "may lose 2.0% of NDCG@10, and the budget is 1.0%"
    assert verdicts["same"].why == "neither 5% faster nor 5% and 1 MB smaller than its parent"
    assert verdicts["export"].why == "an export, which the engine does not serve"
    assert best(rows, verdicts) == rows[1]


@pytest.mark.parametrize(
    ("ms", "size", "wins"),
    [
        *((1.18, 99.4, False), (1.18, 50.0, False), (1.0, 99.4, False), (1.0, 94.0, True), (1.04, 60.0, True)),
        *((0.9, 100.0, True), (0.9, 104.0, True), (0.9, 130.0, False), (0.96, 96.0, False), (0.5, 30.0, True)),
    ],
)
def test_a_win_is_worth_something(ms: float, size: float, wins: bool) -> None:
    """A win saves 5 % of time, or 5 % of bytes and 1 MB, and costs at most 5 % in the other measure."""
    child = row("child", ms=ms, size=size)

    assert judge(PARENT, [child], 0.01)["child"].wins is wins


def test_a_small_parent_is_not_worth_a_smaller_child() -> None:
    """Half a megabyte is not worth a variant, even if it is half of the weights."""
    parent, child = row("parent", size=1.2), row("child", size=0.6)

    assert judge(parent, [child], 0.01)["child"].why == "neither 5% faster nor 5% and 1 MB smaller than its parent"


def test_times_nearer_than_a_repetition_are_equal() -> None:
    """Times within the repetition's error count as equal: the better variant wins although it is 3 % slower."""
    rows = [
        row("plain", ms=0.50, size=50),
        row("better", ndcg=0.11, ms=0.515, size=50),
        row("best", ndcg=0.12, ms=0.56, size=50),
    ]

    verdicts = judge(PARENT, rows, 0.01)

    assert [name for name, verdict in verdicts.items() if verdict.wins] == ["better", "best"]


def test_nothing_wins_where_nothing_is_inside() -> None:
    """No variant is published if all variants exceed the budget."""
    rows = [row("a", low=-0.01, ms=0.5), row("b", low=-0.3, ms=0.1)]

    verdicts = judge(PARENT, rows, 0.01)

    assert not any(verdict.wins for verdict in verdicts.values())
    assert best(rows, verdicts) is None
