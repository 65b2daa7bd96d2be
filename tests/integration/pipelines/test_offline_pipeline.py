"""The whole offline flow on a synthetic data set and a real store."""

import asyncio
import io
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from redis import Redis
from rich.console import Console
from structlog.testing import capture_logs

from models.catalogue import load_catalogue
from models.prompt import prompt_of
from models.registry.store import BundleStore
from pipelines.codes.options import CodesOptions
from pipelines.data.examples import Split, read_cases
from pipelines.evaluation import code_depth
from pipelines.evaluation.evaluate import read_report
from pipelines.evaluation.held_out import LEDGER, read_ledger
from pipelines.evaluation.pair import load_pair
from pipelines.options import PipelineOptions, PrecomputeOptions
from pipelines.places import Places
from pipelines.refresh import refresh_lists
from pipelines.run import run_pipeline
from pipelines.runner.run_lock import run_lock
from pipelines.scoring.metrics import ndcg, rank_labels
from pipelines.training.recipes import Recipe
from pipelines.training.reports.curves import CURVES
from services.contracts.features import UserFeatures
from services.errors import ConfigError, StageFailed
from services.features.reader import FeatureReader
from services.features.writer import FeatureWriter
from services.settings.addresses import RedisAddress
from services.student.ranker import load_student
from tests.integration.pipelines.conftest import places_in, quiet, run, some_new_events
from tests.support.gateway.rows import declare_whole
from tests.support.servers import HOST, Server, valkey_server
from tests.support.training.synthetic import raw_events, raw_items
from tests.unit.pipelines.conftest import CPU, SMALL_DECODER, SMALL_STUDENT, learn_the_ring


@pytest.fixture(scope="module")
def places(
    tmp_path_factory: pytest.TempPathFactory, copied_state: Callable[[Path], Places], options: PipelineOptions
) -> Places:
    """A folder after two pipeline runs, with the second run's output in a file."""
    places = copied_state(tmp_path_factory.mktemp("places") / "state")
    (places.state_dir / "shown.txt").write_text(run(options, places)[1])
    return places


async def read_lists(places: Places, user_id: str) -> UserFeatures:
    """Return the user's features as a request reads them."""
    reader = FeatureReader(places.feature_repo, num_partitions=1)
    try:
        return await reader.read(user_id, BundleStore(places.bundle_root).live().version, 10.0)
    finally:
        await reader.close()


def test_own_tables_become_a_live_bundle(places: Places) -> None:
    """CSV and JSON Lines become a promoted version that loads, with its manifest."""
    bundle = BundleStore(places.bundle_root).live()

    assert load_student(bundle, bundle.catalogue()) is not None
    assert bundle.manifest["dataset"] == bundle.manifest["lineage"]["options"]["dataset"] == "events"
    assert "ml-100k" not in (bundle.path / "report.md").read_text()
    assert bundle.manifest["prompt"] == {"max_items": 10, "stride": 5}
    assert bundle.manifest["test_set"]["num_openings"] == 1
    assert bundle.manifest["lineage"]["parents"].keys() == {"started_from", "compared_with", "reference"}
    assert (bundle.path / "report.md").read_text().startswith(f"# Bundle {bundle.version}\n")
    shown = (places.state_dir / "shown.txt").read_text()
    assert f"report: {bundle.path / 'report.md'}" in shown
    trained = places.stages_dir / "train" / bundle.manifest["lineage"]["stages"]["train"]
    assert f"loss curves: {trained / CURVES}" in shown
    assert (trained / CURVES).read_bytes().startswith(b"\x89PNG")
    assert "(training loss)" in shown
    assert bundle.manifest["training"]["memory"]["predicted"].keys() >= {"weights", "gradients", "optimizer"}
    assert "| memory of its steps | " in (bundle.path / "report.md").read_text()
    assert "refit on 480 events; the judged models had learned 400" in " ".join(shown.split())


def test_what_is_found_in_the_data_is_printed_before_the_next_stage(places: Places, options: PipelineOptions) -> None:
    """An unreadable events file is reported at once, not after the training."""
    _, shown = run(replace(options, until="features"), places)

    begins = [line.split()[0] for line in shown.splitlines()]
    assert begins[0] == "ingest"
    assert begins[-1] == "features"
    assert "events" in begins[1:-1]


