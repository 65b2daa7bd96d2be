"""The stages from tokens to an assembled bundle, run once on a synthetic data set."""

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

from models.catalogue import load_catalogue
from models.decoder.weights import load_decoder
from models.prompt import Prompt
from pipelines.codes.options import CodesOptions
from pipelines.data.examples import Split, read_cases
from pipelines.evaluation.evaluate import EvaluatedModels, evaluate, model_probabilities
from pipelines.evaluation.held_out import HeldOut
from pipelines.publication.bundle import assemble
from pipelines.runner.stage import silent
from pipelines.scoring.beams import decoder_scorer
from pipelines.scoring.metrics import ndcg, rank_labels
from pipelines.similarity.sources import make_serving, make_sources
from pipelines.training.fit.checkpoints import Checkpoints
from pipelines.training.fit.descent import DescentOptions
from pipelines.training.fit.fitting import FitOptions
from pipelines.training.train_decoder import TrainOptions, train
from pipelines.training.train_student import DistillOptions, Inputs, choose_student, fit_and_save, without_targets
from pipelines.wishes.make_reader import make_reader
from tests.support.training.synthetic import tokenized, write_ingested

MADE_AT = datetime(2026, 11, 21, 12, tzinfo=UTC)
QUICK = FitOptions(
    epochs=8,
    validate_every=4,
    descent=DescentOptions(learning_rate=2e-2, weight_decay=0.0, warm_up=0.1, average=0.9),
)
SMALL_DECODER = TrainOptions(
    hidden_size=16, feed_forward=32, max_items=10, stride=5, max_batch_tokens=128, dropout=0.0, fit=QUICK
)
SMALL_STUDENT = DistillOptions(
    hidden_size=16, feed_forward=16, max_items=10, max_batch_tokens=128, dropout=0.0, fit=QUICK
)


DROPPED_DECODER, DROPPED_STUDENT = replace(SMALL_DECODER, dropout=0.2), replace(SMALL_STUDENT, dropout=0.2)
CPU, DEPTH_1 = torch.device("cpu"), CodesOptions()


def checkpoints_in(folder: Path, every_s: float = 60.0) -> Checkpoints:
    return Checkpoints(folder, "train", every_s)


def ndcg_of(decoder_dir: Path, tokens: Path) -> float:
    """Return the NDCG@10 of a saved decoder on the test labels."""
    decoder = load_decoder(decoder_dir, torch.float32, CPU)
    scorer = decoder_scorer(decoder, load_catalogue(tokens / "catalogue.parquet"), Prompt(SMALL_DECODER.max_items, 5))
    return ndcg(rank_labels(scorer, read_cases(tokens, Split.TEST)).masked, 10)


@dataclass(frozen=True)
class Built:
    """The folder of each stage."""

    trained: EvaluatedModels
    evaluated: Path
    similar: Path
    wishes: Path
    assembled: Path


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return learn_the_ring(tmp_path_factory.mktemp("built"), SMALL_DECODER)


def learn_the_ring(root: Path, options: TrainOptions, codes: CodesOptions = DEPTH_1) -> Built:
    """Run the stages in folders below `root`, training student and twin in this process."""
    folders = [
        root / name for name in ("tokens", "train", "distill", "sources", "evaluate", "similar", "wishes", "assemble")
    ]
    for folder in folders:
        folder.mkdir()
    tokens, trained_dir, students, sources, evaluated, similar, wishes, assembled = folders
    tokenized(write_ingested(root / "ingest"), tokens, codes)
    torch.set_num_threads(1)
    train(tokens, options, trained_dir, checkpoints_in(root / "saved"), CPU, silent)
    fitted = []
    for name, options in (("student", SMALL_STUDENT), ("twin", without_targets(SMALL_STUDENT))):
        saved, path = checkpoints_in(root / "saved").of(name), students / f"{name}.safetensors"
        fitted.append(fit_and_save(Inputs(tokens, 1, CPU), trained_dir / "decoder", options, path, saved))
    choose_student(tokens, SMALL_STUDENT, students, *fitted)
    trained = EvaluatedModels(tokens, trained_dir / "decoder", students, SMALL_DECODER.max_items, SMALL_DECODER.stride)
    make_sources(tokens, students, model_probabilities(trained), sources, silent, repeats=False)
    evaluate(trained, HeldOut(tokens, root, "tailrace pipeline"), "ring", evaluated, silent, sources)
    make_serving(sources, tokens, students, similar)
    make_reader(tokens, sources, model_probabilities(trained)["student"], None, wishes, silent)
    assemble(trained, evaluated, similar, wishes, MADE_AT, assembled)
    return Built(trained, evaluated, similar, wishes, assembled)
