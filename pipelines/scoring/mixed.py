"""A model's scores mixed with the sources', for all items, as requests are answered with them.

Shape suffixes: B histories, V items.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from models.catalogue import Catalogue
from models.mixer import MODEL, NUM_NORMALISED, Blend, Mixer, mixer_of, softmax
from models.similar import load_similar
from models.student import MAX_SCORED_WHOLE
from pipelines.scoring.metrics import Scorer

ABOUT = "mixer.json"


def read_about(folder: Path) -> dict[str, Any]:
    """Read {mixer, unlearned, earned, num_cases} of a folder that `pipelines.similarity.sources` wrote."""
    about: dict[str, Any] = json.loads((folder / ABOUT).read_text())
    return about


def read_mixer(folder: Path, catalogue: Catalogue) -> Mixer:
    """Read the mixer and the tables of such a folder."""
    about, num_items = read_about(folder), len(catalogue.item_ids)
    tables = {name: load_similar(folder / name, num_items) for name in about["mixer"]["sources"]}
    mixer = mixer_of(about, tables, catalogue.popularity)
    assert mixer is not None
    return mixer


def describe_sources(about: Mapping[str, Any]) -> str:
    """Return a sentence per model: what each source adds to it on validation, and whether the model adds to them."""
    return "; ".join(_describe_model(model, about["earned"][model]) for model in about["mixer"]["blends"])


def _describe_model(model: str, earned: Sequence[Mapping[str, Any]]) -> str:
    gains = [f"{row['source']} {row['gain']:+.4f}" for row in earned if row["source"] != MODEL]
    if not gains:
        return f"no untrained source is shown to improve the {model}, which serves unmixed"
    own = next(row for row in earned if row["source"] == MODEL)
    if own["low"] <= 0:
        return f"the {model} adds nothing to the untrained sources ({own['gain']:+.4f} NDCG@10), which serve without it"
    return f"the {model} is mixed with untrained sources, NDCG@10 by validation: {', '.join(gains)}"


def probabilities_of(scorer: Scorer, *, are_logs: bool = False) -> Scorer:
    """Return a scorer of the probabilities (B, V) that serving gives to items.

    Args:
        scorer: Scores all items: logits, or log-probabilities.
        are_logs: Whether the scores are log-probabilities. Logits of a large catalogue are normalised over its best
            items.
    """

    def score(histories: Sequence[np.ndarray]) -> np.ndarray:
        scores_BV = scorer(histories)
        if are_logs:
            given_BV: np.ndarray = np.exp(scores_BV)
            return given_BV
        num_items = scores_BV.shape[1]
        if num_items <= MAX_SCORED_WHOLE:
            return softmax(scores_BV)
        best_BN = np.partition(scores_BV, num_items - NUM_NORMALISED, axis=1)[:, -NUM_NORMALISED:]
        probabilities_BV: np.ndarray = np.exp(scores_BV - np.logaddexp.reduce(best_BN, axis=1, keepdims=True))
        return probabilities_BV

    return score


class MixedScorer:
    """Scores histories over the whole catalogue by the mixer's blends of one model."""

    def __init__(self, mixer: Mixer, model: str, probabilities: Scorer) -> None:
        """`probabilities` scores as `probabilities_of` does."""
        self._mixer, self._model, self._probabilities = mixer, model, probabilities

    def __call__(self, histories: Sequence[np.ndarray]) -> np.ndarray:
        """Score histories -> (B, V): probabilities, or the sums of a blend."""
        scores_BV = self._probabilities(histories).astype(np.float64)
        for row, history in enumerate(histories):
            added = self._mixer.added(self._model, history)
            if added is not None:
                scores_BV[row] *= added.model_weight
                if added.new is not None:
                    scores_BV[row, added.new.is_new_V] *= added.new.model
                scores_BV[row] += np.bincount(added.items, added.scores, minlength=scores_BV.shape[1])
        return scores_BV


class SourceScorer:
    """Scores histories by sources only, with the same weights for all histories."""

    def __init__(self, mixer: Mixer, weights: dict[str, float], num_items: int) -> None:
        self._mixer, self._num_items = mixer, num_items
        self._blend = Blend(0, None, {name: weight for name, weight in weights.items() if name != MODEL})

    def __call__(self, histories: Sequence[np.ndarray]) -> np.ndarray:
        """Score histories -> (B, V)."""
        rows = [_sums(self._mixer, self._blend, history, self._num_items) for history in histories]
        return np.stack(rows)


def _sums(mixer: Mixer, blend: Blend, history: np.ndarray, num_items: int) -> np.ndarray:
    added = mixer.read(history, blend)
    return np.bincount(added.items, added.scores, minlength=num_items)
