"""The refit trains the served pair on all events; comparisons and warm starts use the judged pair."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from models.catalogue import load_catalogue
from models.decoder.weights import load_decoder
from models.registry.bundle import JUDGED, Bundle
from models.registry.store import BundleStore
from models.student import read_student
from pipelines.data.examples import REFIT, read_sequences
from pipelines.evaluation.champion import compare
from pipelines.evaluation.evaluate import read_report
from pipelines.evaluation.held_out import HeldOut
from pipelines.evaluation.pair import load_pair
from pipelines.publication import refit as refitting
from pipelines.publication.bundle import assemble
from pipelines.publication.refit import describe, find_problems, onward, read_found, refit, refuse, serving_pair
from pipelines.runner.stage import silent
from pipelines.training import train_decoder, train_student
from pipelines.training.recipes import Recipe
from pipelines.training.start.warm_start import last_whole_training
from pipelines.training.train_decoder import new_decoder
from pipelines.training.train_student import new_student
from services.errors import StageFailed
from tests.support.training.bundles import live_store
from tests.unit.pipelines.conftest import CPU, MADE_AT, QUICK, SMALL_DECODER, SMALL_STUDENT, Built, checkpoints_in

RECIPE = Recipe(train=SMALL_DECODER, distill=SMALL_STUDENT)


@pytest.fixture(scope="module")
def refitted(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the ring's models after a refit."""
    folder = tmp_path_factory.mktemp("refit")
    refit(built.trained, RECIPE, folder, checkpoints_in(folder / "saved"), silent)
    return folder


@pytest.fixture(scope="module")
def bundle(built: Built, refitted: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The refitted bundle, published and live."""
    folder = tmp_path_factory.mktemp("published")
    serving = serving_pair(built.trained, refitted)
    assemble(serving, built.evaluated, built.similar, built.wishes, MADE_AT, folder, built.trained)
    prompt = {"max_items": built.trained.max_items, "stride": built.trained.stride}
    about = {"prompt": prompt, "data": {"newest_event_us": 1 << 57}}
    return live_store(folder / "bundles", folder / "bundle", "v1", about).live()


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([value.flatten() for value in model.state_dict().values()])


def test_the_refit_learns_every_event_and_the_judged_pair_the_same_as_ever(built: Built) -> None:
    """The refit uses twelve events per user instead of ten, popularity follows, and codes do not change."""
    tokens = built.trained.tokenized
    events = pl.read_parquet(tokens.parent / "ingest" / "events.parquet")
    catalogue, before = (load_catalogue(folder / "catalogue.parquet") for folder in (tokens / REFIT, tokens))
    by_user = events.group_by("user_id", maintain_order=True).agg("item_id")["item_id"].to_list()

    learned = [catalogue.indices(items) for items in by_user]
    assert sorted(map(tuple, learned)) == sorted(tuple(items) for items in read_sequences(tokens / REFIT))
    assert sorted(tuple(items[:-2]) for items in learned) == sorted(tuple(items) for items in read_sequences(tokens))
    assert catalogue.popularity.tolist() == np.bincount(np.concatenate(learned), minlength=30).tolist()
    assert (before.popularity.sum(), catalogue.popularity.sum()) == (400, 480)
    assert np.array_equal(before.codes, catalogue.codes)


def test_what_serves_predicts_the_newest_events_better_and_lists_much_the_same(built: Built, refitted: Path) -> None:
    """After the refit both models predict the newest events better, with mostly the same lists."""
    report = read_found(refitted)

    refuse(report)
    assert (report["num_events"], report["num_events_judged"]) == (480, 400)
    metrics = read_report(built.evaluated)["metrics"]
    for name, row in report["models"].items():
        assert row["newest_loss"] < row["newest_loss_judged"]
        assert row["newest_ndcg_judged"] == pytest.approx(metrics[name]["ndcg@10"])
        assert row["in_common"] > 0.5
    assert describe(report).startswith("refit on 480 events; the judged models had learned 400: the decoder's")


def test_a_refit_learns_the_decoders_targets_where_the_judged_student_did(built, refitted, tmp_path) -> None:
    """If the judged student used the decoder's targets, so does the refit; the decoder does not depend on it."""
    students = tmp_path / "students"
    shutil.copytree(built.trained.students_dir, students)
    about = json.loads((students / "distillation.json").read_text())
    about["earned"]["uses_targets"] ^= True
    (students / "distillation.json").write_text(json.dumps(about))
    (tmp_path / "out").mkdir()
    other = replace(built.trained, students_dir=students)

    refit(other, RECIPE, tmp_path / "out", checkpoints_in(tmp_path / "s"), silent)

    pair, other = (load_pair(folder, CPU) for folder in (refitted, tmp_path / "out"))
    assert torch.equal(weights(pair.decoder), weights(other.decoder))
    assert not torch.allclose(weights(pair.student), weights(other.student), atol=1e-3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"is_finite": False}, "the student has weights that are not finite"),
        ({"newest_loss": 3.0}, "the student predicts the newest events no better .* loss 3.0000 after 3.0000"),
        ({"newest_loss": float("nan")}, "the student predicts the newest events no better"),
        ({"in_common": 0.29}, "the student's lists have 29% in common .* under 30%"),
        ({"in_common": float("nan")}, "the student's lists have nan% in common"),
    ],
)
def test_weights_that_are_not_what_was_judged_are_refused(change: dict[str, Any], words: str) -> None:
    """The error names the model, the finding, and the way to publish the judged pair."""
    sound = {"newest_loss": 2.0, "newest_loss_judged": 3.0, "in_common": 0.6, "is_finite": True}
    report = {"models": {"decoder": sound, "student": sound | change}, "least_in_common": 0.3}

    assert len(find_problems(report)) == 1
    with pytest.raises(StageFailed, match=f"stage refit: {words}.*nothing was published .--no-refit publishes"):
        refuse(report)


