"""Further comparisons for decoder and student: an untrained graph, and students with different use of a decoder.

graph           no training at all (graph.py)
student_alone   a student without a decoder: its rows start at random, and it is trained on the labels
distilled       the student trained on the decoder's targets, whether or not it serves
student         the served student, here also with the opposite setting for seen items
unraised        the served student mixed with sources, without the factors of items without events
fresh_student   the served student mixed with sources whose counts follow events (fresh.py)
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.quality.fresh import FRESH
from benchmarks.quality.graph import TransitionGraph
from models.catalogue import load_catalogue
from models.mixer import Mixer
from models.student import read_student
from pipelines.codes.embedding import read_texts
from pipelines.data.examples import Cases, read_sequences
from pipelines.runner.stage import Progress
from pipelines.scoring.metrics import Ranks, Scorer, rank_labels
from pipelines.scoring.mixed import MixedScorer, probabilities_of, read_mixer
from pipelines.scoring.student import StudentScorer
from pipelines.training.fit.checkpoints import Checkpoints
from pipelines.training.train_student import DistillOptions, Inputs, fit_and_save, without_targets

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
