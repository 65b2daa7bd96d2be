"""Sources against a slow loop, and the mix against dense addition."""

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.mixer import MODEL, STUDENT, Blend, Mixer, Source, softmax
from models.similar import NONE, SimilarTable

NUM_ITEMS = 12
HISTORIES = st.lists(st.integers(0, NUM_ITEMS - 1), max_size=9)


def mixer_of(seed: int) -> Mixer:
    """Return two sources of random tables, with padding, and one blend for short histories."""
    rng = np.random.default_rng(seed)

    def source(newest: int, decay: float) -> Source:
        neighbours_VN = np.array([rng.permutation(NUM_ITEMS)[:4] for _ in range(NUM_ITEMS)], dtype=np.int32)
        neighbours_VN[rng.random(neighbours_VN.shape) < 0.3] = NONE
        scores_VN = rng.random(neighbours_VN.shape).astype(np.float16)
        return Source(SimilarTable(neighbours_VN, scores_VN), newest, decay)

    weights = {MODEL: 1.0, "near": 0.5, "far": 2.0}
    return Mixer({"near": source(2, 0.5), "far": source(5, 0.8)}, {STUDENT: (Blend(0, 5, weights),)})


def slow_sums(mixer: Mixer, history: list[int], weights: dict[str, float]) -> dict[int, dict[str, float]]:
    """Return each item's contributions by source, one neighbour at a time."""
    sums: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for name, weight in weights.items():
        if name == MODEL:
            continue
        source = mixer.sources[name]
        for steps_back, item in enumerate(reversed(history[-source.newest :])):
            row = zip(source.table.neighbours_VN[item].tolist(), source.table.scores_VN[item].tolist(), strict=True)
            for other, score in row:
                if other != NONE:
                    sums[other][name] += weight * source.decay**steps_back * score
    return sums


@given(HISTORIES, st.integers(0, 5), st.sampled_from([0.0, 0.01, 1.0, 3.0]))
@settings(max_examples=60)
def test_the_mix_equals_dense_addition(history: list[int], seed: int, model_weight: float) -> None:
    """Over all items and over ranked items, the mix has the scores and the order of a slow addition."""
    mixer, rng = mixer_of(seed), np.random.default_rng(seed)
    weights = {**mixer.blends[STUDENT][0].weights, MODEL: model_weight}
    logits, allowed = rng.normal(size=NUM_ITEMS), rng.random(NUM_ITEMS) < 0.8
    slow = slow_sums(mixer, history, weights)
    dense = model_weight * softmax(logits) + [sum(slow[item].values()) for item in range(NUM_ITEMS)]
    wanted = [item for item in np.lexsort((np.arange(NUM_ITEMS), -dense)) if allowed[item] and dense[item] > 0][:6]
    added = mixer.read(history, Blend(0, None, weights))

    for items, scores in (
        added.best(logits, allowed, 6),
        added.best_ranked(np.arange(NUM_ITEMS), np.log(softmax(logits)), allowed, 6),
    ):
        assert items.tolist() == wanted
        assert scores == pytest.approx(np.log(dense[wanted]), abs=1e-5)


@given(HISTORIES, st.integers(0, 5))
@settings(max_examples=40)
def test_contributions_sum_to_the_score(history: list[int], seed: int) -> None:
    """Each source's contribution to an item equals the slow loop's, and together they are the sources' sum."""
    mixer = mixer_of(seed)
    blend = mixer.blends[STUDENT][0]
    items = list(range(NUM_ITEMS))

    contributions = mixer.contributions(STUDENT, history, blend, items)

    slow, added = slow_sums(mixer, history, dict(blend.weights)), mixer.read(history, blend)
    sums = np.bincount(added.items, added.scores, minlength=NUM_ITEMS)
    for item, own in zip(items, contributions, strict=True):
        assert {name: score for name, score in own.items() if score} == pytest.approx(
            {name: score for name, score in slow[item].items() if score}
        )
        assert sum(own.values()) == pytest.approx(sums[item])


@pytest.mark.parametrize(
    ("model", "length", "is_mixed"),
    [(STUDENT, 0, True), (STUDENT, 5, True), (STUDENT, 6, False), ("decoder", 0, False)],
)
def test_a_blend_applies_to_its_model_and_lengths(model: str, length: int, is_mixed: bool) -> None:
    """Without a blend for this model and history length, the model serves its own scores."""
    assert (mixer_of(0).added(model, [1] * length) is not None) == is_mixed
