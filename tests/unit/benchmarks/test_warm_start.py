"""The warm-start benchmark: training data of its live models, and pooling of its runs."""

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from benchmarks.quality.warm_start import Trained, WarmStartRun, summarise, without_newest
from models.catalogue import load_catalogue
from pipelines.data.examples import Split, read_cases
from tests.support.training.synthetic import tokenized, write_ingested


def test_the_live_models_know_nothing_of_the_newest_events(tmp_path: Path) -> None:
    """Each history loses only its newest events, the next event validates, and popularity counts the rest."""
    tokens, out = tokenized(write_ingested(tmp_path / "ingest"), tmp_path / "tokens"), tmp_path / "before"
    whole = pl.read_parquet(tokens / "examples.parquet")

    without_newest(tokens, 0.3, out)

    rows = pl.read_parquet(out / "examples.parquet")
    was = {row["user_id"]: row["history"] for row in whole.filter(pl.col("split") == "train").iter_rows(named=True)}
    now = {row["user_id"]: row["history"] for row in rows.filter(pl.col("split") == "train").iter_rows(named=True)}
    assert all(was[user][: len(history)] == history for user, history in now.items())
    assert sum(map(len, now.values())) == pytest.approx(0.7 * sum(map(len, was.values())), rel=0.1)
    cases = read_cases(out, Split.VALID)
    for user, history, target in zip(cases.user_ids, cases.histories, cases.targets, strict=True):
        assert was[user][: len(history) + 1] == [*history.tolist(), target]
    assert len(cases) > 0
    assert len(read_cases(out, Split.TEST)) == 0
    learned = np.concatenate([*now.values()])
    popularity = load_catalogue(out / "catalogue.parquet").popularity
    assert popularity.tolist() == np.bincount(learned, minlength=len(popularity)).tolist()


def trained(decoder: list[float], student: list[float], cpu_s: float) -> Trained:
    """Build two models with these users' NDCG@10."""
    ndcg = {("decoder", "test"): np.array(decoder), ("student", "test"): np.array(student)}
    return Trained(ndcg=ndcg, cpu_s={"decoder": cpu_s, "student": cpu_s / 2})


def test_what_is_kept_is_pooled_over_seeds_and_paired_by_user() -> None:
    """Users are averaged over seeds first; if warm equals whole for every user the interval has zero width."""
    whole, half = trained([1.0, 0.5], [1.0, 0.5], 100.0), trained([0.5, 0.5], [1.0, 0.5], 25.0)
    runs = [
        WarmStartRun(new_share=0.1, seed=seed, live=half, whole=whole, warm=warm)
        for seed, warm in enumerate((half, whole))
    ]

    found = summarise(runs)

    by_model = {row["model"]: row for row in found["rows"]}
    decoder = by_model["decoder"]
    assert (decoder["whole"], decoder["warm"]) == (0.75, 0.625)
    assert decoder["kept"] == pytest.approx(0.625 / 0.75)
    assert decoder["kept_by_seed"] == pytest.approx([0.5 / 0.75, 1.0])
    assert decoder["ci95"][0] < decoder["kept"] < decoder["ci95"][1]
    assert (by_model["student"]["kept"], by_model["student"]["ci95"]) == (1.0, [1.0, 1.0])
    assert found["num_seeds"] == 2
    assert found["times"][0]["share_of_time"] == pytest.approx(62.5 / 100)
    json.dumps(found)
