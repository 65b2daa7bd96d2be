"""A training that starts from a bundle: weights follow their items, and a quarter of the epochs suffices."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from structlog.testing import capture_logs

from models.catalogue import Catalogue, load_catalogue
from models.decoder.weights import load_decoder
from models.student import read_student
from pipelines.data.examples import Split, read_cases
from pipelines.data.tokenize import tokenize
from pipelines.evaluation.metrics import ndcg, rank_labels
from pipelines.runner.stage import silent
from pipelines.training import distill, train
from pipelines.training.dense import DecoderScorer
from pipelines.training.distill import Inputs, StudentScorer, fit_and_save, new_student
from pipelines.training.train import TrainOptions, new_decoder
from pipelines.training.warm_start import WarmStart, shortened
from tests.support.training.synthetic import histories_from, write_ingested
from tests.unit.pipelines.conftest import CPU, QUICK, SMALL_DECODER, SMALL_STUDENT, Built, checkpoints_in


def with_a_first_item(catalogue: Catalogue) -> Catalogue:
    """Return the catalogue with a new item before all others, so that each old one has another index and token."""
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
    """An item whose index has moved keeps its weights, in decoder and student; every other weight is the bundle's."""
    bundle = built.optimized / "bundle"
    now, start = with_a_first_item(load_catalogue(bundle / "catalogue.parquet")), WarmStart(bundle, "v1")
    old = load_decoder(bundle / "decoder", torch.float32, CPU)
    decoder = new_decoder(now, SMALL_DECODER)
    student = new_student(now, decoder, SMALL_STUDENT)

    schedule = train.begin_warm(start, decoder, now, QUICK)
    distill.begin_warm(start, student, now, QUICK)

    before_VD, rows_VD = old.embedding.weight, decoder.embedding.weight
    items_VD = read_student(bundle / "student.safetensors").head_weight_VD
    assert (schedule.epochs, QUICK.epochs) == (2, 8)
    assert torch.equal(rows_VD[0], before_VD[0])
    assert torch.equal(rows_VD[2:], before_VD[1:])
    assert (rows_VD[1] - before_VD.mean(dim=0)).abs().max() < 0.1
    assert torch.equal(decoder.layers[0].q.weight, old.layers[0].q.weight)
    assert torch.equal(student.head_weight_VD[1:], items_VD)


def test_a_bundle_of_another_shape_is_refused_with_a_line_and_training_is_whole(built: Built) -> None:
    """A wider decoder cannot take the weights over: fresh ones and the whole schedule stay, and the log names the tensor."""
    catalogue = load_catalogue(built.optimized / "bundle" / "catalogue.parquet")
    wider = TrainOptions(hidden_size=32, num_heads=2, feed_forward=32, max_items=10)
    decoder, fresh = new_decoder(catalogue, wider), new_decoder(catalogue, wider)

    with capture_logs() as logged:
        schedule = train.begin_warm(WarmStart(built.optimized / "bundle", "v1"), decoder, catalogue, QUICK)

    assert schedule == QUICK
    assert torch.equal(decoder.embedding.weight, fresh.embedding.weight)
    assert "embedding.weight is (31, 16), and (31, 32) is wanted: full training" in logged[0]["why"]


def test_a_quarter_of_the_epochs_reaches_a_full_retraining(built: Built, tmp_path: Path) -> None:
    """More users have come: decoder and student from the bundle have at least 99 % of the NDCG of a whole new training."""
    ingested, tokens = write_ingested(tmp_path / "ingest", num_users=80), tmp_path / "tokens"
    tokens.mkdir()
    tokenize(ingested, histories_from(ingested), 1_000, tokens)
    catalogue, cases = load_catalogue(tokens / "catalogue.parquet"), read_cases(tokens, Split.TEST)
    found = []
    for start in (None, WarmStart(built.optimized / "bundle", "v1")):
        out = tmp_path / ("whole" if start is None else "warm")
        train.train(tokens, SMALL_DECODER, out, checkpoints_in(out / "saved"), CPU, silent, start)
        saved, path = checkpoints_in(out / "student"), out / "student.safetensors"
        fit_and_save(Inputs(tokens, 1, CPU), out / "decoder", SMALL_STUDENT, path, saved, silent, start)
        decoder = DecoderScorer(load_decoder(out / "decoder", torch.float32, CPU), catalogue, 10, 5)
        scorers = decoder, StudentScorer(read_student(path))
        found.append([ndcg(rank_labels(scorer, cases).masked, 10) for scorer in scorers])

    whole, warm = np.array(found)
    assert shortened(QUICK).epochs * 4 == QUICK.epochs
    assert (warm >= 0.99 * whole).all(), f"decoder and student: {warm} warm, {whole} whole"
