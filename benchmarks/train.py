"""Training over workers: the losses of each layout beside one process's, what it takes, and what a killed rank changes.

    python -m benchmarks.train --json OUT [--tokenized FOLDER] [--recipes FILE] [--epochs N] [--layouts 1:ddp 2:ddp 2:fsdp 2:tp2] [--kills 2]

Data: what the last `tailrace pipeline` wrote to the state folder, or `--tokenized`; the decoder's recipe is the one that the pipeline takes for it. Each layout, WORKERS:PARALLEL, trains the
decoder from the same seed. `loss_difference` is the largest relative one of any epoch's mean loss from the first layout's. `seconds` include the start of the processes. At the end
the first layout of several workers trains again while ranks are killed (SIGKILL) at random epochs: `is_same` says whether all losses and weights are bit for bit those of the undisturbed run.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import MutableMapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog
import torch

from benchmarks.load.command import about_run, at_least_one, report_parser, write_report
from models.files import file_sha256
from pipelines.runner.stage import Progress, silent
from pipelines.training.fit.checkpoints import Checkpoints
from pipelines.training.recipes import choose, data_size, read_recipes
from pipelines.training.train_decoder import TrainOptions, read_training, train
from pipelines.training.workers.team import Team
from services.errors import TailraceError
from services.settings.settings import load_settings

_CPU = torch.device("cpu")
_DRAW = 7


def main() -> None:
    """Train in each layout, then among kills, and write the file."""
    options = _options()
    torch.set_num_threads(1)
    try:
        tokenized = options.tokenized or _newest(load_settings().state_dir / "pipeline" / "tokenize")
        size = data_size(tokenized)
        recipe = choose(read_recipes(options.recipes, epochs=options.epochs), size)
        options_of_decoder = replace(recipe.train, fit=replace(recipe.train.fit, validate_every=1))
        with tempfile.TemporaryDirectory() as scratch:
            rows = _rows(options.layouts, tokenized, options_of_decoder, Path(scratch))
            killed = _killed(options, tokenized, options_of_decoder, rows, Path(scratch))
    except TailraceError as error:
        sys.exit(f"error: {error}")
    about = {"recipe": recipe.name, "epochs": recipe.train.fit.epochs, "load_average": os.getloadavg()}
    write_report(options.json, about_run("train") | about | {"rows": rows, "killed": killed})


def _rows(layouts: list[Team], tokenized: Path, options: TrainOptions, scratch: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for team in layouts:
        row = _train(team, tokenized, options, scratch / f"{team.workers}-{team.parallel}", silent)
        first = rows[0]["losses"] if rows else row["losses"]
        row["loss_difference"] = max(abs(ours / one - 1) for ours, one in zip(row["losses"], first, strict=True))
        rows.append(row)
    return rows


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
        "weights_sha256": file_sha256(out / "decoder" / "model.safetensors"),
        **trained["speed"],
    }


def _killed(
    options: argparse.Namespace, tokenized: Path, recipe: TrainOptions, rows: list[dict[str, Any]], scratch: Path
) -> dict[str, Any] | None:
    """Train the first layout of several workers again, and kill a rank at random epochs."""
    team = next((team for team in options.layouts if team.workers > 1), None)
    if team is None or recipe.fit.epochs < 2 or not options.kills:
        return None
    (whole,) = [row for row in rows if (row["workers"], row["parallel"]) == (team.workers, team.parallel)]
    draw, pids, kills = random.Random(_DRAW), list[int](), list[str]()
    epochs = set(draw.sample(range(1, recipe.fit.epochs), min(options.kills, recipe.fit.epochs - 1)))

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
    return {"parallel": team.parallel, "kills": kills, "is_same": is_same, "seconds": row["seconds"]}


def _newest(folder: Path) -> Path:
    return max(folder.iterdir(), key=lambda path: path.stat().st_mtime)


def _layout(text: str) -> Team:
    workers, _, parallel = text.partition(":")
    try:
        return Team(workers=int(workers), parallel=parallel or "auto")
    except (ValueError, TailraceError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not WORKERS:PARALLEL such as 2:fsdp ({error})") from error


def _options() -> argparse.Namespace:
    parser = report_parser(__doc__ or "")
    parser.add_argument("--tokenized", type=Path)
    parser.add_argument("--recipes", type=Path)
    parser.add_argument("--epochs", type=at_least_one)
    parser.add_argument("--layouts", type=_layout, nargs="+", default=[_layout(text) for text in _LAYOUTS])
    parser.add_argument("--kills", type=int, default=2)
    return parser.parse_args()


_LAYOUTS = ("1:ddp", "2:ddp", "2:fsdp", "2:tp2")

if __name__ == "__main__":
    main()
