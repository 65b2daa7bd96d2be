"""Training: learning rate, averaged weights, dropout, unusable batches, and selection of the best validation."""

import json
import math
import shutil
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from models.decoder.decoder import Decoder
from models.prompt import Prompt
from models.student import read_student, save_student
from pipelines.data.examples import Split, read_cases
from pipelines.runner.stage import silent
from pipelines.scoring.dense import DecoderScorer, hidden_states
from pipelines.scoring.metrics import ndcg, rank_labels
from pipelines.training.batches import Batch, make_batch, split_batch
from pipelines.training.fit.checkpoints import Checkpoints
from pipelines.training.fit.descent import Descent, rate_at
from pipelines.training.fit.fitting import FitOptions, Fitted, fit
from pipelines.training.parallel.dropout import Dropout
from pipelines.training.target.sampled import ItemSampler
from pipelines.training.target.student_targets import new_targets
from pipelines.training.train_decoder import TrainOptions, new_decoder, next_token_loss
from pipelines.training.train_student import (
    DistillOptions,
    Inputs,
    StudentScorer,
    choose_student,
    chosen_options,
    describe_earned,
    distill,
    fit_and_save,
    imitation_loss,
    new_student,
    read_earned,
    without_targets,
)
from services.errors import StageFailed
from tests.support.training.bundles import build_catalogue
from tests.support.training.lines import LINE, line, numbered, task_of
from tests.unit.pipelines.conftest import CPU, SMALL_STUDENT, Built, checkpoints_in

FITTED = Fitted(curve=[], skipped_batches=[], num_tokens=0, flops=0, seconds=0.0, times={})


def small_decoder() -> Decoder:
    return new_decoder(build_catalogue(), TrainOptions(hidden_size=16, num_heads=2, feed_forward=32, max_items=20))


def test_rate_rises_then_falls_to_nothing() -> None:
    """The rate is linear up to its peak at the end of the warm-up, then half a cosine down."""
    assert rate_at(0.0, 0.1) < 0.05
    assert rate_at(0.1, 0.1) == pytest.approx(1.0)
    assert rate_at(0.55, 0.1) == pytest.approx(0.5)
    assert rate_at(1.0, 0.1) == pytest.approx(0.0, abs=1e-9)


def test_averaged_weights_are_carried_only_inside_the_block() -> None:
    """Validation uses the averaged weights; training continues with the current weights."""
    model = nn.Linear(2, 1, bias=False)
    descent = Descent(model, LINE)
    for step in range(20):
        descent.step([(model(torch.ones(1, 2)).pow(2).sum(), 1)], step / 20)
    held = model.weight.detach().clone()

    with descent.averaged():
        averaged = model.weight.detach().clone()

    assert not torch.equal(averaged, held)
    assert torch.equal(model.weight, held)


def fit_line(
    model: nn.Linear, checkpoints: Checkpoints, scores: Iterable[float], epochs: int = 3, poison: float = 1.0
) -> Fitted:
    """Fit `model` to y = 5 in epochs of four batches; the loss of the third batch is multiplied by `poison`."""
    left = iter(scores)

    def loss(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
        usual = (model(torch.rand(1, 1)) - 5).pow(2).sum()
        return usual * (poison if batch.tokens[0, 0] == 2 else 1.0), 1

    task = task_of(loss, [partial(numbered, number) for number in range(4)], lambda: next(left))
    torch.manual_seed(0)
    return fit(model, task, FitOptions(epochs=epochs, validate_every=1, descent=LINE), checkpoints, silent)


def test_best_validation_is_kept_whatever_came_later(tmp_path: Path) -> None:
    """The model ends with the weights of the best validation, in inference mode."""
    early, late = line(), line()

    fitted = fit_line(early, checkpoints_in(tmp_path / "early"), (0.1, 0.9, 0.3))
    fit_line(late, checkpoints_in(tmp_path / "late"), (0.1, 0.3, 0.9))

    assert early.weight.item() < late.weight.item()
    assert [point["validation"] for point in fitted.curve] == [0.1, 0.9, 0.3]
    assert not early.training


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e6])
def test_a_poisoned_batch_is_named_and_left_out(tmp_path: Path, poison: float) -> None:
    """On NaN, infinite or far too high loss, training returns to the checkpoint and skips the batch."""
    near, far = line(), line()

    fitted = fit_line(near, checkpoints_in(tmp_path / "near", every_s=0.0), count(), poison=poison)
    fit_line(far, checkpoints_in(tmp_path / "far"), count(), poison=poison)

    assert [(batch["epoch"], batch["batch"]) for batch in fitted.skipped_batches] == [(1, 2), (2, 2), (3, 2)]
    assert near.weight.isfinite().all()
    assert torch.equal(near.weight, far.weight)