def test_what_is_published_has_learned_all_events_and_the_judged_pair_is_kept(places: Places) -> None:
    """Stored lists, catalogue and both models come from the refit; the manifest's metrics from the judged pair."""
    bundle = BundleStore(places.bundle_root).live()
    evaluated = places.stages_dir / "evaluate" / bundle.manifest["lineage"]["stages"]["evaluate"]

    judged = load_pair(bundle.judged_dir, CPU).scorers(bundle.catalogue(), prompt_of(bundle.manifest))

    tokenized = places.stages_dir / "tokenize" / bundle.manifest["lineage"]["stages"]["tokenize"]
    cases = read_cases(tokenized, Split.TEST)
    for name, scorer in judged.items():
        assert ndcg(rank_labels(scorer, cases).masked, 10) == pytest.approx(bundle.manifest["metrics"][name]["ndcg@10"])
    assert bundle.manifest["refit"] == bundle.report()["refit"]
    assert {*bundle.manifest["lineage"]["stages"]} >= {"refit"}
    assert bundle.catalogue().popularity.sum() == 480
    assert load_catalogue(bundle.judged_dir / "catalogue.parquet").popularity.sum() == 400
    assert read_report(evaluated)["metrics"]["decoder"]["ndcg@10"] == bundle.manifest["metrics"]["decoder"]["ndcg@10"]
    assert "All quality on this page is that of the pair in `judged/`" in (bundle.path / "report.md").read_text()


def test_the_global_time_split_is_evaluated_and_not_published(places: Places, options: PipelineOptions) -> None:
    """A global-time split trains from scratch, ends at the gate, prints the report's path, and publishes nothing."""
    before = BundleStore(places.bundle_root).live_version()

    report, shown = run(replace(options, split="global-time"), places)

    assert [stage.stage for stage in report.stages if not stage.skipped] == [
        "tokenize", "train", "distill", "sources", "evaluate", "gate"
    ]  # fmt: skip
    assert report.evaluation is not None
    assert report.evaluation["split"]["kind"] == "global-time"
    assert "events before 2023-11-14T22:2" in shown
    assert f"publishes nothing; its report: {report.stages[-1].path / 'report.json'}" in shown
    assert BundleStore(places.bundle_root).live_version() == before


async def test_online_store_holds_histories_and_lists_of_the_live_version(places: Places) -> None:
    """A user's read returns the history and a list of the live bundle that includes the newest event."""
    features = [await read_lists(places, f"u{number:03d}") for number in range(40)]

    listed = [user for user in features if user.precomputed is not None]
    assert len(listed) == 10
    assert all(len(user.history_item_ids) == 12 for user in features)
    for user in listed:
        assert user.precomputed is not None
        assert user.precomputed.made_from_row_us == user.as_of_us
        assert not set(user.precomputed.item_ids) & set(user.history_item_ids)


async def test_users_who_come_back_to_items_get_a_bundle_that_shows_them(
    tmp_path: Path, store: Server, options: PipelineOptions
) -> None:
    """With favourites in rotation the decoder reaches the bigram, and repeats are reported and listed."""
    draw = np.random.default_rng(0)
    favourites = [draw.choice(12, 3, replace=False) for _ in range(40)]
    rows = [(f"u{u:03d}", f"i{own[n % 3]:02d}", 60 * n + u) for u, own in enumerate(favourites) for n in range(12)]
    columns = ["user_id", "item_id", "event_time"]
    pl.DataFrame(rows, schema=columns, orient="row").write_csv(tmp_path / "groceries.csv")
    raw_items(12).write_ndjson(tmp_path / "items.jsonl")
    own = replace(options, events=tmp_path / "groceries.csv", items=tmp_path / "items.jsonl")
    places = places_in(tmp_path / "state", store)

    report, shown = run(own, places)
    listed = (await read_lists(places, "u000")).precomputed

    assert report.evaluation is not None
    metrics = report.evaluation["metrics"]
    assert metrics["decoder"]["ndcg@10"] >= metrics["bigram"]["ndcg@10"] > 0.5
    assert metrics["decoder"]["ndcg@10"] == metrics["decoder"]["ndcg@10_unmasked"]
    assert BundleStore(places.bundle_root).live().manifest["repeats"] is True
    assert listed is not None
    assert {f"i{item:02d}" for item in favourites[0]} & {*listed.item_ids}
    assert "seen items are learned and may be recommended again: the bigram's NDCG@10" in shown


