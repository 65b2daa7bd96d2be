"""Further comparisons for decoder and student: an untrained graph, and students with different use of a decoder.

graph           no training at all: `TransitionGraph`
student_alone   a student without a decoder: its rows start at random, and it is trained on the labels
distilled       the student trained on the decoder's targets, whether or not it serves
student         the served student
unraised        the served student mixed with sources, without the factors of items without events
fresh_student   the served student mixed with sources whose counts follow events (fresh.py)

Shape suffixes: V items, B histories, E text.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from scipy import sparse

from benchmarks.quality.fresh import FRESH
from models.catalogue import load_catalogue
from models.mixer import Mixer
from models.student import read_student
from pipelines.codes.embedding import fit_text, read_texts
from pipelines.data.examples import Cases, read_sequences
from pipelines.runner.stage import Progress
from pipelines.scoring.metrics import Ranks, Scorer, rank_labels
from pipelines.scoring.mixed import MixedScorer, probabilities_of, read_mixer
from pipelines.scoring.student import StudentScorer
from pipelines.training.fit.checkpoints import Checkpoints
from pipelines.training.train_student import DistillOptions, Inputs, fit_and_save, without_targets

_NEWEST = 5
_DECAY = 0.5
"""Weight of an item relative to the next item."""
_TEXT_SHARE = 0.05
"""Weight of a text cosine relative to the fraction of an edge."""
_TEXT_SIZE = 256


class TransitionGraph:
    """Scores a user's last five items by a graph of item successions, plus text similarity. `texts` are the items'.

    An edge counts how often an item followed another within five steps, with less weight for further steps, as a
    fraction of the edges that leave the item. The constants were chosen on validation labels.
    """

    def __init__(self, sequences: Sequence[np.ndarray], texts: Sequence[str]) -> None:
        counts_VV = sparse.csr_matrix((len(texts), len(texts)))
        for step in range(1, _NEWEST + 1):
            before, after = (
                np.concatenate([np.zeros(0, dtype=np.int64), *parts])
                for parts in zip(*((items[:-step], items[step:]) for items in sequences), strict=True)
            )
            ones = np.full(len(before), 1 / step)
            counts_VV += sparse.csr_matrix((ones, (before, after)), shape=counts_VV.shape)
        leaving_V = np.maximum(np.asarray(counts_VV.sum(axis=1)).ravel(), 1e-9)
        self._share_VV = (sparse.diags_array(1 / leaving_V) @ counts_VV).tocsr()
        text_VE = fit_text(texts, _TEXT_SIZE, seed=0).encode(texts)
        self._text_VE = text_VE / np.maximum(np.linalg.norm(text_VE, axis=1, keepdims=True), 1e-9)

    def __call__(self, histories: Sequence[np.ndarray]) -> np.ndarray:
        """Score histories -> (B, V)."""
        rows = [history[-_NEWEST:] for history in histories]
        owners = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
        weights = np.concatenate([_DECAY ** np.arange(len(row))[::-1] for row in rows])
        shape = (len(rows), len(self._text_VE))
        newest_BV = sparse.csr_matrix((weights, (owners, np.concatenate(rows))), shape=shape)
        alike_BV = (newest_BV @ self._text_VE) @ self._text_VE.T
        scores_BV: np.ndarray = (newest_BV @ self._share_VV).toarray() + _TEXT_SHARE * np.maximum(alike_BV, 0)
        return scores_BV


GRAPH, ALONE, DISTILLED, STUDENT = "graph", "student_alone", "distilled", "student"
UNRAISED = "unraised"


def train_alone(
    tokenized: Path, options: DistillOptions, out: Path, checkpoints: Checkpoints, device: torch.device, show: Progress
) -> None:
    """Train the student without a decoder, into this folder."""
    inputs = Inputs(tokenized, torch.get_num_threads(), device)
    fit_and_save(inputs, None, without_targets(options), out / f"{ALONE}.safetensors", checkpoints, show)


def rank_variants(
    tokenized: Path, students: Path, alone: Path, sources: Path, fresh: Path, cases: Cases
) -> dict[str, Ranks]:
    """Return the ranks of these labels by variant.

    `students` is the folder of the stage `distill`, `alone` that of `train_alone`, `sources` that of
    the stage `sources`, `fresh` that of `count_fresh`.
    """
    return {name: rank_labels(scorer, cases) for name, scorer in _scorers(tokenized, students, alone, sources, fresh)}


def _scorers(tokenized: Path, students: Path, alone: Path, sources: Path, fresh: Path) -> Iterator[tuple[str, Scorer]]:
    mixer, fresh_mixer = (
        read_mixer(folder, load_catalogue(tokenized / "catalogue.parquet")) for folder in (sources, fresh)
    )
    yield UNRAISED, mixed_student(replace(mixer, new_items={}), students)
    yield FRESH, mixed_student(fresh_mixer, students)
    yield GRAPH, TransitionGraph(read_sequences(tokenized), read_texts(tokenized))
    kept = students / f"{DISTILLED}.safetensors"
    student = students / f"{STUDENT}.safetensors"
    paths = {ALONE: alone / f"{ALONE}.safetensors", DISTILLED: kept if kept.exists() else student, STUDENT: student}
    for name, path in paths.items():
        yield name, StudentScorer(read_student(path))


def mixed_student(mixer: Mixer, students: Path) -> Scorer:
    """Return the served student's scorer with this mixer; unmixed if its mix has no source."""
    student = StudentScorer(read_student(students / f"{STUDENT}.safetensors"))
    return MixedScorer(mixer, STUDENT, probabilities_of(student)) if mixer.blends[STUDENT] else student
