"""Slices of cases, and the paired gain of one model over another."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ttest_1samp

from pipelines.data.examples import Cases
from pipelines.evaluation.gain import HISTORIES, describe_gain, gain_by_slice, llm_pays, slices_of, weigh, with_cost
from pipelines.scoring.metrics import gains
from tests.support.pages import ROOT

ALL = {"all": np.ones(400, dtype=bool)}


def test_slices_by_history_recency_and_item() -> None:
    """Head, torso, tail and new follow from event counts; an unknown idle time belongs to no slice."""
    lengths, targets = [0, 9, 10, 250, 3], [0, 1, 2, 3, 4]
    histories = tuple(np.zeros(length, dtype=np.int64) for length in lengths)
    idle_s = np.array([np.nan, 3_599.0, 3_600.0, 86_400.0, 1e9])
    cases = Cases(tuple("abcde"), histories, np.array(targets, dtype=np.int64), idle_s)

    slices = slices_of(cases, np.array([50, 40, 9, 1, 0]))

    assert {name: np.flatnonzero(members).tolist() for name, members in slices.items()} == {
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


@given(seed=st.integers(0, 100))
def test_the_interval_is_that_of_resampled_users(seed: int) -> None:
    """The oracle resamples users with both ranks and takes both models' means over the same draw."""
    rng = np.random.default_rng(seed)
    ranks, other = rng.integers(1, 20, (2, 400)).astype(float)
    ours, theirs = (np.where(model_ranks <= 10, 1 / np.log2(1 + model_ranks), 0.0) for model_ranks in (ranks, other))
    draws = [rng.integers(0, 400, 400) for _ in range(300)]
    slow = sorted(ours[draw].mean() - theirs[draw].mean() for draw in draws)

    (row,) = gain_by_slice(ours, theirs, ALL)
    (turned,) = gain_by_slice(theirs, ours, ALL)

    width = slow[292] - slow[7]
    assert row["low"] == pytest.approx(slow[7], abs=0.25 * width)
    assert row["high"] == pytest.approx(slow[292], abs=0.25 * width)
    assert (turned["low"], turned["high"]) == pytest.approx((-row["high"], -row["low"]))


def rows_of(*rows: tuple[str, int, float, float, float | None], decoder_ms: float = 1.0) -> list[dict[str, Any]]:
    """Build rows of (slice, cases, gain, standard error, gain on validation)."""
    names = ("slice", "num_cases", "llm_minus_student", "std_error", "valid_llm_minus_student")
    return [dict(zip(names, row, strict=True)) | {"decoder_ms": decoder_ms} for row in rows]


def test_the_llm_pays_for_histories_that_validation_chose_and_test_shows() -> None:
    """A slice needs enough cases and gains on validation and test; the last history length is open-ended."""
    names = list(HISTORIES)
    rows = rows_of(
        (names[0], 29, 0.1, 0.01, 0.1), (names[1], 40, 0.1, 0.01, -0.1),
        (names[2], 40, 0.1, 0.02, 0.1), (names[3], 40, 0.1, 0.01, 0.1),
    )  # fmt: skip

    assert llm_pays(rows, 0.001) == [(50, 199), (200, None)]
    assert describe_gain(rows, 0.001).endswith(f"for: {names[2]} (+0.0990), {names[3]} (+0.0990)")
    assert llm_pays(rows_of((names[0], 400, 0.1, 0.08, 0.1), (names[1], 400, 0.1, 0.01, None)), 0.001) == []


