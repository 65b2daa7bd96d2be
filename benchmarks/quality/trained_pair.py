"""A decoder and its student, trained into one folder with a bundle's file names, with the processor time of each."""

import json
import shutil
import time
from pathlib import Path

import torch
from rich.console import Console

from models.catalogue import load_catalogue
from models.decoder.weights import load_decoder
from models.prompt import Prompt
from models.student import read_student
from pipelines.runner.stage import Progress
from pipelines.scoring.beams import decoder_scorer
from pipelines.scoring.metrics import Scorer
from pipelines.scoring.student import StudentScorer
from pipelines.training.fit.checkpoints import Checkpoints
from pipelines.training.recipes import Recipe
from pipelines.training.start.warm_start import WarmStart
from pipelines.training.train_decoder import read_training, train
from pipelines.training.train_student import Inputs, fit_and_save
from services.errors import StageFailed

_TIMES = "cpu_s.json"
_CHECKPOINT_EVERY_S = 60.0


def fit_pair(tokenized: Path, recipe: Recipe, out: Path, console: Console, start: WarmStart | None = None) -> None:
    """Train both unless the folder has them. Raises StageFailed if the start model is refused."""
    if (out / _TIMES).exists():
        return
    shutil.rmtree(out, ignore_errors=True)
    device, began_s, show = torch.device("cpu"), time.process_time(), _shown_on(console, out.name)
    saved = Checkpoints(out / "saved" / "decoder", "train", _CHECKPOINT_EVERY_S)
    train(tokenized, recipe.train, out, saved, device, show, start)
    if start is not None and read_training(out)["started_from"] is None:
        raise StageFailed("train", f"the start from {start.version} was refused; the log says why")
    decoder_s = time.process_time() - began_s
    saved = Checkpoints(out / "saved" / "student", "distill", _CHECKPOINT_EVERY_S)
    inputs, path = Inputs(tokenized, 1, device), out / "student.safetensors"
    fit_and_save(inputs, out / "decoder", recipe.distill, path, saved, show, start)
    shutil.copyfile(tokenized / "catalogue.parquet", out / "catalogue.parquet")
    spent_s = {"decoder": decoder_s, "student": time.process_time() - began_s - decoder_s}
    (out / _TIMES).write_text(json.dumps(spent_s))


def scorers_of(out: Path, recipe: Recipe) -> dict[str, Scorer]:
    """Return rankers for the `decoder` and `student` that `fit_pair` wrote."""
    catalogue, decoder = load_catalogue(out / "catalogue.parquet"), load_decoder(out / "decoder", torch.float32, "cpu")
    return {
        "decoder": decoder_scorer(decoder, catalogue, Prompt(recipe.train.max_items, recipe.train.stride)),
        "student": StudentScorer(read_student(out / "student.safetensors")),
    }


def cpu_s_of(out: Path) -> dict[str, float]:
    """Return the processor time of each model's training."""
    spent_s: dict[str, float] = json.loads((out / _TIMES).read_text())
    return spent_s


def _shown_on(console: Console, what: str) -> Progress:
    def show(done: int, total: int, words: str) -> None:
        console.print(f"{what}: {done} of {total} epochs, {words}", markup=False)

    return show