def test_a_fit_that_stays_poisoned_gives_up_and_names_the_batches(tmp_path: Path) -> None:
    """Three batches are skipped; the fourth ends the stage with an error that names them all."""
    with pytest.raises(
        StageFailed, match=r"4 batches are unusable \(batch 2 of epoch 1.*batch 2 of epoch 4.*learning rate"
    ):
        fit_line(line(), checkpoints_in(tmp_path), count(), epochs=4, poison=math.nan)


@pytest.mark.parametrize("num_parts", [2, 3])
def test_parts_of_a_batch_add_up_to_its_step(num_parts: int) -> None:
    """A batch in parts with different label counts gives the gradients of the whole batch."""
    catalogue, moved = build_catalogue(), []
    batch = make_batch([np.array([1, 2, 3, 4]), np.array([5, 6, 7, 5]), np.array([8, 9])], catalogue)
    for parts in (1, num_parts):
        decoder = small_decoder()
        descent = Descent(decoder, LINE)
        losses = [next_token_loss(decoder, catalogue, part, mask_seen=True) for part in split_batch(batch, parts)]
        before = decoder.embedding.weight.detach().clone()
        loss = descent.step(losses, 0.1)
        moved.append((loss, decoder.embedding.weight.grad, decoder.embedding.weight.detach() - before))

    (whole, grad, _), (added, grad_of_parts, _) = moved
    assert added == pytest.approx(whole, rel=1e-5)
    torch.testing.assert_close(grad_of_parts, grad, rtol=1e-4, atol=1e-7)


def test_everything_is_made_on_the_models_device() -> None:
    """Losses and scores work with another default device, so no tensor relies on the default."""
    catalogue, decoder = build_catalogue(), small_decoder()
    student = new_student(catalogue, decoder, DistillOptions(hidden_size=16, num_heads=2, max_items=20))
    batch = make_batch([np.array([1, 2, 3]), np.array([4, 5])], catalogue)
    descents = [Descent(decoder, LINE), Descent(student, LINE)]
    sampler = ItemSampler(catalogue.popularity, 10)

    with torch.device("meta"):
        losses = [
            next_token_loss(decoder, catalogue, batch, mask_seen=True),
            imitation_loss(
                student, new_targets(decoder, catalogue, [], 0.8, mask_seen=True), batch, DistillOptions(), sampler
            ),
        ]
        stepped = [descent.step([loss], 0.1) for descent, loss in zip(descents, losses, strict=True)]
        scorers = DecoderScorer(decoder, catalogue, Prompt(20, 5)), StudentScorer(student)
        scores = [scorer([np.array([1, 2, 3]), np.array([4])]) for scorer in scorers]

    assert all(math.isfinite(loss) for loss in stepped)
    assert [score.shape for score in scores] == [(2, 30), (2, 30)]


def test_a_narrow_student_starts_from_what_its_size_can_hold() -> None:
    """If the decoder's embeddings have low rank, the student starts with their inner products."""
    catalogue, decoder = build_catalogue(), small_decoder()
    with torch.no_grad():
        decoder.embedding.weight.copy_(torch.randn(31, 8) @ torch.randn(8, 16))

    student = new_student(catalogue, decoder, DistillOptions(hidden_size=8, num_heads=2, max_items=20))

    narrow, wide = student.embedding.weight, decoder.embedding.weight
    torch.testing.assert_close(narrow @ narrow.T, wide @ wide.T, rtol=1e-3, atol=1e-3)


def test_a_student_without_a_teacher_is_its_own_twin(built: Built, tmp_path: Path) -> None:
    """Without a teacher the student is trained once and also saved as the twin."""
    distill(
        built.trained.tokenized,
        built.trained.decoder_dir,
        without_targets(SMALL_STUDENT),
        tmp_path,
        checkpoints_in(tmp_path / "saved", every_s=0.0),
        CPU,
        silent,
    )

    student, twin = (tmp_path / name for name in ("student.safetensors", "twin.safetensors"))
    assert student.read_bytes() == twin.read_bytes()
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["student"]
    fits = json.loads((tmp_path / "distillation.json").read_text())
    assert fits["student"] == fits["twin"]