def test_several_slices_are_judged_by_holms_method() -> None:
    """Holm-adjusted p-values equal SciPy's t-tests adjusted by hand; only slices chosen by validation count."""
    rng = np.random.default_rng(0)
    names, differences = list(HISTORIES), [rng.normal(mean, 0.1, 100) for mean in (0.021, 0.028, 0.035, 0.5)]
    by_hand = [float(ttest_1samp(values - 0.002, 0.0, alternative="greater").pvalue) for values in differences]
    valid = (0.1, 0.1, 0.1, 0.001)
    slices = {name: np.repeat(np.arange(4), 100) == index for index, name in enumerate(names)}
    gained = np.concatenate(differences)
    rows = gain_by_slice(gained, np.zeros(400), slices)
    validated = [row | {"llm_minus_student": valid[index]} for index, row in enumerate(rows)]

    weighed = weigh(with_cost(rows, validated, dict.fromkeys(names, 2.0)), 0.001)

    order = np.argsort(by_hand[:3])
    expected = np.maximum.accumulate([by_hand[index] * (3 - nth) for nth, index in enumerate(order)])
    assert [weighed[index]["p_value"] for index in order] == pytest.approx(expected)
    assert weighed[3]["p_value"] is None
    assert [row["pays"] for row in weighed] == [
        row["p_value"] is not None and row["p_value"] <= 0.025 for row in weighed
    ]


def test_equal_models_pay_in_at_most_one_of_forty_runs() -> None:
    """With three slices of ml-100k's sizes and gains by chance, at most 2.5 % of the runs pay at zero price."""
    rng, num_runs, sizes = np.random.default_rng(0), 8_000, (380, 415, 148)
    names, values, shares = list(HISTORIES)[1:], [-0.63, -0.2, 0.0, 0.2, 0.63], [0.03, 0.1, 0.74, 0.1, 0.03]
    drawn = [rng.choice(values, (2, num_runs, size), p=shares) for size in sizes]
    means = np.array([sample[0].mean(axis=1) for sample in drawn]).T
    errors = np.array([sample[0].std(axis=1, ddof=1) / sample.shape[2] ** 0.5 for sample in drawn]).T
    valid = np.array([sample[1].mean(axis=1) for sample in drawn]).T

    fooled = sum(
        bool(llm_pays(rows_of(*zip(names, sizes, *of_run, strict=True)), 0.0))
        for of_run in zip(means, errors, valid, strict=True)
    )

    assert fooled <= 0.025 * num_runs


@pytest.mark.parametrize(
    ("file", "price", "pays"),
    [
        ("quality-beauty-lean-student.json", 0.001, True),
        ("quality-beauty-lean-student.json", 0.01, False),
        ("quality-beauty-codes.json", 0.0, False),
    ],
)
def test_the_price_decides_about_measured_models(file: str, price: float, pays: bool) -> None:
    """On recorded results, the lean student makes the decoder worth the default price but not ten times the price."""
    for run in json.loads((ROOT / "benchmarks/results" / file).read_text())["runs"]:
        rows = [row | {"std_error": (row["high"] - row["low"]) / 3.92} for row in run["gain"]]

        paying = llm_pays(with_cost(rows, rows, run["decoder_ms"]), price)

        assert bool(paying) is pays


def test_equal_models_and_few_cases_show_no_gain() -> None:
    """A model compared with itself gains 0; a single case has an interval without width and is not significant."""
    ranks = np.arange(1.0, 401.0)

    rows = gain_by_slice(gains(ranks, 10), gains(ranks, 10), ALL)
    (row,) = gain_by_slice(np.array([0.5]), np.array([0.4]), {"item new": np.array([True])})

    ndcg = float(np.mean([1 / np.log2(1 + rank) if rank <= 10 else 0 for rank in ranks]))
    means = {"llm_ndcg": pytest.approx(ndcg), "student_ndcg": pytest.approx(ndcg)}
    about = {"slice": "all", "history": None, "num_cases": 400}
    assert rows == [{**about, **means, "llm_minus_student": 0.0, "low": 0.0, "high": 0.0, "std_error": 0.0}]
    assert row["low"] > 0
    costly = with_cost([row | {"slice": "history 0-9"}], [row], {"history 0-9": 0.0})
    assert describe_gain(costly, 0.0).endswith("for: none")
