"""The teacher of deeper codes: code probabilities, the distilled loss, and storage in the bundle."""

import shutil
from collections.abc import MutableMapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from models.catalogue import BOS_TOKEN, Catalogue, load_catalogue
from models.decoder.decoder import Decoder
from models.prompt import Prompt
from models.student import read_student
from pipelines.codes.options import CodesOptions
from pipelines.runner.stage import silent
from pipelines.scoring.dense import DecoderScorer
from pipelines.scoring.student import StudentScorer
from pipelines.training.batches import make_batch
from pipelines.training.start.warm_start import WarmStart
from pipelines.training.target.code_paths import CodePaths
from pipelines.training.target.teacher import TEACHER, ItemTeacher, load_teacher, single_level
from pipelines.training.train_decoder import new_decoder, next_token_loss, train
from tests.support.engine.dense import logits_of
from tests.unit.pipelines.conftest import CPU, SMALL_DECODER, Built, checkpoints_in, learn_the_ring

SIZES, NUM_ITEMS, WEIGHT = (3, 4, 5), 20, 0.7
WITH_TEACHER = replace(SMALL_DECODER, teacher_weight=WEIGHT, teacher_dropout=0.0)


def make(seed: int = 0) -> tuple[Catalogue, Decoder, Decoder]:
    """Return a catalogue of codes of depth 3 with two equal codes, a decoder over it, and a teacher of its items."""
    rng = np.random.default_rng(seed)
    codes = rng.permutation(np.argwhere(np.ones(SIZES)))[:NUM_ITEMS].astype(np.int32)
    codes[4] = codes[11]
    ids = tuple(f"i{index:02}" for index in range(NUM_ITEMS))
    catalogue = Catalogue(ids, ids, ((),) * NUM_ITEMS, codes, SIZES, np.ones(NUM_ITEMS))
    teacher = new_decoder(single_level(catalogue, NUM_ITEMS), replace(SMALL_DECODER, seed=seed + 1))
    with torch.no_grad():
        teacher.embedding.weight.mul_(50)
    return catalogue, new_decoder(catalogue, SMALL_DECODER), teacher


def shares_by_loop(
    teacher, catalogue: Catalogue, history: np.ndarray, label: int, *, mask_seen: bool
) -> list[np.ndarray]:
    """Return each level's probabilities below the label's prefix by adding up single items."""
    scores = DecoderScorer(teacher, single_level(catalogue, NUM_ITEMS), Prompt(10, 5))([history])[0].astype(np.float64)
    if mask_seen:
        scores[history] = -np.inf
    share_I = np.exp(scores - scores.max())
    rows = []
    for level, size in enumerate(SIZES):
        shares = np.zeros(size)
        for item, codes in enumerate(catalogue.codes):
            if (codes[:level] == catalogue.codes[label, :level]).all():
                shares[codes[level]] += share_I[item]
        rows.append(shares / shares.sum() if shares.sum() else shares)
    return rows


@given(
    st.lists(st.lists(st.sampled_from(range(NUM_ITEMS)), min_size=1, max_size=6), min_size=1, max_size=3), st.booleans()
)
@settings(max_examples=30)
def test_shares_are_the_sums_over_items_below_the_labels_prefix(windows: list[list[int]], mask_seen: bool) -> None:
    """Code probabilities equal sums over items at every level, with padding, duplicates and masks."""
    catalogue, _, teacher = make()
    windows = [[4 if item == 11 else item for item in window] for window in windows]  # the first of equal codes
    batch = make_batch([np.array(window) for window in windows], catalogue)
    codes_BNX = batch.labels.view(len(windows), -1, 3) - torch.tensor(catalogue.token_offsets)
    chosen_BN = codes_BNX[..., 0] >= 0

    paths = CodePaths(catalogue, CPU)
    item_teacher = ItemTeacher(teacher, catalogue.codes, paths.child_PS, WEIGHT, mask_seen=mask_seen)
    targets = item_teacher.targets(codes_BNX.clamp(min=-1), chosen_BN)

    labels = [(window[:position], item) for window in windows for position, item in enumerate(window)]
    for row, (history, label) in enumerate(labels):
        wanted = shares_by_loop(teacher, catalogue, np.array(history, dtype=int), label, mask_seen=mask_seen)
        for level, shares in enumerate(wanted):
            np.testing.assert_allclose(targets[level].shares_TS[row], WEIGHT * shares, atol=1e-5)


