"""Mixes co-visits and vectors with weights chosen on held-out next items, and writes the table of the mix.

A neighbour's score is `share * vector + (1 - share) * support * visit`. `visit` is the count of co-visits over a power
of the other item's number of events, divided by the item's highest; `vector` is the cosine, divided likewise; `support`
rises from 0 to 1 with the item's co-visits, so that few co-visits count little. The chosen share and power maximise
NDCG@10 of the held-out next item among the ten nearest unseen neighbours of a user's newest item, over half of the
validation cases. The other half gives the recorded figures.

Shape suffixes: V items, C candidates of an item, N neighbours in the table.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from models.catalogue import load_catalogue
from models.similar import NONE, SimilarTable, num_neighbours
from models.student import read_student
from pipelines.codes.embedding import fit_text, read_texts, unit
from pipelines.data.examples import Cases, Split, read_cases, read_counts, read_sequences, sample_cases
from pipelines.runner.stage import Progress, silent
from pipelines.scoring.metrics import gains, interval
from pipelines.similarity.co_visits import Neighbours, count_co_visits
from pipelines.similarity.vectors import nearest, nearest_of

ABOUT = "similar.json"
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
_POWERS = (0.0, 0.25, 0.5)
_SUPPORT = 5.0
"""Co-visits at which `support` is a half."""
_NUM_CASES = 20_000
_TEXT_SIZE = 64
_MOST_COMPARED = 1 << 31
"""Maximum number of pairs of texts for exact comparison: half a minute."""
_CUTOFF = 10
_ROWS = 8_192


@dataclass(frozen=True, slots=True)
class Mix:
    """The weight of the vectors, and the exponent of the other item's number of events in co-visits."""

    share: float
    power: float


@dataclass(frozen=True, slots=True, eq=False)
class Sources:
    """Inputs of the mix: candidates from co-visits and from vectors, and each item's number of training events (V,)."""

    visits: Neighbours
    vectors: Neighbours
    num_events_V: np.ndarray


def choose_mix(sources: Sources, tokenized: Path, *, repeats: bool) -> dict[str, Any]:
    """Return the best mix of these sources on the validation cases, with its figures, as `read_found` reads them."""
    return choose(sources, sample_cases(read_cases(tokenized, Split.VALID), _NUM_CASES), repeats=repeats)


def read_found(folder: Path) -> dict[str, Any]:
    """Read {mix: {share, power}, ndcg10, interval, popularity_ndcg10, co_visits_ndcg10, vectors_ndcg10, num_cases}."""
    about: dict[str, Any] = json.loads((folder / ABOUT).read_text())
    return about


def read_sources(tokenized: Path, students_dir: Path, progress: Progress = silent) -> Sources:
    """Count the co-visits of this data, and find the nearest items by this student's rows.

    Items without training events use their texts.
    """
    catalogue = load_catalogue(tokenized / "catalogue.parquet")
    num_candidates = 2 * num_neighbours(len(catalogue.item_ids))
    sequences, counts = read_sequences(tokenized), read_counts(tokenized)
    visits = count_co_visits(sequences, len(catalogue.item_ids), num_candidates, counts)
    rows_VD = read_student(students_dir / "student.safetensors").head_weight_VD.detach().numpy()
    vectors = with_texts(nearest(rows_VD, num_candidates, progress), catalogue.popularity, read_texts(tokenized))
    return Sources(visits, vectors, catalogue.popularity)


def with_texts(vectors: Neighbours, num_events_V: np.ndarray, texts: Sequence[str]) -> Neighbours:
    """Return the candidates; unused items get the nearest texts, because their rows have learned nothing."""
    unused = np.flatnonzero(num_events_V == 0)
    if not len(unused) or not any(texts):
        return vectors
    text_VT = unit(fit_text(texts, _TEXT_SIZE, seed=0).encode(texts))
    num_candidates = vectors.items_VC.shape[1]
    if len(unused) * len(texts) <= _MOST_COMPARED:
        by_text = nearest_of(unused, text_VT, num_candidates)
    else:
        neighbours = nearest(text_VT, num_candidates)
        by_text = Neighbours(neighbours.items_VC[unused], neighbours.figures_VC[unused])
    items_VC, figures_VC = vectors.items_VC.copy(), vectors.figures_VC.copy()
    items_VC[unused], figures_VC[unused] = by_text.items_VC, by_text.figures_VC
    return Neighbours(items_VC, figures_VC)


