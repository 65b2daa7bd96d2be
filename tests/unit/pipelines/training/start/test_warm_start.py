"""Warm starts: weights follow their items, a quarter of the epochs, and averaging with the start."""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from structlog.testing import capture_logs

from models.catalogue import Catalogue, load_catalogue
from models.decoder.weights import load_decoder
from models.prompt import Prompt
from models.student import read_student
from pipelines.codes.embedding import read_texts
from pipelines.data.examples import Split, read_cases
from pipelines.runner.stage import silent
from pipelines.scoring.dense import DecoderScorer
from pipelines.scoring.metrics import ndcg, rank_labels
from pipelines.scoring.student import StudentScorer
from pipelines.training import train_decoder, train_student
from pipelines.training.fit.descent import Descent
from pipelines.training.start.text_rows import add_text
from pipelines.training.start.warm_start import NIGHTLY, WarmStart, last_whole_training, shortened
from pipelines.training.train_decoder import TrainOptions, new_decoder
from pipelines.training.train_student import Inputs, fit_and_save, new_student
from tests.support.training.bundles import live_store
from tests.support.training.synthetic import tokenized, write_ingested
from tests.unit.pipelines.conftest import CPU, QUICK, SMALL_DECODER, SMALL_STUDENT, Built, checkpoints_in


def with_a_first_item(catalogue: Catalogue) -> Catalogue:
    """Return the catalogue with a new first item, so each old item has another index and token."""
    num_items = len(catalogue.item_ids) + 1
    return replace(
        catalogue,
        item_ids=("a-new", *catalogue.item_ids),
        titles=("New", *catalogue.titles),
        categories=((), *catalogue.categories),
        codes=np.arange(num_items, dtype=np.int32).reshape(-1, 1),
        level_sizes=(num_items,),
        popularity=np.concatenate(([0.0], catalogue.popularity)),
    )


def test_rows_follow_their_items_and_a_new_item_starts_from_their_mean(built: Built) -> None:
    """Moved items keep their weights in decoder and student, and all other weights are the bundle's."""
    bundle = built.assembled / "bundle"
    now, start = with_a_first_item(load_catalogue(bundle / "catalogue.parquet")), WarmStart(bundle, "v1")
    old = load_decoder(bundle / "decoder", torch.float32, CPU)
    decoder = new_decoder(now, SMALL_DECODER)
    student = new_student(now, decoder, SMALL_STUDENT)

    begun = train_decoder.begin_warm(start, decoder, now, QUICK)
    train_student.begin_warm(start, student, now, QUICK)

    assert begun is not None
    before_VD, rows_VD = old.embedding.weight, decoder.embedding.weight
    items_VD = read_student(bundle / "student.safetensors").head_weight_VD
    assert (begun.options.epochs, QUICK.epochs) == (2, 8)
    assert torch.equal(rows_VD[0], before_VD[0])
    assert torch.equal(rows_VD[2:], before_VD[1:])
    assert (rows_VD[1] - before_VD.mean(dim=0)).abs().max() < 0.1
    assert torch.equal(decoder.layers[0].q.weight, old.layers[0].q.weight)
    assert torch.equal(student.head_weight_VD[1:], items_VD)


def test_a_bundle_of_another_shape_is_refused_with_a_line_and_training_is_whole(built: Built) -> None:
    """A decoder of another shape starts fresh with the full schedule, and the log names the tensor."""
    catalogue = load_catalogue(built.assembled / "bundle" / "catalogue.parquet")
    wider = TrainOptions(hidden_size=32, num_heads=2, feed_forward=32, max_items=10)
    decoder, fresh = new_decoder(catalogue, wider), new_decoder(catalogue, wider)

    with capture_logs() as logged:
        begun = train_decoder.begin_warm(WarmStart(built.assembled / "bundle", "v1"), decoder, catalogue, QUICK)

    assert begun is None
    assert torch.equal(decoder.embedding.weight, fresh.embedding.weight)
    assert "embedding.weight is (31, 16), and (31, 32) is wanted: full training" in logged[0]["why"]


@pytest.mark.parametrize(
    ("num_late", "items", "refused"),
    [(1, "i", None), (2, "i", "2.7%"), (0, "other-i", "100.0%")],
    ids=["few-new-events", "many-new-events", "other-data"],
)
def test_a_bundle_to_which_many_events_are_new_is_refused_with_a_line(
    built, tmp_path, num_late, items, refused
) -> None:
    """With too many new events or other items, the training is full."""
    newest, events = datetime(2026, 1, 1, tzinfo=UTC), tmp_path / "events.parquet"
    about = {"data": {"newest_event_us": int(newest.timestamp()) * 1_000_000}}
    store = live_store(tmp_path / "bundles", built.assembled / "bundle", "v1", about)
    times = [newest - timedelta(hours=hour) for hour in range(73)] + [newest + timedelta(seconds=1)] * num_late
    item_ids = [f"{items}{number % 30:02d}" for number in range(len(times))]
    pl.DataFrame({"item_id": item_ids, "event_time": times}).write_parquet(events)

    with capture_logs() as logged:
        start = last_whole_training(store, store.live(), events)

    why = f"{refused} of the events are new to v1, and a start keeps up with 2.5%: full training"
    assert [line["why"] for line in logged] == ([why] if refused else [])
    assert start == (None if refused else WarmStart(tmp_path / "bundles" / "v1", "v1"))


