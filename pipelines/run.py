"""The offline flow from raw events to a live bundle, top to bottom.

    ingest -> features -> tokenize -> train -> distill -> evaluate -> gate -> refit -> optimize -> precompute -> publish

Each stage is skipped when its output for these inputs exists; what has an effect outside of its folder (the online store,
the live pointer) is done in any case, since that is cheap and the store may have been emptied in between. A run with the global time split ends after the gate.
Where codes of two depths are possible, the stage `depth` before `tokenize` trains a decoder of each and takes the one that validates better.
"""

import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
import psutil
import structlog
import torch
from rich.console import Console

from models.catalogue import load_catalogue
from models.files import file_sha256
from models.registry import Bundle, BundleStore
from pipelines.codes import reuse, tokenize
from pipelines.codes.options import CodesOptions
from pipelines.data import ingest
from pipelines.data.examples import SplitKind
from pipelines.evaluation import code_depth, evaluate, gate
from pipelines.evaluation.gain import describe_gain
from pipelines.evaluation.held_out import HeldOut
from pipelines.features import point_in_time, tables
from pipelines.options import PipelineOptions, Places
from pipelines.publication import bundle, model_card, precompute, refit
from pipelines.publication.judge import Judgement, judge
from pipelines.publication.live import live_of
from pipelines.runner.bars import Bars, metrics_table
from pipelines.runner.run_lock import run_lock
from pipelines.runner.stage import Progress, StageCache, StageOutput, content_key
from pipelines.training import recipes, train_decoder, train_student
from pipelines.training.fit.checkpoints import Checkpoints
from pipelines.training.fit.device import choose_device
from pipelines.training.start import from_text_checkpoint
from pipelines.training.start.warm_start import last_whole_training, verified_live
from services.errors import BundleWithdrawn, StageFailed
from services.features.writer import FeatureWriter

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineReport:
    """The result of a run. `evaluation` and `bundle_version` are None when the flow ended before them."""

    stages: tuple[StageOutput, ...]
    evaluation: dict[str, Any] | None = None
    bundle_version: str | None = None


def run_pipeline(options: PipelineOptions, places: Places, console: Console) -> PipelineReport:
    """Run the flow and show it on the console, also what the gate refuses. What was withdrawn is not published again.

    Raises DataError, StageFailed, BundleMoved where another version went live meanwhile, EnvironmentFault, DependencyUnavailable.
    """
    done: list[StageOutput] = []
    store = BundleStore(places.bundle_root)
    try:
        with run_lock(places.stages_dir, console), _threads(options.num_threads), Bars(console) as bars:
            if left := store.rolled_back():
                console.print(f"{left.describe()}: {store.live_version()} is live, and is compared with", markup=False)
            for output in flow(options, places, bars):
                bars.end(output)
                done.append(output)
                if output.stage == "ingest":
                    _show_found(output.path, console)
                if output.stage == options.until:
                    break
    except StageFailed as error:
        if done:
            _show(done, options, console)
        for step in error.advice:
            console.print(step, markup=False)
        raise
    except BundleWithdrawn as error:
        found = _show(done, options, console)
        console.print(f"nothing new to publish, {store.live_version()} stays live: {error}", markup=False)
        return found
    return _show(done, options, console)


def _show_found(ingested: Path, console: Console) -> None:
    """Print what was found in the data, before hours of training on it."""
    found = (*ingest.describe_found(ingested), *ingest.set_aside(ingested))
    for sentence in (*found, *ingest.describe_future(ingested, datetime.now(UTC))):
        console.print(sentence, markup=False)


def _show(done: list[StageOutput], options: PipelineOptions, console: Console) -> PipelineReport:
    """Print what the stages after `ingest` found, and return the report."""
    report = _report(done)
    for output in done:
        if output.stage == "depth":
            console.print(code_depth.describe(output.path), markup=False)
        elif output.stage == "tokenize":
            for sentence in (*tokenize.describe_split(output.path), tokenize.describe_codes(output.path)):
                console.print(sentence, markup=False)
            size = recipes.data_size(output.path)
            console.print(recipes.describe(recipes.choose(options.recipes, size), size), markup=False)
        elif output.stage == "distill":
            console.print(train_student.describe_earned(train_student.read_earned(output.path)), markup=False)
    if report.evaluation is not None:
        console.print(metrics_table(report.evaluation))
        console.print(describe_gain(report.evaluation["gain"], options.llm_price_ndcg_per_ms), markup=False)
    for output in done:
        if output.stage == "refit":
            console.print(refit.describe(refit.read_found(output.path)), markup=False)
    if report.bundle_version is not None:
        console.print(f"report: {done[-1].path / model_card.CARD}", markup=False)
        console.print(f"{report.bundle_version} is live")
    elif options.split == SplitKind.GLOBAL_TIME and report.evaluation is not None:
        where = done[-1].path / evaluate.REPORT
        console.print(f"--split {options.split} publishes nothing; its report: {where}", markup=False)
    return report


