"""Stage 5: trains a student on the decoder's distribution, and its twin on the labels only.

Validation chooses which serves.

    student.safetensors     weights (models.student) of the serving student
    twin.safetensors        weights of the twin
    distilled.safetensors   weights of the distilled student if the twin serves
    curves.png              loss and validation of both, by step
    distillation.json       shapes, curves, options, and the gain from distillation

The student's target at each position mixes the label with the decoder's distribution over the whole catalogue. The
twin's target is the label. For codes deeper than 1, a decoder's teacher also teaches the student (target/teacher.py).
Without a teacher, the distribution covers the items of the decoder's beams (target/student_targets.py), and rows of
items without training events are made from their codes (start/student_rows.py). Otherwise student and twin are equal:
both start from the decoder's item embeddings (reduced to their size), with the same dropout, batches and schedule.
Their difference is therefore the value of the decoder's distribution.

Shape suffixes: B windows, L positions, T = B * L tokens, D hidden.
"""

import json
import math
import multiprocessing
import shutil
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from models.catalogue import Catalogue, load_catalogue
from models.decoder.decoder import Decoder
from models.decoder.weights import load_decoder
from models.student import StudentConfig, StudentModel, read_student, save_student
from pipelines.codes.embedding import read_texts
from pipelines.data.examples import Split, read_cases, read_labelled_sequences, sample_cases
from pipelines.foreign.stage import imported_beside
from pipelines.runner.stage import Progress, silent
from pipelines.scoring.metrics import gains, interval, ndcg, rank_labels
from pipelines.scoring.student import StudentScorer
from pipelines.training.batches import Batch, Loss, batch_windows, cut_windows
from pipelines.training.fit.checkpoints import Checkpoints
from pipelines.training.fit.descent import DescentOptions
from pipelines.training.fit.fitting import FitOptions, Fitted, Task, fit
from pipelines.training.parallel.dropout import Dropout
from pipelines.training.parallel.mesh import ONE_PROCESS, Mesh
from pipelines.training.reports.curves import CURVES, write_png
from pipelines.training.reports.watched import watched
from pipelines.training.start.student_rows import encoded_rows, fill_rows, fill_rows_from_texts
from pipelines.training.start.warm_start import NUM_CASES, Begun, WarmStart, rows_before
from pipelines.training.target.positions import position_loss
from pipelines.training.target.sampled import ItemSampler
from pipelines.training.target.student_targets import BeamTargets, LabelTargets, new_targets
from pipelines.training.target.teacher import load_teacher
from pipelines.training.workers.team import ONE, Team
from services.errors import CheckpointError

_ABOUT = "distillation.json"
_NUM_CHOOSING = 50_000
"""Maximum number of validation cases for the choice. A quarter of 30,000 missed a gain that all of them and the test
labels show."""
_FRESH_STD = 0.02
_WORTH_A_PROCESS = 20_000
"""Events learned by the twin over all epochs above which it gets a separate process: importing torch takes two
seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillOptions:
    """The student's shape and recipe. `teacher_weight` is the decoder's weight in the target, in [0, 1]."""

    hidden_size: int = 64
    feed_forward: int = 128
    num_heads: int = 4
    num_hops: int = 2
    max_items: int = 200
    teacher_weight: float = 0.8
    dropout: float = 0.1
    sample_items: int = 0
    """As in the decoder's TrainOptions."""
    mask_seen: bool = True
    """As in the decoder's TrainOptions."""
    max_batch_tokens: int = 2_048
    seed: int = 0
    fit: FitOptions = field(
        default_factory=lambda: FitOptions(
            epochs=15,
            validate_every=5,
            descent=DescentOptions(learning_rate=4e-3, weight_decay=0.1, warm_up=0.1, average=0.99),
        )
    )


def distill(
    tokenized: Path,
    decoder_dir: Path,
    options: DistillOptions,
    out: Path,
    checkpoints: Checkpoints,
    device: torch.device,
    progress: Progress,
    start: WarmStart | None = None,
    team: Team = ONE,
) -> None:
    """Train both and write them with the choice.

    The twin trains in a parallel process, or after the student if ranks train both or if there is little to learn. A
    student without a teacher equals its twin and is trained once.
    """
    inputs, label_options = Inputs(tokenized, torch.get_num_threads(), device), without_targets(options)
    path, twin_path = out / "student.safetensors", out / "twin.safetensors"
    team = team.of_student
    fit_student = partial(fit_and_save, inputs, decoder_dir, options, path, checkpoints.of("student"), start=start)
    saved = checkpoints.of("twin")
    num_learned = label_options.fit.epochs * load_catalogue(tokenized / "catalogue.parquet").popularity.sum()
    if options == label_options:
        student = twin = team.fit(fit_student, checkpoints.of("student"), progress)
        shutil.copyfile(path, twin_path)
    elif team.workers > 1 or num_learned < _WORTH_A_PROCESS:
        student = team.fit(fit_student, checkpoints.of("student"), progress)
        fit_twin = partial(fit_and_save, inputs, decoder_dir, label_options, twin_path, saved, start=start)
        twin = team.fit(fit_twin, saved, silent)
    else:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as beside:
            own = team.mesh
            fitting = beside.submit(
                fit_and_save, inputs, decoder_dir, label_options, twin_path, saved, silent, start, own
            )
            student, twin = fit_student(progress=progress, mesh=own), fitting.result()
    choose_student(tokenized, options, out, student, twin)


