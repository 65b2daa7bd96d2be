"""A run of the offline flow, from raw events to a live bundle, shown on a console.

`pipelines.stages` has the stages.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from pipelines.codes import tokenize
from pipelines.data import ingest
from pipelines.evaluation import code_depth, evaluate
from pipelines.evaluation.gain import describe_gain
from pipelines.foreign import measure
from pipelines.foreign.model import read_about
from pipelines.options import PipelineOptions
from pipelines.places import Places
from pipelines.publication import cold_start, model_card, refit
from pipelines.runner.bars import Bars, metrics_table
from pipelines.runner.remaining import FITS
from pipelines.runner.run_lock import run_lock
from pipelines.runner.stage import StageOutput
from pipelines.scoring.mixed import describe_sources
from pipelines.similarity import mix
from pipelines.stages import STAGES, ModelRun
from pipelines.training import recipes, train_decoder, train_student
from pipelines.training.planned_memory import describe_memory
from pipelines.training.reports import curves
from pipelines.wishes import make_reader
from services.errors import BundleWithdrawn, StageFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineReport:
    """The result of a run. `evaluation` and `bundle_version` are None if the flow ended before them."""

    stages: tuple[StageOutput, ...]
    evaluation: dict[str, Any] | None = None
    bundle_version: str | None = None


def run_pipeline(options: PipelineOptions, places: Places, console: Console) -> PipelineReport:
    """Run the flow and show it on the console, including rejections by the gate.

    Withdrawn bundles are not published again.

    Raises ConfigError if no Ray cluster is at `--ray`, DataError, StageFailed, BundleMoved if another version was
    promoted meanwhile, EnvironmentFault, DependencyUnavailable.
    """
    options.team.check_ray()
    for note in options.team.notes(os.cpu_count() or 1, torch.cuda.device_count()):
        console.print(note, markup=False)
    with run_lock(places.stages_dir, console):
        run = ModelRun(options=options, places=places)
        _ = run.given_codes  # refuses an unknown import, index or parent before the first stage
        try:
            with _threads(options.num_threads), Bars(console, planned_fits(run)) as bars:
                if left := run.store.rolled_back():
                    console.print(f"{left.describe()}: {run.live_version} is live, and is compared with", markup=False)
                for output in flow(run, bars):
                    bars.end(output)
                    if output.stage == "ingest":
                        _show_found(output.path, console)
                        _publish_first(run, output.path, console)
        except StageFailed as error:
            _show(run, console)
            for step in error.advice:
                console.print(step, markup=False)
            raise
        except BundleWithdrawn as error:
            _show(run, console)
            console.print(f"nothing new to publish, {run.store.live_version()} stays live: {error}", markup=False)
        else:
            _show(run, console)
        return _report(run)


def planned_fits(run: ModelRun) -> list[str]:
    """Return the names of the stages that will fit models."""
    names = [stage.name for stage in STAGES]
    done = STAGES[: names.index(run.options.until) + 1]
    return [stage.name for stage in done if stage.name in FITS and stage.is_in(run)]


def flow(run: ModelRun, bars: Bars) -> Iterator[StageOutput]:
    """Run the stages in order, up to the option `until`; yield after each."""
    for stage in STAGES:
        if stage.is_in(run):
            output = run.made[stage.name] = stage.make(run, bars.begin(stage.name))
            yield output
        if stage.name == run.options.until:
            return


def _show_found(ingested: Path, console: Console) -> None:
    """Print the findings on the data before hours of training."""
    sentences = (*ingest.describe_found(ingested), *ingest.set_aside(ingested))
    for sentence in (*sentences, *ingest.describe_future(ingested, datetime.now(UTC))):
        console.print(sentence, markup=False)


def _publish_first(run: ModelRun, ingested: Path, console: Console) -> None:
    """Publish a bundle of the ingested items if the run may and no bundle is live; the run then replaces it."""
    if not run.options.first_bundle or not run.publishes or run.live_version is not None:
        return
    first = cold_start.publish_ingested(run.store, ingested, run.options.data_name, datetime.now(UTC))
    run.live_version = first.version
    console.print(cold_start.describe(first), markup=False)


def _show(run: ModelRun, console: Console) -> None:
    """Print the findings of the stages after `ingest`."""
    folders = {name: output.path for name, output in run.made.items()}
    if "depth" in folders:
        console.print(code_depth.describe(folders["depth"]), markup=False)
    if "tokenize" in folders:
        for sentence in (*tokenize.describe_split(folders["tokenize"]), tokenize.describe_codes(folders["tokenize"])):
            console.print(sentence, markup=False)
        console.print(recipes.describe(run.recipe, run.size), markup=False)
    for sentence in tokenize.describe_left_out(folders["tokenize"]) if "tokenize" in folders else ():
        console.print(sentence, markup=False)
    if "import" in folders and (measured := read_about(folders["import"])["measured"]) is not None:
        for sentence in measure.describe(measured):
            console.print(sentence, markup=False)
    if "train" in folders:
        trained = train_decoder.read_training(folders["train"])
        console.print(curves.as_text(trained), markup=False)
        console.print(f"loss curves: {folders['train'] / curves.CURVES}", markup=False)
        memory = describe_memory(trained["speed"]["memory"])
        console.print(f"the decoder's training: {memory}", markup=False)
    if "distill" in folders:
        earned = train_student.read_earned(folders["distill"])
        console.print(train_student.describe_earned(earned), markup=False)
    if "evaluate" in folders:
        report = evaluate.read_report(folders["evaluate"])
        console.print(metrics_table(report))
        console.print(describe_sources(report["mixer"]), markup=False)
        console.print(describe_gain(report["gain"], run.options.llm_price_ndcg_per_ms), markup=False)
    if "refit" in folders:
        console.print(refit.describe(refit.read_found(folders["refit"])), markup=False)
    if "similar" in folders:
        console.print(mix.describe(mix.read_found(folders["similar"])), markup=False)
    if "wishes" in folders:
        console.print(make_reader.describe(make_reader.read_found(folders["wishes"])), markup=False)
    if "publish" in folders:
        console.print(f"report: {folders['publish'] / model_card.CARD}", markup=False)
        console.print(f"{run.made['publish'].key} is live")
    elif "gate" in folders and not run.publishes:
        where = folders["gate"] / evaluate.REPORT
        console.print(f"--split {run.split} publishes nothing; its report: {where}", markup=False)


def _report(run: ModelRun) -> PipelineReport:
    evaluated, published = run.made.get("evaluate"), run.made.get("publish")
    return PipelineReport(
        stages=tuple(run.made.values()),
        evaluation=evaluate.read_report(evaluated.path) if evaluated else None,
        bundle_version=published.key if published else None,
    )


@contextmanager
def _threads(num_threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