def flow(options: PipelineOptions, places: Places, bars: Bars) -> Iterator[StageOutput]:
    """Run all stages in order; yields after each."""
    stages, store = StageCache(places.stages_dir), BundleStore(places.bundle_root)
    max_items = places.history_max_items
    seen = store.live_version()

    bars.begin("ingest")
    ingested = ingest_events(stages, options, places)
    yield ingested
    live = live_of(store, seen, ingested, options, _command())

    progress = bars.begin("features")
    key = tables.key(ingested.key, max_items)
    built = stages.run(
        "features",
        key,
        lambda out: tables.build_tables(ingested.path, max_items, out, progress, places.event_roles),
    )
    tables.serve(built.path, places.feature_repo, places.offline_log_dir, progress)
    yield built

    read_histories = partial(point_in_time.histories_as_of, places.feature_repo)
    live_before = verified_live(store) if options.warm_start and (live or not seen) else None
    start = last_whole_training(store, live_before, ingested.path / "events.parquet") if live_before else None
    kept = reuse.kept_codes(live_before.path) if live_before else None  # whether or not its weights are
    split, device = SplitKind(options.split), choose_device(options.device)

    def encode(codes: CodesOptions) -> StageOutput:
        parameters = {"max_items": max_items, "kept": kept.key if kept else None, "split": split} | asdict(codes)
        key = content_key(parameters, [ingested.key, built.key], [tokenize, point_in_time])
        return stages.run(
            "tokenize",
            key,
            lambda out: tokenize.tokenize(ingested.path, read_histories, max_items, out, codes, kept, split),
        )

    def fit(tokenized: StageOutput, recipe: recipes.Recipe, progress: Progress) -> StageOutput:
        chosen = {"device": device.type, "started_from": start.version if start else None}
        checkpoint = from_text_checkpoint.checkpoint_hash(recipe.train.text_start)
        key = content_key(chosen | asdict(recipe.train), [tokenized.key, checkpoint], [train_decoder])
        saved = Checkpoints(stages.checkpoint_dir("train", key), "train", options.checkpoint_every_s)
        return stages.run(
            "train",
            key,
            lambda out: train_decoder.train(
                tokenized.path, recipe.train, out, saved, device, progress, start, team=options.team
            ),
        )

    num_items = pl.scan_parquet(ingested.path / "items.parquet").select(pl.len()).collect().item()
    depth, *others = _depths(options, num_items, live_before)
    if others:
        by_depth = _compare_depths(stages, options, (depth, *others), encode, fit, bars.begin("depth"))
        yield by_depth
        depth = code_depth.read_comparison(by_depth.path)["depth"]
    is_default = not others and depth == options.codes.depth_for(num_items)
    codes = options.codes if is_default else replace(options.codes, depth=depth)

    bars.begin("tokenize")
    tokenized = encode(codes)
    yield tokenized

    size = recipes.data_size(tokenized.path)
    recipe, repeats = recipes.choose(options.recipes, size), size.repeats
    trained = fit(tokenized, recipe, bars.begin("train"))
    decoder_dir = trained.path / "decoder"
    yield trained

    progress = bars.begin("distill")
    key = content_key(asdict(recipe.distill), [trained.key], [train_student])
    both = Checkpoints(stages.checkpoint_dir("distill", key), "distill", options.checkpoint_every_s)
    distilled = stages.run(
        "distill",
        key,
        lambda out: train_student.distill(
            tokenized.path, decoder_dir, recipe.distill, out, both, device, progress, start, options.team
        ),
    )
    yield distilled

    progress = bars.begin("evaluate")
    models = evaluate.Trained(
        tokenized.path, decoder_dir, distilled.path, repeats=repeats, device=device, **recipe.prompt
    )
    name = options.data_name
    key = content_key({"name": name, "repeats": repeats}, [distilled.key], [evaluate])
    held_out = HeldOut(tokenized.path, places.stages_dir, _command())
    evaluated = stages.run("evaluate", key, lambda out: evaluate.evaluate(models, held_out, name, out, progress))
    yield evaluated

    bars.begin("gate")
    made_by = [ingested, built, tokenized, trained, distilled, evaluated]
    compared = live if split == SplitKind.LEAVE_ONE_OUT else None  # it learned from what is after the cut
    judged = judge(models, held_out, evaluated, ingested.path, store, compared, options)
    if judged.problems and not options.force:
        _refuse(stages, _manifest(made_by, judged, held_out, recipe, options), judged, evaluated, options)
    if judged.forced:
        log.warning("gate_forced", problems=judged.forced)
    yield StageOutput("gate", evaluated.key, evaluated.path, skipped=False, seconds=0.0)
    if split == SplitKind.GLOBAL_TIME:
        return

    serving = models
    if options.refit:
        refitted = _refit(stages, models, recipe, distilled, options, bars.begin("refit"))
        yield refitted
        refit.refuse(refit.read_found(refitted.path))
        serving = refit.serving_pair(models, refitted.path)
        made_by.append(refitted)

    bars.begin("optimize")
    made = recipe.prompt | judged.key() | {"llm_price": options.llm_price_ndcg_per_ms}
    key = content_key(made, [made_by[-1].key], [bundle])
    now, beside = datetime.now(UTC), models if options.refit else None
    optimized = stages.run("optimize", key, lambda out: bundle.optimize(serving, evaluated.path, now, out, beside))
    bundle_dir, version = optimized.path / "bundle", (optimized.path / "version.txt").read_text()
    yield optimized
    if not options.force:
        store.refuse_withdrawn(version, bundle_dir)

    progress = bars.begin("precompute")
    catalogue = load_catalogue(bundle_dir / "catalogue.parquet")
    ranker = precompute.BatchRanker(bundle_dir / "decoder", catalogue, version, repeats=repeats, **recipe.prompt)
    yield store_lists(stages, options, places, ingested, ranker, progress)

    bars.begin("publish")
    finished = evaluate.read_report(bundle_dir)
    manifest = _manifest([*made_by, optimized], judged, held_out, recipe, options)
    manifest |= {name: finished[name] for name in ("student_serving", "refit")}
    card = model_card.render(version, manifest, finished)
    pages = {model_card.CARD: card}
    published = bundle.publish(store, bundle_dir, version, manifest, pages, seen, force=options.force)
    if options.replace_live and judged.reference is None:  # what was replaced can measure nothing of this data
        store.set_reference(version, "tailrace pipeline --replace-live")
    store.prune(places.keep_bundles)
    FeatureWriter(places.feature_repo).remove_precomputed(store.versions())
    yield StageOutput("publish", version, published.path, skipped=False, seconds=0.0)