def test_the_target_is_the_mixture_of_label_and_teacher() -> None:
    """The loss is the mean cross-entropy over levels against the mixture of label and teacher."""
    catalogue, decoder, teacher = make()
    window, paths = np.array([3, 7, 12]), CodePaths(catalogue, CPU)
    item_teacher = ItemTeacher(teacher, catalogue.codes, paths.child_PS, WEIGHT, mask_seen=True)

    batch = make_batch([window], catalogue)
    loss, number = next_token_loss(decoder, catalogue, batch, mask_seen=False, paths=paths, teacher=item_teacher)

    losses = []
    for position, item in enumerate(window):
        targets = shares_by_loop(teacher, catalogue, window[:position], item, mask_seen=True)
        for level, size in enumerate(SIZES):
            tokens = [BOS_TOKEN, *catalogue.tokens(window[:position]), *catalogue.tokens([item])[:level]]
            first = catalogue.token_offsets[level]
            scores = logits_of(decoder, torch.tensor(tokens))[-1, first : first + size].double().numpy()
            alike = (codes for codes in catalogue.codes if (codes[:level] == catalogue.codes[item, :level]).all())
            below = {codes[level] for codes in alike}
            scores[[code not in below for code in range(size)]] = -np.inf
            logs = scores - np.logaddexp.reduce(scores)
            target = WEIGHT * targets[level]
            target[catalogue.codes[item, level]] += 1 - WEIGHT
            losses.append(-sum(target[code] * logs[code] for code in below))
    assert number == 9
    assert loss.item() == pytest.approx(np.mean(losses), rel=1e-4)


def test_a_batch_of_which_nothing_is_learned_has_no_loss() -> None:
    """A batch with context only has zero loss and no labels."""
    catalogue, decoder, teacher = make()
    paths, batch = CodePaths(catalogue, CPU), make_batch([np.array([3, 7])], catalogue)
    batch.is_label[:] = False
    item_teacher = ItemTeacher(teacher, catalogue.codes, paths.child_PS, WEIGHT, mask_seen=True)

    loss, number = next_token_loss(decoder, catalogue, batch, mask_seen=False, paths=paths, teacher=item_teacher)

    assert (loss.item(), number) == (0.0, 0)


def trained_again(bundle: Path, tokens: Path, out: Path) -> list[MutableMapping[str, Any]]:
    """Train with a teacher from a bundle, and return the log."""
    with capture_logs() as logged:
        train(tokens, WITH_TEACHER, out, checkpoints_in(out / "saved"), CPU, silent, WarmStart(bundle, "v1"))
    return logged


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return learn_the_ring(tmp_path_factory.mktemp("taught"), WITH_TEACHER, CodesOptions(depth=2, codes_per_level=8))


def test_the_teacher_teaches_the_student_too_and_travels_with_the_bundle(taught: Built, tmp_path: Path) -> None:
    """The bundle includes the teacher, the student ranks like the teacher, and a warm start uses both."""
    bundle = taught.assembled / "bundle"
    decoder, by_item = load_teacher(bundle, CPU) or pytest.fail("no teacher")
    catalogue = load_catalogue(bundle / "catalogue.parquet")
    histories = [np.array([5, 6, 7]), np.array([20])]

    student = StudentScorer(read_student(bundle / "student.safetensors"))(histories)
    teacher = DecoderScorer(decoder, by_item, Prompt(10, 5))(histories)
    logged = trained_again(bundle, taught.trained.tokenized, tmp_path)

    assert (catalogue.depth, by_item.depth, by_item.item_ids) == (2, 1, catalogue.item_ids)
    assert all(np.corrcoef(row, other)[0, 1] > 0.9 for row, other in zip(student, teacher, strict=True))
    assert not logged
    assert (tmp_path / TEACHER / "decoder" / "config.json").exists()


def test_a_bundle_without_a_teacher_gives_the_decoder_a_warm_start_all_the_same(taught: Built, tmp_path: Path) -> None:
    """The log states why the teacher is trained in full."""
    bundle = Path(shutil.copytree(taught.assembled / "bundle", tmp_path / "bundle", ignore=lambda *_: [TEACHER]))

    logged = trained_again(bundle, taught.trained.tokenized, tmp_path / "again")

    assert load_teacher(bundle, CPU) is None
    assert [(entry["event"], TEACHER in entry["why"]) for entry in logged] == [("warm_start_refused", True)]
