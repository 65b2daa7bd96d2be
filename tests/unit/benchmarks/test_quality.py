"""Pooling of runs with several seeds, and the store of a run."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.quality.options import with_own_store
from benchmarks.quality.summary import QualityRun, summarise
from pipelines.evaluation.gain import gain_by_slice, with_cost
from pipelines.scoring.metrics import Ranks
from services.settings.settings import Settings

SHORT, LONG = "history 0-9", "history 10-49"
SLICES = {"all": np.ones(80, dtype=bool), SHORT: np.arange(80) < 40, LONG: np.arange(80) >= 40}
BY_NDCG = {1.0: 1.0, 0.5: 3.0, 0.0: 11.0}
"""Rank of the label by its NDCG@10."""


def run(seed: int, llm: np.ndarray, student: np.ndarray, split: str = "leave-one-out") -> QualityRun:
    """Build a run of a seed with these users' NDCG@10; the decoder takes 2 ms per request, 6 ms for long histories."""
    ndcg, gain = {"decoder": llm, "student": student}, gain_by_slice(llm, student, SLICES)
    metrics = {}
    for model, values in ndcg.items():
        unmasked = {"hr@10_unmasked": 0.1, "ndcg@10_unmasked": 0.05}
        metrics[model] = {"hr@10": 0.2 + seed / 10, "ndcg@10": float(values.mean()), **unmasked}
    evaluation: dict[str, Any] = {
        "dataset": "shop",
        "repeats": False,
        "protocol": "all items ranked",
        "num_test_users": 80,
        "num_items": 9,
        "metrics": metrics,
        "gain": with_cost(gain, gain, {SHORT: 2.0, LONG: 6.0}),
        "multiply_adds": {},
    }
    ranks = {model: np.array([BY_NDCG[value] for value in values]) for model, values in ndcg.items()}
    ranks["twin"] = np.full(80, 11.0)
    variants = dict.fromkeys(("graph", "student_alone"), ranks["twin"])
    variants |= dict.fromkeys(("distilled", "student", "fresh_student", "unraised"), ranks["student"])
    about = {
        "evaluation": evaluation,
        "ranks": ranks,
        "variants": {name: Ranks(of_name, np.ones(80)) for name, of_name in variants.items()},
        "earned": {"uses_targets": True},
        "slices": SLICES,
        "level_sizes": (9,),
        "num_parameters": {"decoder": {"all": 9}, "student": {"all": 2}},
        "llm_price_ndcg_per_ms": 0.001,
    }
    return QualityRun(seed=seed, split=split, **about)


def test_rows_are_means_over_seeds_with_an_interval_over_users() -> None:
    """Intervals are over users' means across seeds; the standard deviation is over seeds."""
    ones, zeros = np.ones(80), np.zeros(80)
    runs = [run(0, ones, zeros), run(1, zeros, zeros), run(0, ones, ones, split="global-time")]

    rows = summarise(runs)["rows"]

    shown = {(row["split"], row["model"]): row for row in rows}
    decoder = shown["leave-one-out", "decoder"]
    assert (decoder["ndcg10"], decoder["ci95"], decoder["num_seeds"], decoder["num_users"]) == (0.5, [0.5, 0.5], 2, 80)
    others = ("hr10", "hr10_unmasked", "ndcg10_unmasked", "hr10_std", "ndcg10_std")
    assert [decoder[name] for name in others] == pytest.approx([0.25, 0.1, 0.05, 0.1 / np.sqrt(2), 1 / np.sqrt(2)])
    assert shown["global-time", "student"]["ndcg10"] == 1.0
    assert shown["global-time", "student"]["ndcg10_std"] is None
    assert len(rows) == 2 * len(
        {"decoder", "student", "graph", "student_alone", "distilled", "fresh_student", "unraised"}
    )


def test_what_distillation_earned_is_paired_by_user_and_pooled_over_the_seeds() -> None:
    """A gain over the twin is paired by user and pooled over seeds, with the same interval as the gain by slice."""
    draw = np.random.default_rng(0)
    students = [draw.choice([0.0, 1.0], 80) for _ in range(2)]

    summary = summarise([run(seed, np.ones(80), student) for seed, student in enumerate(students)])

    earned = {(row["model"], row["over"]): row for row in summary["distillation"]}
    assert list(earned) == [
        ("distilled", "twin"), ("distilled", "student_alone"), ("student", "student_alone"), ("student", "graph")
    ]  # fmt: skip
    pooled, row = np.mean(students, axis=0), earned["distilled", "twin"]
    (expected,) = gain_by_slice(pooled, np.zeros(80), {"all": SLICES["all"]})
    assert (row["difference"], row["low"], row["high"]) == (
        expected["llm_minus_student"], expected["low"], expected["high"]
    )  # fmt: skip
    assert row["difference_std"] == pytest.approx(abs(students[0].mean() - students[1].mean()) / np.sqrt(2))
    assert row["ratio"] is None
    assert summary["runs"][0]["earned_in_validation"] == {"uses_targets": True}


def test_a_run_keeps_off_the_store_of_a_stack(tmp_path: Path) -> None:
    """A run uses its own folder and store, never the configured ones."""
    settings = Settings(state_dir=tmp_path, redis_host="redis.example", redis_port=6390)

    own = with_own_store(settings, None)

    assert own.state_dir == tmp_path / "quality"
    assert (own.redis_host, own.redis_tls_ca_file) == ("127.0.0.1", None)
    assert own.redis_port != settings.redis_port