def _depths(options: PipelineOptions, num_items: int, live_before: Bundle | None) -> tuple[int, ...]:
    """Return the depths of codes between which validation decides, or the only one. A warm start keeps the depth that it starts from."""
    if live_before is not None and options.codes.depth is None:
        return (load_catalogue(live_before.path / "catalogue.parquet").depth,)
    widest = max(recipe.train.hidden_size for recipe in options.recipes)
    return options.codes.depths_to_compare(num_items, widest, psutil.virtual_memory().available)


def _compare_depths(
    stages: StageCache,
    options: PipelineOptions,
    depths: Sequence[int],
    encode: Callable[[CodesOptions], StageOutput],
    fit: Callable[[StageOutput, recipes.Recipe, Progress], StageOutput],
    progress: Progress,
) -> StageOutput:
    """Run the stage `depth`: tokenize and train at each depth, which the stages of these names then find done, and compare on validation."""
    candidates, keys, repeats = {}, [], False
    for depth in depths:
        tokenized = encode(replace(options.codes, depth=depth))
        size = recipes.data_size(tokenized.path)
        recipe, repeats = recipes.choose(options.recipes, size), size.repeats
        trained = fit(tokenized, recipe, progress)
        keys.append(trained.key)
        candidates[depth] = code_depth.Candidate(
            tokenized=tokenized.path, decoder_dir=trained.path / "decoder", **recipe.prompt
        )
    device = choose_device(options.device)
    return stages.run(
        "depth",
        content_key({}, keys, [code_depth]),
        lambda out: code_depth.compare(candidates, repeats=repeats, device=device, out=out),
    )


def _manifest(
    made_by: Sequence[StageOutput],
    judged: Judgement,
    held_out: HeldOut,
    recipe: recipes.Recipe,
    options: PipelineOptions,
) -> dict[str, Any]:
    """Return a bundle's manifest without its version, its hashes and how its student serves. `made_by` are the stages so far."""
    folders = {output.stage: output.path for output in made_by}
    report, training = evaluate.read_report(folders["evaluate"]), train_decoder.read_training(folders["train"])
    parents = {"started_from": training["started_from"], **judged.parents()}
    depth = tokenize.read_codes_report(folders["tokenize"])["depth"]
    manifest = bundle.manifest_of(report, training, recipe.prompt, depth, options.llm_price_ndcg_per_ms)
    return (
        manifest
        | {"distillation": train_student.read_earned(folders["distill"])}
        | judged.record()
        | {"test_set": held_out.record(), "lineage": _lineage(made_by, options, recipe, parents)}
    )


