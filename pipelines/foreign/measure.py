"""Measures an imported decoder on labelled histories: both kinds of scores, and strides of the history.

HR and NDCG follow the public frameworks: a hit is a list entry with the label's code, items of one code count once, and
seen items are not masked.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np

from models.catalogue import Catalogue
from models.decoder.decoder import Decoder
from models.prompt import Prompt
from models.search import Scores, Search
from pipelines.scoring.beams import BeamScorer

STRIDES = (1, 2, 5, 10)
CUTOFFS = (1, 3, 5, 10, 20, 50)
_MAX_LOSS = 0.01
_DEFAULT_WIDTH = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Labelled:
    """Histories of item indices, oldest first, and the index of the item that followed."""

    histories: Sequence[np.ndarray]
    labels: np.ndarray

    def sample(self, most: int) -> "Labelled":
        """Return at most this many cases, evenly spaced."""
        step = max(1, -(-len(self.labels) // most))
        return Labelled(histories=self.histories[::step], labels=self.labels[::step])


def code_lists(
    decoder: Decoder, catalogue: Catalogue, prompt: Prompt, search: Search, histories: Sequence[np.ndarray]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return, for each history, the first item of each code, best first, and its score."""
    width = search.beam_width or _DEFAULT_WIDTH
    _, shared = np.unique(catalogue.codes, axis=0, return_counts=True)
    num_items = width * int(shared.max())
    scorer = BeamScorer(decoder, catalogue, prompt, width, search)
    lists: list[tuple[np.ndarray, np.ndarray]] = [(np.zeros(0, np.int64), np.zeros(0))] * len(histories)
    for row, items, scores in scorer.lists(histories, [()] * len(histories), [width] * len(histories), num_items):
        _, first = np.unique(catalogue.codes[items], axis=0, return_index=True)
        kept = np.sort(first)[:width]
        lists[row] = items[kept], scores[kept]
    return lists


def metrics_of(lists: Sequence[np.ndarray], labels: np.ndarray, codes: np.ndarray) -> dict[str, float]:
    """Return HR and NDCG by the frameworks' formula."""
    metrics = {}
    positions = [
        next((position for position, item in enumerate(items) if (codes[item] == codes[label]).all()), None)
        for items, label in zip(lists, labels.tolist(), strict=True)
    ]
    for cutoff in CUTOFFS:
        hits = [position for position in positions if position is not None and position < cutoff]
        metrics[f"hr@{cutoff}"] = len(hits) / max(1, len(labels))
        metrics[f"ndcg@{cutoff}"] = sum(math.log(2) / math.log(position + 2) for position in hits) / max(1, len(labels))
    return metrics


def compare(decoder: Decoder, catalogue: Catalogue, prompt: Prompt, search: Search, cases: Labelled) -> dict[str, Any]:
    """Return {num_cases, scores: metrics by kind of scores, better, strides: NDCG@10 by stride, stride}."""

    def measured(variant: Prompt, by: Search, histories: Sequence[np.ndarray]) -> dict[str, float]:
        lists = [items for items, _ in code_lists(decoder, catalogue, variant, by, histories)]
        return metrics_of(lists, cases.labels, catalogue.codes)

    exact = replace(prompt, stride=1)
    by_scores = {
        scores: measured(exact, replace(search, scores=scores), cases.histories) for scores in get_args(Scores)
    }
    strides = {1: by_scores[search.scores]["ndcg@10"]}
    for stride in (stride for stride in STRIDES[1:] if stride <= prompt.max_items):
        cut = _cut(cases.histories, prompt.max_items, stride)
        strides[stride] = measured(exact, search, cut)["ndcg@10"]
    return {
        "num_cases": len(cases.labels),
        "scores": by_scores,
        "better": _better(by_scores),
        "strides": strides,
        "stride": choose_stride(strides),
    }


def choose_stride(ndcg_by_stride: Mapping[int, float]) -> int:
    """Return the largest stride that loses under 1 % of the NDCG of stride 1."""
    least = (1 - _MAX_LOSS) * ndcg_by_stride[1]
    return max(stride for stride, ndcg in ndcg_by_stride.items() if ndcg >= least and (ndcg > least or stride == 1))


def describe(measured: Mapping[str, Any]) -> list[str]:
    """Return sentences on scores and stride."""
    by_scores = ", ".join(f"{name} {values['ndcg@10']:.4f}" for name, values in measured["scores"].items())
    strides = ", ".join(f"{stride}: {ndcg:.4f}" for stride, ndcg in measured["strides"].items())
    return [
        f"NDCG@10 on {measured['num_cases']} labels by scores: {by_scores}; {measured['better']} ranks better",
        f"NDCG@10 by stride of the history: {strides}; stride {measured['stride']} is used",
    ]


def _better(by_scores: Mapping[str, Mapping[str, float]]) -> str:
    return max(by_scores, key=lambda name: (by_scores[name]["ndcg@10"], name))


def _cut(histories: Sequence[np.ndarray], max_items: int, stride: int) -> list[np.ndarray]:
    """Return what a window of whole strides keeps of histories that may have been cut to `max_items` already.

    Such a history is the end of a longer one, whose phase within the stride is unknown; phases take turns.
    """
    cut = []
    for number, history in enumerate(histories):
        phase = number % stride if len(history) >= max_items else 0
        cut.append(history[max(0, len(history) - max_items + phase) if phase else max(0, len(history) - max_items) :])
    return cut
