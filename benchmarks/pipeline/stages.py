"""One stage in this process, on what the stages before it wrote to the state folder of the settings: `main` prints what it took."""

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import polars as pl
import torch

from benchmarks.pipeline.tables import EVENTS, ITEMS, write_tables
from models.catalogue import load_catalogue
from models.decoder.weights import load_decoder
from models.student import save_student
from pipelines.codes import tokenize
from pipelines.data import ingest
from pipelines.evaluation import evaluate
from pipelines.evaluation.held_out import HeldOut
from pipelines.features import point_in_time, tables
from pipelines.options import PrecomputeOptions
from pipelines.publication import precompute
from pipelines.runner.stage import silent
from pipelines.training import recipes, train_decoder, train_student
from pipelines.training.fit.checkpoints import Checkpoints
from services.features.repo import RepoAddress
from services.features.writer import FeatureWriter
from services.settings.settings import Settings, load_settings

_CPU = torch.device("cpu")
_CHECKPOINT_EVERY_S = 60.0


def main() -> None:
    """Run the stage of the command line."""
    name, *sizes = sys.argv[1:]
    settings = load_settings()
    done = settings.state_dir / "stages"
    out = done / name
    out.mkdir(parents=True)
    torch.set_num_threads(1)
    began_s, began_cpu_s = time.perf_counter(), _cpu_s()
    if name == "tables":
        write_tables(out, *map(int, sizes))
    else:
        _STAGES[name](settings, done, out)
    seconds, cpu_s = time.perf_counter() - began_s, _cpu_s() - began_cpu_s
    rss_kb = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    speed = {"tokens_per_cpu_s": round(_TOKENS[name](out) / cpu_s)} if name in _TOKENS else {}
    print(json.dumps({"seconds": round(seconds, 2), "cpu_s": round(cpu_s, 2), "rss_mb": round(rss_kb / 1_024)} | speed))


def _cpu_s() -> float:
    """Return the processor's seconds of this process and of those that it started and that have ended."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def _ingest(_settings: Settings, done: Path, out: Path) -> None:
    raw = done / "tables"
    ingest.ingest(ingest.Source(raw / EVENTS, raw / ITEMS, ()), raw, out)


def _features(settings: Settings, done: Path, out: Path) -> None:
    tables.build_tables(done / "ingest", settings.history_max_items, out, silent)
    tables.serve(out, _address(settings), settings.offline_log_dir, silent)


def _tokenize(settings: Settings, done: Path, out: Path) -> None:
    read_histories = partial(point_in_time.histories_as_of, _address(settings))
    tokenize.tokenize(done / "ingest", read_histories, settings.history_max_items, out)


def _train(_settings: Settings, done: Path, out: Path) -> None:
    train_decoder.train(done / "tokenize", _recipe(done).train, out, _checkpoints(out), _CPU, silent)


def _distill(_settings: Settings, done: Path, out: Path) -> None:
    decoder = done / "train" / "decoder"
    train_student.distill(done / "tokenize", decoder, _recipe(done).distill, out, _checkpoints(out), _CPU, silent)


def _precompute(settings: Settings, done: Path, out: Path) -> None:
    options, writer = PrecomputeOptions(), FeatureWriter(_address(settings))
    users = precompute.busiest_users(pl.read_parquet(done / "ingest" / "events.parquet"), options.num_users)
    histories = list(writer.read_histories(users).values())
    catalogue = load_catalogue(done / "tokenize" / "catalogue.parquet")
    ranker = precompute.BatchRanker(done / "train" / "decoder", catalogue, "v", repeats=False, **_recipe(done).prompt)
    precompute.precompute(ranker, histories, options, out, silent)


def _evaluate(_settings: Settings, done: Path, out: Path) -> None:
    tokenized, decoder, recipe = done / "tokenize", done / "train" / "decoder", _recipe(done)
    catalogue, teacher = load_catalogue(tokenized / "catalogue.parquet"), load_decoder(decoder, torch.float32, _CPU)
    student = train_student.new_student(catalogue, teacher, recipe.distill)
    for name in ("student", "twin"):
        save_student(student, out / f"{name}.safetensors")
    models = evaluate.Trained(tokenized, decoder, out, repeats=False, device=_CPU, **recipe.prompt)
    evaluate.evaluate(models, HeldOut(tokenized, done, "benchmarks.pipeline"), "synthetic", out, silent)


_STAGES: dict[str, Callable[[Settings, Path, Path], None]] = {
    "ingest": _ingest,
    "features": _features,
    "tokenize": _tokenize,
    "train": _train,
    "precompute": _precompute,
    "evaluate": _evaluate,
    "distill": _distill,
}


def _decoder_tokens(out: Path) -> int:
    return int(train_decoder.read_training(out)["num_tokens"])


def _student_tokens(out: Path) -> int:
    """Return those of the student and of its twin, which is trained where there is a teacher."""
    fits = json.loads((out / "distillation.json").read_text())
    return int(fits["student"]["num_tokens"] + (fits["options"]["teacher_weight"] > 0) * fits["twin"]["num_tokens"])


_TOKENS = {"train": _decoder_tokens, "distill": _student_tokens}


def _recipe(done: Path) -> recipes.Recipe:
    """Return the shipped recipe for this data, with one epoch."""
    return recipes.choose(recipes.read_recipes(epochs=1, student_epochs=1), recipes.data_size(done / "tokenize"))


def _checkpoints(out: Path) -> Checkpoints:
    return Checkpoints(out / "checkpoints", out.name, _CHECKPOINT_EVERY_S)


def _address(settings: Settings) -> RepoAddress:
    return RepoAddress(settings.feature_repo_dir, settings.redis_address)