def _refuse(
    stages: StageCache, manifest: dict[str, Any], judged: Judgement, evaluated: StageOutput, options: PipelineOptions
) -> None:
    """Write the report of what is refused, and raise StageFailed with its place and what one can do next."""
    report = evaluate.read_report(evaluated.path)
    compared = gate.Compared(live=judged.against_live, reference=judged.against_reference)
    steps = gate.next_steps(report["metrics"], compared, judged.data, options.gate)
    key = content_key(manifest | {"problems": judged.problems}, [evaluated.key], [model_card, gate])
    refused = stages.run(
        "gate", key, lambda out: model_card.write_refusal(manifest, report, judged.problems, steps, out)
    )
    outcome = gate.NOT_PUBLISHED
    if options.split == SplitKind.GLOBAL_TIME:
        outcome = f"a run with --split {options.split} publishes nothing"
    gate.refuse(judged.problems, f"{outcome}; report: {refused.path / model_card.CARD}", steps)


def _refit(
    stages: StageCache,
    judged: evaluate.Trained,
    recipe: recipes.Recipe,
    distilled: StageOutput,
    options: PipelineOptions,
    progress: Progress,
) -> StageOutput:
    """Run the stage `refit` on the pair that passed the gate."""
    key = refit.key(recipe, distilled.key)
    saved = Checkpoints(stages.checkpoint_dir("refit", key), "refit", options.checkpoint_every_s)
    return stages.run("refit", key, lambda out: refit.refit(judged, recipe, out, saved, progress, options.team))


def ingest_events(stages: StageCache, options: PipelineOptions, places: Places) -> StageOutput:
    """Run the stage `ingest` on the given tables and the live log."""
    log = ingest.live_log_files(places.offline_log_dir) if options.with_live_log else ()
    source = ingest.Source(options.events, options.items, log, places.event_roles)
    return stages.run("ingest", ingest.key(source), lambda out: ingest.ingest(source, places.cache_dir, out))


def store_lists(
    stages: StageCache,
    options: PipelineOptions,
    places: Places,
    ingested: StageOutput,
    ranker: precompute.BatchRanker,
    progress: Progress,
) -> StageOutput:
    """Run the stage `precompute` for the busiest users of these events, and write their lists to the online store."""
    writer = FeatureWriter(places.feature_repo)
    users = precompute.busiest_users(pl.read_parquet(ingested.path / "events.parquet"), options.precompute.num_users)
    histories = list(writer.read_histories(users).values())
    key = precompute.key(ranker.bundle_version, histories, options.precompute)
    listed = stages.run(
        "precompute", key, lambda out: precompute.precompute(ranker, histories, options.precompute, out, progress)
    )
    writer.write_precomputed(precompute.read_rows(listed.path), time.time_ns() // 1_000)
    return listed


def _lineage(
    made_by: Sequence[StageOutput], options: PipelineOptions, recipe: recipes.Recipe, parents: dict[str, str | None]
) -> dict[str, Any]:
    """Return what a bundle was made from (JSON values): hashes of its data, of the sources and of each stage's inputs, options, parents."""
    ingested = made_by[0].path
    given = {name: value for name, value in asdict(options).items() if name != "recipes"}
    given |= {"dataset": options.data_name, "recipe": asdict(recipe)}
    return {
        "data": {name: file_sha256(ingested / name) for name in ("events.parquet", "items.parquet")},
        "code": content_key({}, [], [sys.modules[__name__]]),
        "options": json.loads(json.dumps(given, default=str)),
        "seed": recipe.train.seed,
        "parents": parents,
        "stages": {output.stage: output.key for output in made_by},
        "command": _command(),
    }


def _command() -> str:
    """Return what this process was started as; the module of the command `tailrace` by that name."""
    path = Path(sys.argv[0])
    return shlex.join(["tailrace" if path.parts[-2:] == ("cli", "main.py") else path.name, *sys.argv[1:]])


@contextmanager
def _threads(num_threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _report(done: list[StageOutput]) -> PipelineReport:
    by_stage = {output.stage: output for output in done}
    evaluated, published = by_stage.get("evaluate"), by_stage.get("publish")
    return PipelineReport(
        stages=tuple(done),
        evaluation=evaluate.read_report(evaluated.path) if evaluated else None,
        bundle_version=published.key if published else None,
    )