@pytest.mark.parametrize(("better", "uses_targets"), [("student", True), ("twin", False), ("neither", False)])
def test_the_student_that_serves_learned_from_the_decoder_where_validation_shows_that_this_earned(
    built: Built, tmp_path: Path, better: str, uses_targets: bool
) -> None:
    """The better of student and twin is served, both are kept, and a refit uses the same options."""
    learned, nothing = built.trained.students_dir / "student.safetensors", tmp_path / "nothing"
    student = read_student(learned)
    with torch.no_grad():
        student.embedding.weight.zero_()
    save_student(student, nothing)
    for name in ("student", "twin"):
        shutil.copyfile(learned if better in (name, "neither") else nothing, tmp_path / f"{name}.safetensors")

    choose_student(built.trained.tokenized, SMALL_STUDENT, tmp_path, FITTED, FITTED)

    earned = read_earned(tmp_path)
    assert (tmp_path / "student.safetensors").read_bytes() == learned.read_bytes()
    assert (tmp_path / "distilled.safetensors").exists() is not uses_targets
    assert earned["uses_targets"] is uses_targets
    assert earned["low"] <= earned["difference"] == pytest.approx(earned["ndcg10"] - earned["twin_ndcg10"])
    assert (earned["difference"] > 0.3) is uses_targets
    expected = SMALL_STUDENT if uses_targets else without_targets(SMALL_STUDENT)
    assert chosen_options(tmp_path, SMALL_STUDENT) == expected
    assert f"earn {earned['difference']:+.4f} NDCG@10" in describe_earned(earned)


def test_a_student_without_a_decoder_learns_from_labels_and_a_start_of_its_own(built: Built, tmp_path: Path) -> None:
    """A student without a decoder learns the ring and does not contain the decoder's weights."""
    path = tmp_path / "alone.safetensors"

    fit_and_save(Inputs(built.trained.tokenized, 1, CPU), None, SMALL_STUDENT, path, checkpoints_in(tmp_path / "saved"))

    valid = read_cases(built.trained.tokenized, Split.VALID)
    assert ndcg(rank_labels(StudentScorer(read_student(path)), valid).masked, 10) > 0.5
    twin = read_student(built.trained.students_dir / "twin.safetensors")
    assert not torch.allclose(read_student(path).embedding.weight, twin.embedding.weight, atol=0.1)


def test_the_twin_differs_by_the_teachers_distribution_alone() -> None:
    """The twin's options differ only in the teacher weight, and its loss does not depend on the teacher."""
    catalogue, first, other = build_catalogue(), small_decoder(), small_decoder()
    nn.init.normal_(other.embedding.weight)
    options = DistillOptions(hidden_size=16, num_heads=2, max_items=20)
    student, batch = new_student(catalogue, first, options), make_batch([np.array([1, 2, 3])], catalogue)

    distilled, alone = (
        [
            imitation_loss(
                student, new_targets(teacher, catalogue, [], chosen.teacher_weight, mask_seen=True), batch, chosen
            )[0].item()
            for teacher in (first, other)
        ]
        for chosen in (options, without_targets(options))
    )

    assert replace(without_targets(options), teacher_weight=options.teacher_weight) == options
    assert alone[0] == alone[1]
    assert distilled[0] != distilled[1]


def test_losses_keep_fp32_under_bf16_autocast() -> None:
    """Products run in bf16; weights, gradients and the softmax over the catalogue stay in fp32."""
    catalogue, decoder = build_catalogue(), small_decoder()
    batch = make_batch([np.array([1, 2, 3]), np.array([4, 5])], catalogue)

    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = next_token_loss(decoder, catalogue, batch, mask_seen=True)
    loss.backward()  # type: ignore[no-untyped-call]

    exact, _ = next_token_loss(decoder, catalogue, batch, mask_seen=True)
    assert loss.dtype == decoder.embedding.weight.grad.dtype == torch.float32  # type: ignore[union-attr]
    assert loss.item() == pytest.approx(exact.item(), rel=0.02)


def test_dropout_is_there_in_training_only_and_gone_afterwards() -> None:
    """Dropout applies only inside the block and only in training mode."""
    layer, ones = nn.Identity(), torch.ones(1_000)

    with Dropout([layer], 0.5).applied():
        dropped = layer.train()(ones)
        judged = layer.eval()(ones)

    assert 0.3 < (dropped == 0).float().mean() < 0.7
    assert torch.equal(judged, ones)
    assert torch.equal(layer.train()(ones), ones)


def test_a_row_depends_on_its_own_earlier_tokens_alone() -> None:
    """Causality separates the rows of a padded batch: padding, other rows and later items do not change a state."""
    decoder, rows = small_decoder().eval(), torch.tensor([[0, 3, 4, 5], [0, 7, 0, 0], [0, 3, 4, 6]])

    states = hidden_states(decoder, rows).view(3, 4, -1)

    torch.testing.assert_close(states[1, :2], hidden_states(decoder, rows[1:2, :2]), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(states[0, :3], states[2, :3])
    assert not torch.allclose(states[0, 3], states[2, 3])