@pytest.mark.parametrize(
    ("num_events", "num_known", "batch", "epochs", "share", "start_share"),
    [
        (100_000, 100_000, 1_000, 25, 0.25, 0.5),
        (10_000, 10_000, 1_000, 40, 0.5, 0.5),
        (480, 480, 128, 8, 1.0, 0.5),
        (100_000, 97_500, 1_000, 25, 0.25, 0.5),
        (100_000, 97_000, 1_000, 25, 0.25, 0.0),
    ],
)
def test_a_quarter_of_the_epochs_or_enough_steps(num_events, num_known, batch, epochs, share, start_share) -> None:
    """Small data gets more epochs than a quarter, and weights are averaged with the start only for few new events."""
    plan = onward(num_events, num_known, batch, epochs)

    assert (plan.epochs, plan.start_share) == (share, start_share)


def test_lists_are_compared_by_their_items() -> None:
    """Overlap ignores the order and is relative to the shorter list."""
    assert refitting.in_common([np.array([1, 2]), np.array([3])], [np.array([2, 9]), np.array([3])]) == 0.75


def test_the_bundle_serves_the_refit_and_keeps_the_judged_pair_whole(built, refitted, bundle) -> None:
    """The bundle root has the refitted pair and `judged/` the judged pair; the report describes the refit."""
    served, judged = load_pair(bundle.path, CPU), load_pair(bundle.judged_dir, CPU)
    files = {name for name in bundle.manifest["files"] if name.startswith(JUDGED)}

    names = ("catalogue.parquet", "decoder/config.json", "decoder/model.safetensors", "student.safetensors")
    assert files == {f"{JUDGED}/{name}" for name in names}
    assert torch.equal(weights(judged.decoder), weights(load_decoder(built.trained.decoder_dir, torch.float32, CPU)))
    assert torch.equal(weights(served.student), weights(read_student(refitted / "student.safetensors")))
    assert not torch.equal(weights(served.decoder), weights(judged.decoder))
    assert bundle.catalogue().popularity.sum() == 480
    assert bundle.report()["refit"] == read_found(refitted)


def test_the_champion_is_the_judged_pair(built: Built, bundle: Bundle, tmp_path: Path) -> None:
    """The champion is the judged pair, since the served weights have seen the labels."""
    held_out = HeldOut(built.trained.tokenized, tmp_path, "tailrace pipeline")

    rows = compare(built.trained, held_out, built.evaluated, bundle)

    assert [row["champion_ndcg"] for row in rows] == [row["challenger_ndcg"] for row in rows]


def test_a_nightly_start_is_the_judged_pair(built: Built, bundle: Bundle) -> None:
    """A warm start uses weights that have not seen the next gate's labels."""
    catalogue = load_catalogue(built.trained.tokenized / "catalogue.parquet")
    decoder = new_decoder(catalogue, SMALL_DECODER)
    student = new_student(catalogue, decoder, SMALL_STUDENT)
    events = built.trained.tokenized.parent / "ingest" / "events.parquet"

    start = last_whole_training(BundleStore(bundle.path.parent), bundle, events)

    assert start is not None
    assert train_decoder.begin_warm(start, decoder, catalogue, QUICK)
    assert train_student.begin_warm(start, student, catalogue, QUICK)
    judged = load_pair(bundle.path / JUDGED, CPU)
    assert torch.equal(weights(decoder), weights(judged.decoder))
    assert torch.equal(weights(student), weights(judged.student))
