"""What decoder and student are compared with beside the baselines of the evaluation: an untrained graph, and students that differ in what they had of a decoder.

graph           no training at all (graph.py)
student_alone   a student that never saw a decoder: its rows start at random, and it learns from the labels
distilled       the student that learned the decoder's targets, whether or not it serves
student         the one that serves, here also with seen items the other way
"""

from collections.abc import Iterator
from pathlib import Path

import torch

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
    """Train the student that never saw a decoder, into this folder."""
    inputs = Inputs(tokenized, torch.get_num_threads(), device)
    fit_and_save(inputs, None, without_targets(options), out / f"{ALONE}.safetensors", checkpoints, show)


def rank_variants(tokenized: Path, students: Path, alone: Path, cases: Cases) -> dict[str, Ranks]:
    """Return the ranks of these labels by variant. `students` is the folder of the stage `distill`, `alone` that of `train_alone`."""
    return {name: rank_labels(scorer, cases) for name, scorer in _scorers(tokenized, students, alone)}


def _scorers(tokenized: Path, students: Path, alone: Path) -> Iterator[tuple[str, Scorer]]:
    yield GRAPH, TransitionGraph(read_sequences(tokenized), read_texts(tokenized))
    kept = students / f"{DISTILLED}.safetensors"
    student = students / f"{STUDENT}.safetensors"
    paths = {ALONE: alone / f"{ALONE}.safetensors", DISTILLED: kept if kept.exists() else student, STUDENT: student}
    for name, path in paths.items():
        yield name, StudentScorer(read_student(path))
