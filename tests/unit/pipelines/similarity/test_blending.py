"""Weights chosen on simulated cases whose truth is known."""

from collections.abc import Sequence

import numpy as np
import pytest

from models.mixer import MODEL, Mixer, Source
from models.similar import SimilarTable
from pipelines.data.examples import Cases
from pipelines.scoring.metrics import gains, rank_labels
from pipelines.scoring.mixed import SourceScorer, probabilities_of
from pipelines.similarity.blending import Candidates, candidates_of, choose, choose_in_slice

NUM_CASES, NUM_CANDIDATES = 600, 40


def simulated(strengths: list[float], lengths: np.ndarray | None = None, seed: int = 0) -> Candidates:
    """Return cases whose label gets `strength` above noise from each source; 0 is a source of noise only."""
    rng = np.random.default_rng(seed)
    scores_NCS = rng.random((NUM_CASES, NUM_CANDIDATES, len(strengths)))
    scores_NCS[:, 0] += strengths
    return Candidates(
        scores_NCS.reshape(-1, len(strengths)),
        np.repeat(np.arange(NUM_CASES), NUM_CANDIDATES),
        np.arange(NUM_CASES) * NUM_CANDIDATES,
        np.full(NUM_CASES, 3) if lengths is None else lengths,
    )


@pytest.mark.parametrize(
    ("strengths", "expected"),
    [
        ([0.5, 0.0, 0.0], {MODEL}),
        ([0.5, 0.5, 0.0], {MODEL, "near"}),
        ([0.5, 0.5, 0.5], {MODEL, "near", "far"}),
        ([0.0, 0.0, 0.8], {"far"}),
    ],
)
def test_a_source_of_noise_gets_no_weight(strengths: list[float], expected: set[str]) -> None:
    """Sources and models with signal get a weight; sources and models of noise get none."""
    chosen = choose(simulated(strengths), ("near", "far"), has_model=True)

    assert set(chosen.weights) == expected
    joined = [row for row in chosen.earned if row["source"] in expected - {MODEL}]
    assert all(0 < row["low"] < row["gain"] < row["high"] for row in joined)


def test_without_a_model_the_best_source_comes_first() -> None:
    """The other source joins only if it adds something."""
    assert set(choose(simulated([0.0, 0.3, 0.8]), ("near", "far"), has_model=False).weights) == {"near", "far"}
    assert set(choose(simulated([0.0, 0.0, 0.8]), ("near", "far"), has_model=False).weights) == {"far"}


def test_a_slice_gets_own_weights_only_if_they_gain() -> None:
    """Weights that fit a slice stay; weights far from its best are tuned; a small slice is not tuned."""
    candidates = simulated([0.5, 0.5])

    assert choose_in_slice(candidates, ("near",), {MODEL: 1.0, "near": 0.01})["near"] > 0.1
    assert choose_in_slice(candidates, ("near",), {MODEL: 1.0, "near": 1.0}) == {MODEL: 1.0, "near": 1.0}
    few = candidates.of(np.arange(NUM_CASES) < 20)
    assert choose_in_slice(few, ("near",), {MODEL: 1.0, "near": 0.01}) == {MODEL: 1.0, "near": 0.01}


@pytest.mark.parametrize("repeats", [False, True])
def test_candidates_rank_labels_like_all_items(repeats: bool) -> None:
    """The NDCG of the candidates equals that of a ranking of the whole catalogue."""
    rng, num_items = np.random.default_rng(1), 30
    neighbours_VN = np.array([rng.permutation(num_items)[:6] for _ in range(num_items)], dtype=np.int32)
    source = Source(SimilarTable(neighbours_VN, rng.random((num_items, 6)).astype(np.float16)))
    histories = tuple(rng.integers(0, num_items, rng.integers(1, 8)) for _ in range(50))
    targets = rng.integers(0, num_items, 50)
    cases = Cases(tuple(map(str, range(50))), histories, targets, np.full(50, np.nan))
    logits_VV = rng.normal(size=(num_items, num_items))
    model = probabilities_of(lambda histories: np.stack([logits_VV[history[-1]] for history in histories]))

    label_gains = candidates_of(cases, model, {"near": source}, repeats=repeats).gains(np.array([1.0, 0.3]))

    of_source = SourceScorer(Mixer({"near": source}, {}), {"near": 0.3}, num_items)

    def mixed(histories: Sequence[np.ndarray]) -> np.ndarray:
        return model(histories) + of_source(histories)

    np.testing.assert_allclose(label_gains, gains(rank_labels(mixed, cases).as_served(repeats=repeats), 10))