async def test_a_second_run_trains_nothing_and_fills_an_emptied_store(
    tmp_path: Path, places: Places, options: PipelineOptions
) -> None:
    """An unchanged run skips every stage, keeps the version, reads no test label, and fills the store again."""
    openings = read_ledger(places.stages_dir / LEDGER)
    with valkey_server(tmp_path / "valkey") as other:
        with Redis(host=HOST, port=other.port) as client:
            declare_whole(client)
        redis = RedisAddress(host=HOST, port=other.port)
        moved = replace(places, feature_repo=replace(places.feature_repo, redis=redis))
        report = await asyncio.to_thread(run_pipeline, options, moved, quiet())
        users = [await read_lists(moved, f"u{number:03d}") for number in range(40)]

    assert {stage.stage for stage in report.stages if not stage.skipped} <= {"gate", "publish"}
    assert read_ledger(places.stages_dir / LEDGER) == openings
    assert report.bundle_version == BundleStore(places.bundle_root).live_version()
    assert all(user.history_item_ids for user in users)
    assert sum(user.precomputed is not None for user in users) == 10


def test_a_refit_that_went_wrong_publishes_nothing_and_without_it_the_judged_pair_serves(
    tmp_path: Path, copied_state: Callable[[Path], Places], options: PipelineOptions
) -> None:
    """A failed refit check is remembered: the next run stops at once, and --no-refit publishes the judged pair."""
    places = copied_state(tmp_path / "state")
    shutil.rmtree(places.bundle_root)
    refitted = run_pipeline(replace(options, until="refit"), places, quiet()).stages[-1].path / "refit.json"
    refit = json.loads(refitted.read_text())
    refit["models"]["student"]["in_common"] = 0.1
    refitted.write_text(json.dumps(refit))

    with pytest.raises(StageFailed, match=r"^stage refit: the student's lists have 10% in common .*--no-refit"):
        run_pipeline(options, places, quiet())

    assert BundleStore(places.bundle_root).live_version() is None
    run_pipeline(replace(options, refit=False), places, quiet())
    live = BundleStore(places.bundle_root).live()
    assert live.judged_dir == live.path
    assert live.manifest.get("refit") is None
    assert live.catalogue().popularity.sum() == 400


@pytest.mark.parametrize("depth", [1, pytest.param(2, marks=pytest.mark.grid)])
def test_each_night_starts_from_the_last_whole_training(
    tmp_path: Path, copied_state: Callable[[Path], Places], options: PipelineOptions, depth: int
) -> None:
    """With few events on two nights, both trainings start from the first bundle, which is kept at any age."""
    places, events = replace(copied_state(tmp_path / "state"), keep_bundles=1), tmp_path / "events.csv"
    bundles, codes = BundleStore(places.bundle_root), CodesOptions(depth=depth)
    published = [bundles.live_version()] if depth == 1 else []
    for num_new in (0, 2, 4)[len(published) :]:
        some_new_events(events, num_new)
        # force: regardless of the gate
        nightly = replace(options, events=events, codes=codes, warm_start=num_new > 0, force=True)
        published.append(run_pipeline(nightly, places, quiet()).bundle_version)

    first, before, live = published
    assert (bundles.live_version(), bundles.live().started_from) == (live, first)
    assert bundles.open(str(before)).started_from == first
    assert {first, before, live} <= {*bundles.versions()}


def test_a_warm_start_keeps_the_live_codes_where_it_refuses_the_weights(
    tmp_path: Path, store: Server, options: PipelineOptions
) -> None:
    """A bundle without an age causes a full training; items keep its codes, though learned from other events."""
    places, codes = places_in(tmp_path, store), CodesOptions(depth=2, codes_per_level=8)
    bundle = learn_the_ring(tmp_path, SMALL_DECODER, codes).assembled / "bundle"
    BundleStore(places.bundle_root).publish(bundle, "v1", {})
    BundleStore(places.bundle_root).promote("v1")
    raw_events(40, 30, 12, seed=1).write_csv(tmp_path / "events.csv")
    again = replace(options, events=tmp_path / "events.csv", codes=codes, until="tokenize")

    with capture_logs() as logged:
        fresh, kept = (
            run_pipeline(replace(again, warm_start=warm_start), places, quiet()).stages[-1].path / "catalogue.parquet"
            for warm_start in (False, True)
        )

    of_bundle = load_catalogue(bundle / "catalogue.parquet").codes
    assert [line["why"] for line in logged if line["event"] == "warm_start_refused"] == [
        "v1: its manifest has no newest event: full training"
    ]
    assert np.array_equal(load_catalogue(kept).codes, of_bundle)
    assert not np.array_equal(load_catalogue(fresh).codes, of_bundle)