def choose_student(tokenized: Path, options: DistillOptions, out: Path, fitted: Fitted, twin_fitted: Fitted) -> None:
    """Keep the distilled student if its validation NDCG@10 exceeds its twin's beyond the paired 95 % interval.

    Otherwise the twin serves. Writes the comparison. Both are trained in any case, so a choice costs one more
    validation of each.
    """
    path, twin_path, repeats = out / "student.safetensors", out / "twin.safetensors", not options.mask_seen
    cases = sample_cases(read_cases(tokenized, Split.VALID), _NUM_CHOOSING)
    student, twin = (
        gains(rank_labels(StudentScorer(read_student(student_path)), cases).as_served(repeats=repeats), 10)
        for student_path in (path, twin_path)
    )
    low, high = interval(student - twin, seed=0)
    uses_targets = low > 0
    if not uses_targets:
        path.rename(out / "distilled.safetensors")
        shutil.copyfile(twin_path, path)
    means = {"ndcg10": float(student.mean()), "twin_ndcg10": float(twin.mean())}
    difference = {"difference": float((student - twin).mean()), "low": low, "high": high}
    earned = {"uses_targets": uses_targets, **means, **difference, "num_cases": len(cases)}
    about = {"options": asdict(options), "student": asdict(fitted), "twin": asdict(twin_fitted), "earned": earned}
    (out / _ABOUT).write_text(json.dumps(about, indent=1))
    write_png({"student": fitted, "twin": twin_fitted}, out / CURVES)


def read_earned(students_dir: Path) -> dict[str, Any]:
    """Read the choice of the serving student, with both validation NDCG@10.

    Its keys are uses_targets, ndcg10, twin_ndcg10, difference, low, high and num_cases.
    """
    earned: dict[str, Any] = json.loads((students_dir / _ABOUT).read_text())["earned"]
    return earned


def describe_earned(earned: Mapping[str, Any]) -> str:
    """Return a sentence: which student serves, and why."""
    serves = "from the decoder's targets" if earned["uses_targets"] else "without the decoder's targets"
    words = (
        f"by validation these earn {earned['difference']:+.4f} NDCG@10 ({earned['low']:+.4f} to {earned['high']:+.4f})"
    )
    return f"the student learned {serves}: {words}"


def chosen_options(students_dir: Path, options: DistillOptions) -> DistillOptions:
    """Return the options of the serving student."""
    return options if read_earned(students_dir)["uses_targets"] else without_targets(options)


@dataclass(frozen=True, slots=True)
class Inputs:
    """The data of a fit, and its device."""

    tokenized: Path
    num_threads: int
    device: torch.device


