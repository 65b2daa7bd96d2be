"""Further comparisons for decoder and student: an untrained graph, and students with different use of a decoder.

graph           no training at all (graph.py)
student_alone   a student without a decoder: its rows start at random, and it is trained on the labels
distilled       the student trained on the decoder's targets, whether or not it serves
student         the served student, here also with the opposite setting for seen items
fresh_student   the served student mixed with sources whose counts follow events (fresh.py)
"""

from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.quality.fresh import FRESH, fresh_scorer
from benchmarks.quality.graph import TransitionGraph
from models.student import read_student
from pipelines.codes.embedding import read_texts
from pipelines.data.examples import Cases, read_sequences
from pipelines.runner.stage import Progress
from pipelines.scoring.metrics import Ranks, Scorer, rank_labels
from pipelines.scoring.student import StudentScorer
from pipelines.training.fit.checkpoints import Checkpoints
from pipelines.training.train_student import DistillOptions, Inputs, fit_and_save, without_targets

GRAPH, ALONE, DISTILLED, STUDENT = "graph", "student_alone", "distilled", "student"


def train_alone(
    tokenized: Path, options: DistillOptions, out: Path, checkpoints: Checkpoints, device: torch.device, show: Progress
) -> None:
    """Train the student without a decoder, into this folder."""
    inputs = Inputs(tokenized, torch.get_num_threads(), device)
    fit_and_save(inputs, None, without_targets(options), out / f"{ALONE}.safetensors", checkpoints, show)


def rank_variants(tokenized: Path, students: Path, alone: Path, fresh: Path, cases: Cases) -> dict[str, Ranks]:
    """Return the ranks of these labels by variant.

    `students` is the folder of the stage `distill`, `alone` that of `train_alone`, `fresh` that of `count_fresh`.
    """
    return {name: rank_labels(scorer, cases) for name, scorer in _scorers(tokenized, students, alone, fresh)}


def _scorers(tokenized: Path, students: Path, alone: Path, fresh: Path) -> Iterator[tuple[str, Scorer]]:
    yield FRESH, fresh_scorer(tokenized, students, fresh)
    yield GRAPH, TransitionGraph(read_sequences(tokenized), read_texts(tokenized))
    kept = students / f"{DISTILLED}.safetensors"
    student = students / f"{STUDENT}.safetensors"
    paths = {ALONE: alone / f"{ALONE}.safetensors", DISTILLED: kept if kept.exists() else student, STUDENT: student}
    for name, path in paths.items():
        yield name, StudentScorer(read_student(path))