def test_a_tenants_training_serves_no_histories(tmp_path: Path, store: Server, options: PipelineOptions) -> None:
    """Its tables have the ids of the tenant's callers: in the store these are the users of another tenant."""
    own = places_in(tmp_path, store)
    run_pipeline(replace(options, until="features"), own, quiet())
    table = own.offline_log_dir / "base_histories.parquet"

    def served() -> dict[bytes, object]:
        """Return all rows of the store."""
        with Redis(HOST, store.port) as redis:
            return {key: redis.hgetall(key) for key in redis.scan_iter(_type="hash")}

    before = table.read_bytes(), served()
    events = pl.read_csv(options.events)
    events.with_columns(item_id=events["item_id"].reverse()).write_csv(tmp_path / "acme.csv")
    tenants = replace(options, events=tmp_path / "acme.csv", model_name="acme.default", until="features")
    run_pipeline(tenants, own, quiet())

    assert before[1]
    assert (table.read_bytes(), served()) == before


@pytest.mark.parametrize("poor", [1, 3])
def test_validation_chooses_the_depth_of_a_large_catalogue(
    tmp_path: Path, store: Server, options: PipelineOptions, poor: int
) -> None:
    """Of depths 1 and 3, the better decoder is taken without repeating its training."""
    descent = replace(SMALL_DECODER.fit.descent, learning_rate=1e-9)
    stays = replace(SMALL_DECODER, fit=replace(SMALL_DECODER.fit, epochs=1, validate_every=1, descent=descent))
    flat, deep = (stays if depth == poor else SMALL_DECODER for depth in (1, 3))
    recipes = (
        Recipe(at_most={"code_depth": 1}, train=flat, distill=SMALL_STUDENT),
        Recipe(train=deep, distill=SMALL_STUDENT),
    )
    large = replace(options, recipes=recipes, codes=CodesOptions(deep_from_items=10, codes_per_level=8), until="train")

    done = {stage.stage: stage for stage in run_pipeline(large, places_in(tmp_path, store), quiet()).stages}

    comparison, better = code_depth.read_comparison(done["depth"].path), 4 - poor
    assert comparison["depth"] == better
    assert comparison["ndcg10"][str(better)] > comparison["ndcg10"][str(poor)]
    assert (done["tokenize"].skipped, done["train"].skipped) == (True, True)
    assert load_catalogue(done["tokenize"].path / "catalogue.parquet").depth == better


def test_a_warm_start_keeps_the_live_depth(places: Places, options: PipelineOptions) -> None:
    """A warm start keeps the live depth without a comparison, though the catalogue has grown enough for deep codes."""
    grown = replace(options, codes=CodesOptions(deep_from_items=10), warm_start=True, until="tokenize")

    stages = run_pipeline(grown, places, quiet()).stages

    assert [stage.stage for stage in stages] == ["ingest", "features", "tokenize"]
    assert load_catalogue(stages[-1].path / "catalogue.parquet").depth == 1


def test_lists_are_not_refreshed_while_a_run_holds_the_lock(places: Places, options: PipelineOptions) -> None:
    """While a pipeline runs in the folder, a refresh does nothing and prints why."""
    shown = io.StringIO()

    with run_lock(places.stages_dir, quiet()):
        num_lists = refresh_lists(options, places, Console(file=shown, width=300))

    assert num_lists == 0
    assert "another run" in shown.getvalue()


def test_lists_of_own_data_are_not_made_from_the_sample_data(places: Places) -> None:
    """A refresh without tables, which would use MovieLens' users, is refused with the options to give."""
    with pytest.raises(ConfigError, match=r"--events: .* was trained on the table 'events', not on ml-100k"):
        refresh_lists(PipelineOptions(), places, quiet())


def test_lists_made_stale_by_an_event_are_made_again(places: Places, options: PipelineOptions) -> None:
    """Between trainings, a refreshed list of a user with a new event reflects the event and excludes its item."""
    writer = FeatureWriter(places.feature_repo)
    (before,) = writer.read_histories(["u000"]).values()
    seen_ms = before.newest_event_time_ms + 60_000
    item_id = next(item for item in (f"i{number:02d}" for number in range(30)) if item not in before.item_ids)
    after = replace(
        before,
        item_ids=(*before.item_ids, item_id),
        newest_event_time_ms=seen_ms,
        row_time_us=before.row_time_us + 60_000_000,
    )
    writer.write_histories([after])

    num_lists = refresh_lists(replace(options, precompute=PrecomputeOptions(num_users=40, list_len=5)), places, quiet())

    lists = asyncio.run(read_lists(places, "u000"))
    assert num_lists == 40
    assert lists.precomputed is not None
    assert lists.precomputed.made_from_row_us == after.row_time_us
    assert item_id not in lists.precomputed.item_ids
