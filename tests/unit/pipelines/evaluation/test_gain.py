"""Slices of cases, and the paired gain of one model over another."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.data.examples import Cases
from pipelines.evaluation.gain import describe_gain, gain_by_slice, llm_pays, slices_of
from pipelines.evaluation.metrics import gains

ALL = {"all": np.ones(400, dtype=bool)}


def test_slices_by_history_recency_and_item() -> None:
    """Of items with 50, 40, 9, 1 and 0 events the first is the head, the next the torso, two the tail, and one is new; an unknown time is in no slice."""
    lengths, targets = [0, 9, 10, 250, 3], [0, 1, 2, 3, 4]
    histories = tuple(np.zeros(length, dtype=np.int64) for length in lengths)
    idle_s = np.array([np.nan, 3_599.0, 3_600.0, 86_400.0, 1e9])
    cases = Cases(tuple("abcde"), histories, np.array(targets, dtype=np.int64), idle_s)

    found = {
        name: np.flatnonzero(members).tolist()
        for name, members in slices_of(cases, np.array([50, 40, 9, 1, 0])).items()
    }

    assert found == {
        "all": [0, 1, 2, 3, 4],
        "history 0-9": [0, 1, 4],
        "history 10-49": [2],
        "history 200 and longer": [3],
        "idle under 1 hour": [1],
        "idle 1-24 hours": [2],
        "idle 1-7 days": [3],
        "idle 7 days and longer": [4],
        "item head": [0],
        "item torso": [1],
        "item tail": [2, 3],
        "item new": [4],
    }


def test_a_small_gain_on_the_same_users_shows() -> None:
    """A model that ranks each label one place higher is better beyond the interval, though users differ far more than the models."""
    student = np.random.default_rng(1).integers(2, 12, 400).astype(float)

    (row,) = gain_by_slice(gains(student - 1, 10), gains(student, 10), ALL)

    assert 0 < row["low"] < row["llm_minus_student"] < row["high"]
    assert describe_gain([row]).endswith(f"in: all (+{row['llm_minus_student']:.4f})")


@given(seed=st.integers(0, 100))
def test_the_interval_is_that_of_resampled_users(seed: int) -> None:
    """Against a slow one: users are drawn with both their ranks, and each model's mean is taken of the same draw."""
    rng = np.random.default_rng(seed)
    ranks, other = rng.integers(1, 20, (2, 400)).astype(float)
    ours, theirs = (np.where(found <= 10, 1 / np.log2(1 + found), 0.0) for found in (ranks, other))
    draws = [rng.integers(0, 400, 400) for _ in range(300)]
    slow = sorted(ours[draw].mean() - theirs[draw].mean() for draw in draws)

    (row,) = gain_by_slice(ours, theirs, ALL)
    (turned,) = gain_by_slice(theirs, ours, ALL)

    width = slow[292] - slow[7]
    assert row["low"] == pytest.approx(slow[7], abs=0.25 * width)
    assert row["high"] == pytest.approx(slow[292], abs=0.25 * width)
    assert (turned["low"], turned["high"]) == pytest.approx((-row["high"], -row["low"]))


def test_the_llm_pays_for_histories_whose_gain_is_shown() -> None:
    """Of five slices one is of items, one has too few cases, one an interval with 0 in it: two lengths are left, the last one open."""
    slices = ("item head", "history 0-9", "history 10-49", "history 50-199", "history 200 and longer")
    rows = [{"slice": name, "num_cases": 40, "llm_minus_student": 0.1, "low": 0.05, "high": 0.15} for name in slices]
    rows[1]["num_cases"], rows[2]["low"] = 29, 0.0

    assert llm_pays(rows) == [(50, 199), (200, None)]


def test_equal_models_and_few_cases_show_no_gain() -> None:
    """The difference of a model to itself is 0; one user whom the decoder serves better has an interval without width, and shows nothing."""
    ranks = np.arange(1.0, 401.0)

    rows = gain_by_slice(gains(ranks, 10), gains(ranks, 10), ALL)
    (one,) = gain_by_slice(np.array([0.5]), np.array([0.4]), {"item new": np.array([True])})

    ndcg = float(np.mean([1 / np.log2(1 + rank) if rank <= 10 else 0 for rank in ranks]))
    means = {"llm_ndcg": pytest.approx(ndcg), "student_ndcg": pytest.approx(ndcg)}
    about = {"slice": "all", "history": None, "num_cases": 400}
    assert rows == [{**about, **means, "llm_minus_student": 0.0, "low": 0.0, "high": 0.0}]
    assert one["low"] > 0
    assert all(describe_gain(found).endswith("none of 1 slices") for found in (rows, [one]))