@pytest.mark.parametrize(
    ("text_size", "rows"), [(0, "embedding.weight"), (8, "embedding.parametrizations.weight.original")]
)
def test_the_result_is_half_way_between_start_and_end_and_new_rows_are_the_ends(built, text_size, rows) -> None:
    """The averaged weights move half way from the start, except for rows of new items."""
    bundle = built.assembled / "bundle"
    now = with_a_first_item(load_catalogue(bundle / "catalogue.parquet"))
    decoder = new_decoder(now, SMALL_DECODER)
    begun = train_decoder.begin_warm(WarmStart(bundle, "v1"), decoder, now, QUICK)
    assert begun is not None
    if text_size:
        add_text(decoder, now, ["New", *read_texts(built.trained.tokenized)], text_size)
    parameters = dict(decoder.named_parameters())
    starts = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    descent = Descent(decoder, QUICK.descent, begun.start_shares(decoder))

    for number, start in enumerate(starts.values()):
        descent.tensors()[f"average.{number}"].copy_(start + 1)
    with descent.averaged():
        moved = {name: parameter.detach() - starts[name] for name, parameter in parameters.items()}

    expected = {name: torch.full_like(start, 0.5) for name, start in starts.items()}
    expected[rows][1] = 1.0
    torch.testing.assert_close(moved, expected, atol=1e-5, rtol=0.0)
    assert all(torch.equal(parameter, starts[name]) for name, parameter in parameters.items())


@pytest.mark.parametrize(("text_size", "is_warm"), [(0, True), (8, False)], ids=["from a bundle", "with text"])
def test_a_killed_fit_goes_on_to_the_same_weights(built: Built, tmp_path: Path, text_size: int, is_warm: bool) -> None:
    """After a kill, the fit gives bitwise equal weights: start and text vectors are recreated, not saved."""

    def kill(done: int, _total: int, _words: str) -> None:
        if done == 1:
            raise KeyboardInterrupt

    options = replace(SMALL_DECODER, text_size=text_size, dropout=0.2)
    start = WarmStart(built.assembled / "bundle", "v1") if is_warm else None

    def fit(name: str, report: Callable[[int, int, str], None] = silent) -> None:
        saved = checkpoints_in(tmp_path / f"{name}-saved", every_s=0.0)
        train_decoder.train(built.trained.tokenized, options, tmp_path / name, saved, CPU, report, start)

    fit("whole")
    with pytest.raises(KeyboardInterrupt):
        fit("broken", kill)
    fit("broken")

    whole, broken = (load_decoder(tmp_path / name / "decoder", torch.float32, CPU) for name in ("whole", "broken"))
    assert all(torch.equal(tensor, broken.state_dict()[name]) for name, tensor in whole.state_dict().items())


def test_a_quarter_of_the_epochs_reaches_a_full_retraining(built: Built, tmp_path: Path) -> None:
    """With more users, a warm start reaches at least 99 % of a full training's NDCG in both models."""
    tokens = tokenized(write_ingested(tmp_path / "ingest", num_users=80), tmp_path / "tokens")
    catalogue, cases = load_catalogue(tokens / "catalogue.parquet"), read_cases(tokens, Split.TEST)
    scores = []
    for start in (None, WarmStart(built.assembled / "bundle", "v1")):
        out = tmp_path / ("whole" if start is None else "warm")
        train_decoder.train(tokens, SMALL_DECODER, out, checkpoints_in(out / "saved"), CPU, silent, start)
        saved, path = checkpoints_in(out / "student"), out / "student.safetensors"
        fit_and_save(Inputs(tokens, 1, CPU), out / "decoder", SMALL_STUDENT, path, saved, silent, start)
        decoder = DecoderScorer(load_decoder(out / "decoder", torch.float32, CPU), catalogue, Prompt(10, 5))
        scorers = decoder, StudentScorer(read_student(path))
        scores.append([ndcg(rank_labels(scorer, cases).masked, 10) for scorer in scorers])

    whole, warm = np.array(scores)
    assert shortened(QUICK, NIGHTLY).epochs * 4 == QUICK.epochs
    assert (warm >= 0.99 * whole).all(), f"decoder and student: {warm} warm, {whole} whole"