def fit_and_save(
    inputs: Inputs,
    decoder_dir: Path | None,
    options: DistillOptions,
    path: Path,
    checkpoints: Checkpoints,
    progress: Progress = silent,
    start: WarmStart | None = None,
    mesh: Mesh = ONE_PROCESS,
) -> Fitted:
    """Train one student on the stage's inputs, write it, and return its curve.

    Without a decoder it starts at random and learns from the labels.
    """
    torch.set_num_threads(inputs.num_threads)
    device = mesh.device(inputs.device)
    catalogue = load_catalogue(inputs.tokenized / "catalogue.parquet")
    sequences, valid = read_labelled_sequences(inputs.tokenized), read_cases(inputs.tokenized, Split.VALID)
    teacher = None
    if decoder_dir is not None and (own_teacher := load_teacher(decoder_dir.parent, device)) is not None:
        teacher, catalogue = own_teacher
    elif decoder_dir is not None:
        teacher = load_decoder(decoder_dir, torch.float32, device)
    imported = None if decoder_dir is None else imported_beside(decoder_dir)
    student = new_student(catalogue, teacher, options, rescales=imported is not None).to(device)
    targets = new_targets(
        teacher, catalogue, sequences, options.teacher_weight, mask_seen=options.mask_seen, imported=imported
    )
    begun = None if start is None else begin_warm(start, student, catalogue, options.fit)
    if begun is not None:
        valid = sample_cases(valid, NUM_CASES)
    rng, scorer = np.random.default_rng(options.seed), StudentScorer(student)
    sampler = ItemSampler(catalogue.popularity, options.sample_items) if options.sample_items else None
    modules = [module for name, module in student.named_modules() if name.endswith(("embedding", "output", "down"))]
    task = Task(
        batches=lambda: batch_windows(
            cut_windows(targets.sequences, options.max_items, rng), targets.encoding, options.max_batch_tokens, rng
        ),
        rng=rng,
        loss=lambda model, batch: imitation_loss(cast("StudentModel", model), targets, batch, options, sampler),
        validate=lambda: ndcg(rank_labels(scorer, valid).as_served(repeats=not options.mask_seen), 10),
        uniform_loss=math.log(max(2, len(catalogue.item_ids))),
        dropout=Dropout(modules, options.dropout),
    )
    fit_options, start_shares = (begun.options, begun.start_shares(student)) if begun else (options.fit, None)
    with watched(checkpoints, asdict(options), device, mesh) as watch:
        fitted = fit(student, task, fit_options, checkpoints, progress, start_shares, mesh, watch)
    unused = np.flatnonzero(catalogue.popularity == 0)
    if catalogue.depth > 1:
        fill_rows(student, catalogue, unused)
    elif any(texts := read_texts(inputs.tokenized)):
        fill_rows_from_texts(student, texts, unused)
    if mesh.is_main:
        save_student(student, path)
    return fitted


def without_targets(options: DistillOptions) -> DistillOptions:
    """Return the twin's options: the label is the whole target."""
    return replace(options, teacher_weight=0.0)


def new_student(
    catalogue: Catalogue, teacher: Decoder | None, options: DistillOptions, *, rescales: bool = False
) -> StudentModel:
    """Return a student with fresh weights; its embeddings come from the teacher unless that is missing or wider.

    `rescales` gives them the scale of fresh weights: the scale of a decoder that was trained elsewhere is unknown.
    """
    torch.manual_seed(options.seed)
    config = StudentConfig(
        num_items=len(catalogue.item_ids),
        hidden_size=options.hidden_size,
        feed_forward=options.feed_forward,
        num_heads=options.num_heads,
        num_hops=options.num_hops,
        max_items=options.max_items,
    )
    student = StudentModel(config)
    for name, parameter in student.named_parameters():
        if name.endswith(".weight") and parameter.dim() > 1:
            nn.init.normal_(parameter, std=_FRESH_STD)
    if teacher is not None and teacher.config.hidden_size >= options.hidden_size:
        with torch.no_grad():
            rows_VD = _narrowed(encoded_rows(teacher, catalogue), options.hidden_size)
            student.embedding.weight.copy_(rows_VD * (_FRESH_STD / rows_VD.std()) if rescales else rows_VD)
    return student


def _narrowed(rows_VE: Tensor, size: int) -> Tensor:
    """Return rows of this size with the nearest inner products to the given rows'.

    The rows themselves if sizes match.
    """
    if rows_VE.shape[1] == size:
        return rows_VE
    _, directions_EE = torch.linalg.eigh(rows_VE.T @ rows_VE)  # ascending
    narrow_VD: Tensor = rows_VE @ directions_EE[:, -size:]
    return narrow_VD


def begin_warm(start: WarmStart, student: StudentModel, catalogue: Catalogue, options: FitOptions) -> Begun | None:
    """Warm-start this student, which has fresh weights, from a bundle's. None if they do not fit."""

    def read(folder: Path) -> StudentModel:
        path = folder / "student.safetensors"
        if not path.exists():
            raise CheckpointError(f"{path}: the bundle was made before bundles kept their student's weights")
        return read_student(path)

    return start.begin("distill", student, catalogue, options, read, rows_before)


def imitation_loss(
    student: StudentModel,
    targets: LabelTargets | BeamTargets,
    batch: Batch,
    options: DistillOptions,
    sampler: ItemSampler | None = None,
) -> Loss:
    """Return the student's mean cross-entropy over all positions and their number.

    The target mixes labels and teacher; disliked items add their unlikelihood.
    """
    rows_BL, items_BL = targets.read(batch.tokens, batch.labels)
    return position_loss(
        student(rows_BL),
        student.head_weight_VD,
        items_BL,
        batch.is_label,
        mask_seen=options.mask_seen,
        sampler=sampler,
        teacher=targets.of_batch(batch.tokens, batch.labels),
        weights_BL=batch.weights,
        disliked=batch.disliked,
    )
