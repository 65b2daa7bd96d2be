"""Variants of a decoder of at least ten million parameters, against the engine's own int8.

The results are NDCG@10, milliseconds, tokens per second, and bytes.

    python -m benchmarks.variants --json OUT (--sequences FOLDER | --version VERSION) [--state FOLDER]
                                 [--dtype float32|bfloat16] [--recipes NAMES] [--budget ndcg=1%]

`--sequences` is a folder as benchmarks/quality/sequences.py describes it: the pipeline's stages make its examples,
train the decoder of ten_million.toml (5 minutes of one free core on Amazon Beauty), and publish it without a student in
the state folder's store. `--version` uses a published version instead.

`tailrace optimize` makes and measures the variants: each in the engine of its replica with one thread, on all test
users; times are processor time, with requests in turns. Differences of NDCG@10 are paired by user, with the 95 %
bootstrap interval. `accepted` names the variants that are 1.5 times as fast as int8 or have at most 60 % of its bytes,
and whose interval lies above -1 % of the parent's NDCG@10 and of int8's.
"""

import argparse
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.load.command import about_run, command_of, exit_on_errors, report_parser, write_report
from benchmarks.quality.own_store import with_own_store
from benchmarks.quality.sequences import as_tables
from infra.local.servers.store import feature_store
from models.bundle import Bundle
from models.registry import BundleStore
from pipelines.data.examples import read_split
from pipelines.optimize.children import read_num_parameters
from pipelines.optimize.choice import DEFAULT_BUDGET, parse_budget, relative_difference
from pipelines.optimize.optimize import Optimised, OptimizeOptions, optimize
from pipelines.optimize.recipes import chosen
from pipelines.options import PipelineOptions
from pipelines.places import Places
from pipelines.run import run_pipeline
from pipelines.training.recipes import choose, data_size, read_recipes
from pipelines.training.train_decoder import TrainOptions
from services.settings.settings import load_settings

RECIPES = Path(__file__).with_name("ten_million.toml")
OWN_INT8 = "int8"
_FASTER, _SMALLER, _LOSS = 1.5, 0.6, 0.01


def main() -> None:
    """Train the decoder unless a version is given, measure its variants, and write the file."""
    options = parse()
    console = Console(stderr=True)
    torch.set_num_threads(1)
    with exit_on_errors():
        settings = with_own_store(load_settings(), options.state)
        places, version = Places.from_settings(settings), options.version
        if version is None:
            with feature_store(settings, console.print):
                version = train(options.sequences, places, console).version
        wanted = OptimizeOptions(
            recipes=chosen(options.recipes),
            budget=parse_budget(options.budget),
            dtype=getattr(torch, options.dtype),
            command=command_of("variants"),
        )
        found = optimize(version, wanted, places, console)
        parent = BundleStore.of(places).open(version)
    write_report(options.json, about_run("variants") | {"dtype": options.dtype} | summarise(parent, found))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line. Invalid options end the program with a line that names them."""
    parser = report_parser(__doc__)
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--sequences", type=Path, metavar="FOLDER", help="sequences of items by user, in time order")
    given.add_argument("--version", help="a bundle in the state folder, instead of a training")
    parser.add_argument("--state", type=Path, metavar="FOLDER", help="folder of stage outputs, bundles and store")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the arithmetic")
    parser.add_argument("--recipes", default="", help="names of recipes, separated by commas; default: all")
    parser.add_argument("--budget", default=DEFAULT_BUDGET, help="share of NDCG@10 that a variant may lose")
    return parser.parse_args(arguments)


def train(sequences: Path, places: Places, console: Console) -> Bundle:
    """Run the pipeline's stages up to the decoder, and publish it."""
    events, items = as_tables(sequences, places.state_dir / "tables")
    recipes = read_recipes(RECIPES)
    options = PipelineOptions(events=events, items=items, with_live_log=False, recipes=recipes, until="train")
    report = run_pipeline(options, places, console)
    at = {stage.stage: stage.path for stage in report.stages}
    recipe = choose(recipes, data_size(at["tokenize"]))
    return publish_decoder(BundleStore.of(places), at["tokenize"], at["train"], recipe.train)


def publish_decoder(store: BundleStore, tokenized: Path, trained: Path, options: TrainOptions) -> Bundle:
    """Publish a trained decoder with its catalogue as a bundle without a student. It does not go live."""
    about = {
        "prompt": {"max_items": options.max_items, "stride": options.stride},
        "repeats": read_split(tokenized)["repeats"],
        "num_parameters": read_num_parameters(trained / "decoder"),
        "lineage": {"stages": {"tokenize": tokenized.name}, "options": {"recipe": {"train": asdict(options)}}},
    }
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "bundle"
        shutil.copytree(trained / "decoder", folder / "decoder")
        shutil.copyfile(tokenized / "catalogue.parquet", folder / "catalogue.parquet")
        return store.publish(folder, f"decoder-{tokenized.name}-{trained.name}", about)


def summarise(parent: Bundle, found: Optimised) -> dict[str, Any]:
    """Return the rows with ratios to the engine's own int8, and the names of the accepted variants."""
    rows, own = [], next(row for row in found.rows if row.name == OWN_INT8)
    for row in (found.parent, *found.rows):
        verdict = found.verdicts.get(row.name)
        rows.append(
            asdict(row)
            | {"wins": verdict is not None and verdict.wins, "why": verdict.why if verdict is not None else ""}
            | {
                "times_as_fast_as_int8": own.request_ms / row.request_ms,
                "share_of_int8_bytes": row.weight_bytes / own.weight_bytes,
            }
            | {"from_int8": _between(found, row.name, OWN_INT8)}
        )
    accepted = [
        row["name"]
        for row in rows
        if (row["times_as_fast_as_int8"] >= _FASTER or row["share_of_int8_bytes"] <= _SMALLER)
        and min(row["low"], row["from_int8"]["low"]) > -_LOSS
    ]
    about = {"num_parameters": parent.manifest["num_parameters"], "num_users": len(found.gains[OWN_INT8])}
    trained = {"epochs": parent.manifest["lineage"]["options"]["recipe"]["train"]["fit"]["epochs"]}
    return about | trained | {"rows": rows, "accepted": accepted, "qat_minus_ptq": _between(found, "int4-qat", "int4")}


def _between(found: Optimised, one: str, other: str) -> dict[str, float] | None:
    """Return the relative difference between two variants' NDCG@10; None if one of them was not made."""
    if not {one, other} <= found.gains.keys():
        return None
    difference, low, high = relative_difference(found.gains[one], found.gains[other])
    return {"difference": difference, "low": low, "high": high}


if __name__ == "__main__":
    main()
