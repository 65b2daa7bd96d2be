"""The offline flow from raw events to a live bundle, top to bottom.

    ingest -> features -> tokenize -> train -> distill -> evaluate -> gate -> optimize -> precompute -> publish

Each stage is skipped when its output for these inputs exists; what has an effect outside of its folder (the online store,
the live pointer) is done in any case, since that is cheap and the store may have been emptied in between.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
import torch
from rich.console import Console

from models.catalogue import load_catalogue
from models.registry import BundleStore
from pipelines.data import ingest, tokenize
from pipelines.evaluation import evaluate, gate
from pipelines.evaluation.gate import GateOptions
from pipelines.features import features, point_in_time
from pipelines.publication import optimize, precompute, publish
from pipelines.publication.precompute import PrecomputeOptions
from pipelines.runner.bars import Bars, metrics_table
from pipelines.runner.progress import Progress
from pipelines.runner.run_lock import turn
from pipelines.runner.stage import StageOutput, Stages, content_key
from pipelines.training import distill, train
from pipelines.training.distill import DistillOptions
from pipelines.training.train import TrainOptions
from services.errors import ConfigError
from services.features.repo import RepoAddress
from services.features.writer import FeatureWriter

STAGES = ("ingest", "features", "tokenize", "train", "distill", "evaluate", "gate", "optimize", "precompute", "publish")
ML_100K = "ml-100k"


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """What to build. `events` and `items` (both or none) replace the data set; `until` ends the flow after that stage."""

    dataset: str = ML_100K
    events: Path | None = None
    items: Path | None = None
    with_live_log: bool = True
    until: str = "publish"
    num_threads: int = 1
    """Threads of torch. One is far better than two where anything else runs, and gives the same weights everywhere."""
    train: TrainOptions = field(default_factory=TrainOptions)
    distill: DistillOptions = field(default_factory=DistillOptions)
    gate: GateOptions = field(default_factory=GateOptions)
    precompute: PrecomputeOptions = field(default_factory=PrecomputeOptions)

    def __post_init__(self) -> None:
        """Refuse what cannot be run. Raises ConfigError naming the option."""
        if self.dataset != ML_100K:
            raise ConfigError(
                f"--dataset: {self.dataset!r} is not known, only {ML_100K!r}; or give --events and --items"
            )
        if (self.events is None) != (self.items is None):
            raise ConfigError("--events and --items: give both or none")
        if self.until not in STAGES:
            raise ConfigError(f"--until: {self.until!r} is no stage; the stages are {', '.join(STAGES)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where things are: the values of settings.py that the pipeline uses."""

    state_dir: Path
    cache_dir: Path
    bundle_root: Path
    offline_log_dir: Path
    feature_repo: RepoAddress
    history_max_items: int
    keep_bundles: int

    @property
    def stages_dir(self) -> Path:
        """Where stage outputs are."""
        return self.state_dir / "pipeline"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a run gave. `evaluation` and `bundle_version` are None when the flow ended before them."""

    stages: tuple[StageOutput, ...]
    evaluation: dict[str, Any] | None = None
    bundle_version: str | None = None


def run_pipeline(options: PipelineOptions, places: Places, console: Console) -> Report:
    """Run the flow, show it on the console, and tell what came out. Raises DataError, StageFailed, EnvironmentFault, DependencyAway."""
    done: list[StageOutput] = []
    with turn(places.stages_dir, console), _threads(options.num_threads), Bars(console) as bars:
        for output in flow(options, places, bars):
            bars.end(output)
            done.append(output)
            if output.stage == options.until:
                break
    report = _report(done)
    for sentence in ingest.set_aside(done[0].path):
        console.print(sentence, markup=False)
    if report.evaluation is not None:
        console.print(metrics_table(report.evaluation))
    if report.bundle_version is not None:
        console.print(f"{report.bundle_version} is live")
    return report


def flow(options: PipelineOptions, places: Places, bars: Bars) -> Iterator[StageOutput]:
    """The whole story; yields after each stage."""
    stages = Stages(places.stages_dir)
    max_items = places.history_max_items
    prompt = {"max_items": options.train.max_items, "stride": options.train.stride}

    bars.begin("ingest")
    ingested = ingest_events(stages, options, places)
    yield ingested

    progress = bars.begin("features")
    key = features.key(ingested.key, max_items)
    tables = stages.run("features", key, lambda out: features.build_tables(ingested.path, max_items, out, progress))
    features.serve(tables.path, places.feature_repo, progress)
    yield tables

    bars.begin("tokenize")
    read_histories = partial(point_in_time.histories_as_of, places.feature_repo)
    key = content_key({"max_items": max_items}, [ingested.key, tables.key], [tokenize, point_in_time])
    tokenized = stages.run(
        "tokenize", key, lambda out: tokenize.tokenize(ingested.path, read_histories, max_items, out)
    )
    yield tokenized

    progress = bars.begin("train")
    key = content_key(asdict(options.train), [tokenized.key], [train])
    trained = stages.run("train", key, lambda out: train.train(tokenized.path, options.train, out, progress))
    decoder_dir = trained.path / "decoder"
    yield trained

    progress = bars.begin("distill")
    key = content_key(asdict(options.distill), [trained.key], [distill])
    distilled = stages.run(
        "distill", key, lambda out: distill.distill(tokenized.path, decoder_dir, options.distill, out, progress)
    )
    yield distilled

    progress = bars.begin("evaluate")
    judged = evaluate.Trained(tokenized.path, decoder_dir, distilled.path, **prompt)
    name = options.events.stem if options.events else options.dataset
    key = content_key({"name": name}, [distilled.key], [evaluate])
    evaluated = stages.run("evaluate", key, lambda out: evaluate.evaluate(judged, name, out, progress))
    yield evaluated

    bars.begin("gate")
    report = evaluate.read_report(evaluated.path)
    gate.check(report["metrics"], options.gate)
    yield StageOutput("gate", evaluated.key, evaluated.path, skipped=False, seconds=0.0)

    bars.begin("optimize")
    key = content_key(prompt, [evaluated.key], [optimize])
    now = datetime.now(UTC)
    optimized = stages.run("optimize", key, lambda out: optimize.optimize(judged, evaluated.path, now, out))
    bundle_dir, version = optimized.path / "bundle", (optimized.path / "version.txt").read_text()
    yield optimized

    progress = bars.begin("precompute")
    catalogue = load_catalogue(bundle_dir / "catalogue.parquet")
    ranking = precompute.Ranking(bundle_dir / "decoder", catalogue, version, **prompt)
    listed = list_for_busiest(stages, options.precompute, places, ingested, ranking, progress)
    yield listed

    bars.begin("publish")
    training = json.loads((trained.path / "training.json").read_text())
    about = publish.describe(report, training, prompt, catalogue.depth)
    store = BundleStore(places.bundle_root)
    bundle = publish.publish(store, bundle_dir, version, about)
    store.prune(places.keep_bundles)
    yield StageOutput("publish", version, bundle.path, skipped=False, seconds=0.0)


def ingest_events(stages: Stages, options: PipelineOptions, places: Places) -> StageOutput:
    """Run the stage `ingest` on the given tables and the live log."""
    log = ingest.live_log_files(places.offline_log_dir) if options.with_live_log else ()
    source = ingest.Source(options.events, options.items, log)
    return stages.run("ingest", ingest.key(source), lambda out: ingest.ingest(source, places.cache_dir, out))


def list_for_busiest(
    stages: Stages,
    options: PrecomputeOptions,
    places: Places,
    ingested: StageOutput,
    ranking: precompute.Ranking,
    progress: Progress,
) -> StageOutput:
    """Run the stage `precompute` for the busiest users of these events, and write their lists to the online store."""
    writer = FeatureWriter(places.feature_repo)
    users = precompute.busiest_users(pl.read_parquet(ingested.path / "events.parquet"), options.num_users)
    histories = list(writer.read_histories(users).values())
    key = precompute.key(ranking.bundle_version, histories, options)
    listed = stages.run(
        "precompute", key, lambda out: precompute.precompute(ranking, histories, options, out, progress)
    )
    writer.write_precomputed(precompute.read_rows(listed.path), time.time_ns() // 1_000)
    return listed


@contextmanager
def _threads(num_threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _report(done: list[StageOutput]) -> Report:
    by_stage = {output.stage: output for output in done}
    evaluated, published = by_stage.get("evaluate"), by_stage.get("publish")
    return Report(
        stages=tuple(done),
        evaluation=evaluate.read_report(evaluated.path) if evaluated else None,
        bundle_version=published.key if published else None,
    )