def choose(sources: Sources, cases: Cases, *, repeats: bool) -> dict[str, Any]:
    """Return the best mix, and figures of the mix, its parts and popularity on the other half of the cases."""
    places = np.arange(len(cases))
    chosen_by, judged_by = places[::2], places[1::2] if len(cases) > 1 else places
    newest = [int(cases.histories[case][-1]) for case in places]
    asked = np.unique(newest) if newest else np.zeros(0, dtype=np.int64)

    def gained(mix: Mix, of: np.ndarray) -> np.ndarray:
        rows = _mixed(sources, mix, asked, sources.visits.items_VC.shape[1])[0]
        row_of = {item: rows[number] for number, item in enumerate(asked.tolist())}
        return gains(np.array([_rank(row_of[newest[case]], cases, case, repeats) for case in of]), _CUTOFF)

    mixes = [Mix(share, power) for share, power in product(_SHARES, _POWERS)]
    best = max(mixes, key=lambda mix: _mean(gained(mix, chosen_by)))
    finds = gained(best, judged_by)
    popular = np.argsort(-sources.num_events_V, kind="stable")[: sources.visits.items_VC.shape[1] + 200]
    by_popularity = gains(np.array([_rank(popular, cases, case, repeats) for case in judged_by]), _CUTOFF)
    return {
        "mix": asdict(best),
        "ndcg10": _mean(finds),
        "interval": list(interval(finds, seed=0)) if len(finds) else None,
        "popularity_ndcg10": _mean(by_popularity),
        "co_visits_ndcg10": _mean(gained(Mix(0.0, best.power), judged_by)),
        "vectors_ndcg10": _mean(gained(Mix(1.0, best.power), judged_by)),
        "num_cases": len(judged_by),
    }


def describe(about: dict[str, Any]) -> str:
    """Return a sentence: the mix, and its figures compared with its parts and popularity."""
    mix = about["mix"]
    return (
        f"similar items: {mix['share']:.0%} by vectors, the rest by co-visits; NDCG@10 of held-out next items "
        f"{about['ndcg10']:.4f}, only co-visits {about['co_visits_ndcg10']:.4f}, only vectors "
        f"{about['vectors_ndcg10']:.4f}, by popularity {about['popularity_ndcg10']:.4f}"
    )


def table_of(sources: Sources, mix: Mix) -> SimilarTable:
    """Return the table of all items by this mix."""
    num_items = len(sources.num_events_V)
    num = num_neighbours(num_items)
    parts = [
        _mixed(sources, mix, np.arange(first, min(first + _ROWS, num_items)), num)
        for first in range(0, num_items, _ROWS)
    ]
    neighbours, scores = ([part[which] for part in parts] for which in (0, 1))
    return SimilarTable(np.concatenate(neighbours), np.concatenate(scores).astype(np.float16))


def _mixed(sources: Sources, mix: Mix, asked: np.ndarray, num: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the best neighbours of these items by the mix, (len(asked), num), -1 for none, and their scores."""
    visited, near = sources.visits.items_VC[asked], sources.vectors.items_VC[asked]
    counts = sources.visits.figures_VC[asked]
    support = counts.sum(axis=1, keepdims=True)
    visits = counts / np.maximum(sources.num_events_V[visited], 1) ** mix.power
    visits = (1 - mix.share) * support / (support + _SUPPORT) * _by_highest(np.where(visited == NONE, 0, visits))
    both = np.concatenate([visited, near], axis=1)
    scores = np.concatenate([visits, mix.share * _by_highest(sources.vectors.figures_VC[asked])], axis=1)
    order = np.argsort(both, axis=1, kind="stable")
    both, scores = np.take_along_axis(both, order, 1), np.take_along_axis(scores, order, 1)
    is_second = np.zeros_like(both, dtype=bool)
    is_second[:, 1:] = both[:, 1:] == both[:, :-1]
    scores[:, :-1] += np.where(is_second[:, 1:], scores[:, 1:], 0)
    scores[is_second | (both == NONE)] = 0
    order = np.argsort(-scores, axis=1, kind="stable")[:, :num]
    best, best_scores = np.take_along_axis(both, order, 1), np.take_along_axis(scores, order, 1)
    width = ((0, 0), (0, num - best.shape[1]))
    return (
        np.pad(np.where(best_scores > 0, best, NONE), width, constant_values=NONE).astype(np.int32),
        np.pad(best_scores, width).astype(np.float32),
    )


def _by_highest(figures: np.ndarray) -> np.ndarray:
    scaled: np.ndarray = figures / np.maximum(figures.max(axis=1, keepdims=True, initial=0), 1e-9)
    return scaled


def _rank(row: np.ndarray, cases: Cases, case: int, repeats: bool) -> float:
    """Return the label's rank from 1 in a row of neighbours; infinite if it is absent.

    Items that the user has seen are skipped unless they are shown.
    """
    at = np.flatnonzero(row == cases.targets[case])
    if not len(at):
        return np.inf
    seen = () if repeats else cases.histories[case]
    if not repeats and cases.targets[case] in seen:
        return np.inf
    return float(1 + at[0] - np.isin(row[: at[0]], seen).sum())


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else 0.0
