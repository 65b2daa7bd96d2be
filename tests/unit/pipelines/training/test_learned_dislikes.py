"""Dislikes lower an item's probability for similar users in both models, and data without dislikes is unaffected."""

import hashlib
import shutil
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

from models.catalogue import load_catalogue
from models.decoder.weights import load_decoder
from models.prompt import Prompt
from models.student import read_student
from pipelines.codes.options import CodesOptions
from pipelines.codes.tokenize import tokenize
from pipelines.runner.stage import silent
from pipelines.scoring.beams import decoder_scorer
from pipelines.scoring.metrics import Scorer
from pipelines.scoring.student import StudentScorer
from pipelines.tables.files import Frame
from pipelines.tables.reader import ItemTable
from pipelines.training.start.warm_start import Onward, WarmStart
from pipelines.training.train_decoder import TrainOptions, read_training, train
from pipelines.training.train_student import DistillOptions, Inputs, fit_and_save
from services.contracts.event_roles import parse_event_roles
from tests.support.training.synthetic import histories_from, raw_items, write_events
from tests.unit.pipelines.conftest import CPU, SMALL_DECODER, SMALL_STUDENT, checkpoints_in

LIKED, DISLIKED = 4, 3
T0 = datetime(2026, 1, 1, tzinfo=UTC)
LONGER = replace(SMALL_DECODER.fit, epochs=16, validate_every=16)
DECODER, STUDENT = replace(SMALL_DECODER, fit=LONGER), replace(SMALL_STUDENT, fit=LONGER)


def events(kind: str) -> pl.DataFrame:
    """Eighty users share items 0, 1, 2, then take one of two items; half first have a `kind` event with the first."""
    rng, rows = np.random.default_rng(0), []
    for user in range(80):
        own = rng.permutation(np.arange(6, 30))
        taken = LIKED if user % 4 else DISLIKED
        walk = [
            *((item, "click") for item in (*own[:2], 0, 1, 2)),
            (taken, "click"),
            *((item, "click") for item in own[2:4]),
        ]
        if user % 4 > 1:
            walk.insert(5, (DISLIKED, kind))
        rows += [
            (f"u{user:02d}", f"i{item:02d}", T0 + timedelta(seconds=n), name, 1.0)
            for n, (item, name) in enumerate(walk)
        ]
    columns = ["user_id", "item_id", "event_time", "event_type", "value"]
    return pl.DataFrame(rows, schema=columns, orient="row").sort("event_time", "user_id")


@dataclass(frozen=True)
class Learned:
    """Mean item probabilities of both models for similar users, and the hash of all weights."""

    decoder: np.ndarray
    student: np.ndarray
    digest: str


def learn(
    folder: Path,
    kind: str,
    codes: CodesOptions,
    decoder: TrainOptions = DECODER,
    student: DistillOptions = STUDENT,
    start: WarmStart | None = None,
) -> Learned:
    """Train both models on these events, and score new users with items 0, 1, 2."""
    ingested, tokens, out = folder / "ingest", folder / "tokens", folder / "out"
    for directory in (ingested, tokens, out):
        directory.mkdir(parents=True)
    torch.set_num_threads(1)
    ItemTable(Frame(raw_items(30), "items")).read_catalogue().write_parquet(ingested / "items.parquet")
    write_events(events(kind), ingested, parse_event_roles("[types.skip]\nrole = 'negative'\nweight = 0"))
    tokenize(ingested, histories_from(ingested), 1_000, tokens, codes)
    train(tokens, decoder, out, checkpoints_in(folder / "decoder"), CPU, silent, start)
    path = out / "student.safetensors"
    shutil.copyfile(tokens / "catalogue.parquet", out / "catalogue.parquet")
    saved = checkpoints_in(folder / "student")
    fit_and_save(Inputs(tokens, 1, CPU), out / "decoder", student, path, saved, silent, start)
    catalogue = load_catalogue(tokens / "catalogue.parquet")
    trained = load_decoder(out / "decoder", torch.float32, CPU)
    scorers: tuple[Scorer, ...] = (
        decoder_scorer(trained, catalogue, Prompt(decoder.max_items, decoder.stride)),
        StudentScorer(read_student(path)),
    )
    alike = [
        np.array([*pair, 0, 1, 2])
        for pair in np.random.default_rng(1).permuted(np.tile(np.arange(6, 30), (20, 1)), axis=1)[:, :2]
    ]
    shares = []
    for scorer in scorers:
        scores = np.stack(list(scorer(alike)))
        np.put_along_axis(scores, np.stack(alike), -np.inf, axis=1)  # seen items are not recommended
        shares.append(torch.from_numpy(scores).softmax(1).numpy().mean(0))
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(out.rglob("*.safetensors"))))
    return Learned(*shares, digest.hexdigest())


@pytest.mark.parametrize(
    ("depth", "decoder", "student"),
    [
        pytest.param(1, DECODER, STUDENT, id="depth 1", marks=pytest.mark.grid),
        pytest.param(
            1,
            replace(DECODER, sample_items=12),
            replace(STUDENT, sample_items=12),
            id="sampled",
            marks=pytest.mark.grid,
        ),
        pytest.param(2, DECODER, STUDENT, id="depth 2"),
        pytest.param(2, replace(DECODER, teacher_weight=0.5), STUDENT, id="with a teacher", marks=pytest.mark.grid),
    ],
)
def test_a_disliked_item_falls_for_users_alike_who_never_saw_it(
    depth: int, decoder: TrainOptions, student: DistillOptions, tmp_path: Path
) -> None:
    """With dislikes the item loses at least a fifth of its probability, and the alternative gains."""
    codes = CodesOptions(depth=depth)

    without, against = (learn(tmp_path / kind, kind, codes, decoder, student) for kind in ("skip", "dislike"))

    for before, after in ((without.decoder, against.decoder), (without.student, against.student)):
        assert after[DISLIKED] < 0.8 * before[DISLIKED]
        assert after[LIKED] > before[LIKED]


def test_weights_that_go_on_learning_learn_it_too(tmp_path: Path) -> None:
    """A warm start from models without the dislikes also lowers the item."""
    learn(tmp_path / "before", "skip", CodesOptions())
    start = WarmStart(tmp_path / "before" / "out", "before", Onward(epochs=0.25, rate=1.0, start_share=0.0))

    without, against = (learn(tmp_path / kind, kind, CodesOptions(), start=start) for kind in ("skip", "dislike"))

    assert read_training(tmp_path / "dislike" / "out")["started_from"] == "before"
    assert against.decoder[DISLIKED] < 0.9 * without.decoder[DISLIKED]
    assert against.student[DISLIKED] < 0.9 * without.student[DISLIKED]


def test_events_that_count_nothing_change_no_bit_of_the_weights(tmp_path: Path) -> None:
    """Negative events of weight 0 give the same weights as impressions in both models; dislikes do not."""
    few = replace(LONGER, epochs=2, validate_every=2)
    fitted = CodesOptions(depth=2), replace(DECODER, fit=few), replace(STUDENT, fit=few)

    learned = {kind: learn(tmp_path / kind, kind, *fitted) for kind in ("skip", "impression", "dislike")}

    assert learned["skip"].digest == learned["impression"].digest != learned["dislike"].digest
