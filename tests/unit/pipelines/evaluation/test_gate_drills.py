"""Simulations of the gate: repeated decisions on drawn gains that resemble measured gains, without training.

A label's rank by a model is e to the power of the sum of the user's and the model's normal variables. Location and
spreads are fitted to the recorded NDCG@10, the hit rate and the paired interval of two models on ml-100k (943 users)
and Beauty (22,363 users); a test checks them against those files.

Shape suffixes: N users, M models.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest

from pipelines.evaluation.gate import MODELS, Compared, GateOptions, find_problems
from pipelines.scoring.metrics import gains
from tests.support.pages import ROOT

ABOVE_FLOOR = {
    name: {"ndcg@10": 1.0 if name in MODELS else 0.0} for name in (*MODELS, "popularity", "bigram", "item_knn")
}
"""Metrics that pass every floor."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Parameters for drawing the ranks of a data set, and the file of its recorded figures."""

    num_users: int
    location: float
    of_users: float
    of_models: float
    filed: str


SHAPES = (Shape(943, 3.95, 2.4, 0.41, "quality.json"), Shape(22_363, 6.72, 3.5, 0.465, "quality-beauty.json"))
FILED = ("leave-one-out", "all")


@cache
def drawn(shape: Shape, num_models: int = 3, shared: float = 0.0) -> np.ndarray:
    """Draw gains (M, N) of equal models for 200,000 users; with `shared`, pairs (2M, N) with that common variance."""
    rng, num_users = np.random.default_rng(0), 200_000
    own = rng.normal(size=(num_models, num_users))
    if shared:
        own = np.concatenate([shared**0.5 * own + (1 - shared) ** 0.5 * rng.normal(size=own.shape) for _ in MODELS])
    users = shape.location + shape.of_users * rng.normal(size=num_users)
    return gains(np.ceil(np.exp(users + shape.of_models * own)), 10)


def row(name: str, version: str, old: np.ndarray, new: np.ndarray) -> dict[str, Any]:
    """Build a `champion.compare` row with a normal interval, close to the bootstrap at a thousandth of its time."""
    difference = new - old
    half = 1.96 * difference.std() / len(new) ** 0.5
    means = {"champion_ndcg": old.mean(), "challenger_ndcg": new.mean()}
    bounds = {"low": difference.mean() - half, "high": difference.mean() + half}
    return {"model": name, "champion": version, "num_users": len(new), **means, **bounds}


def loses_by_the_old_rule(compared: Compared) -> bool:
    """Return the previous rule's decision: refuse only if the whole interval is below -2 % of the live bundle."""
    return any(row["high"] < -0.02 * row["champion_ndcg"] for row in compared.live)


def loses(compared: Compared) -> bool:
    return bool(find_problems(ABOVE_FLOOR, compared, GateOptions()))


@pytest.mark.parametrize("shape", SHAPES, ids=["ml-100k", "beauty"])
def test_drawn_gains_are_as_the_filed_ones(shape: Shape) -> None:
    """NDCG@10, hit rate and paired interval of two models match the recorded results."""
    filed = json.loads((ROOT / "benchmarks/results" / shape.filed).read_text())
    (decoder,) = [row for row in filed["rows"] if (row["model"], row["split"]) == ("decoder", "leave-one-out")]
    taught = [run for run in filed["runs"] if run.get("earned_in_validation", {"uses_targets": True})["uses_targets"]]
    of_all = [gain for run in taught for gain in run["gain"] if (run["split"], gain["slice"]) == FILED]
    widths = [gain["high"] - gain["low"] for gain in of_all]

    first, second, _ = drawn(shape)

    assert first.mean() == pytest.approx(decoder["ndcg10"], rel=0.03)
    assert (first > 0).mean() == pytest.approx(decoder["hr10"], rel=0.03)
    width = 2 * 1.96 * (first - second).std() / shape.num_users**0.5
    assert width == pytest.approx(np.mean(widths), rel=0.05)


@pytest.mark.parametrize(
    ("shape", "num_nights"),
    [(SHAPES[0], 1_000), (SHAPES[1], 200), pytest.param(SHAPES[1], 1_000, marks=pytest.mark.grid)],
    ids=["ml-100k", "beauty", "beauty whole"],
)
def test_equal_models_are_published_nine_nights_of_ten(shape: Shape, num_nights: int) -> None:
    """Three equal trainings, drawn for new users each night, are refused in at most a tenth of the nights."""
    pool, rng = drawn(shape, shared=0.5), np.random.default_rng(1)

    refused = 0
    for _ in range(num_nights):
        users = pool.take(rng.integers(0, pool.shape[1], shape.num_users), axis=1)
        by_model = {"decoder": users[:3], "student": users[3:]}
        against = [
            [row(name, version, rows[old], rows[2]) for name, rows in by_model.items()]
            for old, version in ((1, "live"), (0, "reference"))
        ]
        refused += loses(Compared(live=against[0], reference=against[1]))

    assert refused <= 0.1 * num_nights


def nights_of_loss(shape: Shape, seed: int, refuses: Callable[[Compared], bool], num_nights: int = 20) -> float:
    """Return the final NDCG relative to the reference if each night 3 % of the users lose their hit."""
    rng = np.random.default_rng(seed)
    live = reference = rng.choice(drawn(shape)[0], shape.num_users)
    for _ in range(num_nights):
        new = np.where(rng.random(len(live)) < 0.03, 0.0, live)
        against = [row("decoder", "live", live, new)], [row("decoder", "reference", reference, new)]
        if not refuses(Compared(live=against[0], reference=against[1])):
            live = new
    return float(live.mean() / reference.mean())


@pytest.mark.parametrize(("shape", "num_worlds"), [(SHAPES[0], 100), (SHAPES[1], 10)], ids=["ml-100k", "beauty"])
def test_quality_does_not_drift_below_the_reference(shape: Shape, num_worlds: int) -> None:
    """After twenty nightly losses of 3 %, the gate keeps 95 % of the reference; the previous rule does not."""
    new, old = (
        [nights_of_loss(shape, seed, rule) for seed in range(num_worlds)] for rule in (loses, loses_by_the_old_rule)
    )

    assert min(new) >= 0.95
    assert np.mean(old) < 0.9
    assert shape.num_users > 1_000 or max(old) < 0.75
