"""Distributed training: losses of each layout against one process, cost, and the effect of killed ranks.

    python -m benchmarks.train --json OUT [--only layouts kills gradients] [--tokenized FOLDER] [--epochs N]

Data: the output of the last `tailrace pipeline` in the state folder, or `--tokenized`, with the recipe that the
pipeline would use. Parts that `--only` omits stay in the file unchanged.

layouts    each layout trains the decoder from the same seed. `loss_difference` is the largest relative difference of an
epoch's
           mean loss from the first layout's. `seconds` include the start of the processes
kills      the first layout of several workers again while ranks are killed (SIGKILL) at random epochs: `is_same` says
whether
           all losses and weights equal the undisturbed run's bit for bit
gradients  two workers with DDP: other bucket sizes, and other data types in gradient reduction
"""

import argparse
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, MutableMapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog
import torch

from benchmarks.load.command import (
    about_run,
    at_least_one,
    command_of,
    exit_on_errors,
    newest_tokens,
    report_parser,
    write_report,
)
from models.decoder.weights import load_decoder
from pipelines.runner.stage import Progress, silent
from pipelines.training.fit.checkpoints import Checkpoints
from pipelines.training.recipes import choose, data_size, read_recipes
from pipelines.training.train_decoder import TrainOptions, read_training, train
from pipelines.training.workers.team import Team
from services.settings.settings import load_settings

Rows = Iterator[dict[str, Any]]
_CPU = torch.device("cpu")
_DRAW = 7


def main() -> None:
    """Measure the parts that are asked for, and write the file after each row."""
    options = _options()
    torch.set_num_threads(1)
    report = json.loads(options.json.read_text()) if options.json.exists() else {}
    parts: dict[str, Any] = report.get("parts", {})
    with exit_on_errors():
        tokenized = options.tokenized or newest_tokens(load_settings().state_dir)
        recipe = choose(read_recipes(epochs=options.epochs), data_size(tokenized))
        of_decoder = replace(recipe.train, fit=replace(recipe.train.fit, validate_every=1))
        for name in options.only:
            about = {"command": command_of("train"), "recipe": recipe.name, "epochs": recipe.train.fit.epochs}
            rows: list[dict[str, Any]] = []
            with tempfile.TemporaryDirectory() as scratch:
                for row in _PARTS[name](options, tokenized, of_decoder, Path(scratch)):
                    rows.append(row | _compared(row, rows))
                    parts[name] = about | {"load_average": os.getloadavg(), "rows": rows}
                    write_report(options.json, about_run("train") | {"parts": parts})


def _layouts(options: argparse.Namespace, tokenized: Path, recipe: TrainOptions, scratch: Path) -> Rows:
    for index, team in enumerate(_LAYOUTS):
        yield _train(team, tokenized, recipe, scratch / str(index), silent)


def _gradients(_options: argparse.Namespace, tokenized: Path, recipe: TrainOptions, scratch: Path) -> Rows:
    for index, given in enumerate(_GRADIENTS):
        team = Team(workers=2, parallel="ddp", **given)
        yield given | _train(team, tokenized, recipe, scratch / str(index), silent)


def _compared(row: dict[str, Any], before: list[dict[str, Any]]) -> dict[str, float]:
    """Return the difference of a row's losses from its part's first row, if it has any."""
    if "losses" not in row:  # of kills
        return {}
    first = [*before, row][0]["losses"]
    return {"loss_difference": max(abs(ours / loss - 1) for ours, loss in zip(row["losses"], first, strict=True))}


def _train(
    team: Team, tokenized: Path, options: TrainOptions, out: Path, progress: Progress, checkpoint_every_s: float = 60.0
) -> dict[str, Any]:
    out.mkdir()
    began_s = time.perf_counter()
    train(tokenized, options, out, Checkpoints(out / "saved", "train", checkpoint_every_s), _CPU, progress, team=team)
    seconds = time.perf_counter() - began_s
    trained = read_training(out)
    print(f"{team.workers} x {team.parallel}: {seconds:.0f} s", file=sys.stderr)
    return {
        "workers": team.workers,
        "parallel": team.parallel,
        "seconds": round(seconds, 1),
        "losses": [point["loss"] for point in trained["curve"]],
        "validation_ndcg10": [point["validation"] for point in trained["curve"]],
        "weights_sha256": _hash_of(out / "decoder"),
        **trained["speed"],
    }


def _killed(options: argparse.Namespace, tokenized: Path, recipe: TrainOptions, scratch: Path) -> Rows:
    """Train the first layout of several workers twice, once while ranks are killed at random epochs."""
    team = _LAYOUTS[1]
    if recipe.fit.epochs < 2:
        return
    whole = _train(team, tokenized, recipe, scratch / "whole", silent)
    draw, pids, kills = random.Random(_DRAW), list[int](), list[str]()
    epochs = set(draw.sample(range(1, recipe.fit.epochs), min(_KILLS, recipe.fit.epochs - 1)))

    def note(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        if event["event"] == "worker_started":
            pids.append(event["pid"])
        raise structlog.DropEvent

    def kill(epoch: int, _total: int, _words: str) -> None:
        if epoch in epochs:
            epochs.remove(epoch)
            rank = draw.randrange(team.workers)
            kills.append(f"rank {rank} after epoch {epoch}")
            os.kill(pids[-team.workers :][rank], signal.SIGKILL)

    structlog.configure(processors=[note])
    row = _train(team, tokenized, recipe, scratch / "killed", kill, 1.0)
    is_same = all(row[name] == whole[name] for name in ("losses", "weights_sha256"))
    yield {"parallel": team.parallel, "kills": kills, "is_same": is_same, "seconds": row["seconds"]}


def _hash_of(folder: Path) -> str:
    """Return a hash of a decoder's weights, across all its files."""
    decoder, digest = load_decoder(folder, torch.float32, "cpu"), hashlib.sha256()
    for tensor in decoder.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def _options() -> argparse.Namespace:
    parser = report_parser(__doc__ or "")
    parser.add_argument("--tokenized", type=Path)
    parser.add_argument("--epochs", type=at_least_one)
    parser.add_argument("--only", choices=list(_PARTS), nargs="+", default=list(_PARTS))
    return parser.parse_args()


_LAYOUTS = (
    Team(parallel="ddp"),
    *(Team(workers=2, parallel=layout) for layout in ("ddp", "fsdp", "tp2", "pp2")),
)
_KILLS = 2
_GRADIENTS: tuple[dict[str, Any], ...] = (
    {},
    {"bucket_mb": 0.1},
    {"compression": "fp16"},
    {"compression": "powersgd"},
)
_PARTS = {"layouts": _layouts, "kills": _killed, "gradients": _gradients}

if __name__ == "__main__":
    main()
