"""Publication relative to the live bundle: after a rollback, over a promotion, of other data, and past the gate."""

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
from rich.console import Console

from models.registry.store import BundleStore
from pipelines.evaluation.gate import GateOptions
from pipelines.evaluation.held_out import LEDGER, read_ledger
from pipelines.options import PipelineOptions
from pipelines.places import Places
from pipelines.run import flow, run_pipeline
from pipelines.runner.bars import Bars
from pipelines.stages import ModelRun
from services.errors import BundleMoved, StageFailed
from tests.integration.pipelines.conftest import quiet, run, some_new_events
from tests.support.training.synthetic import raw_items


@pytest.fixture
def places(tmp_path: Path, copied_state: Callable[[Path], Places]) -> Places:
    return copied_state(tmp_path / "state")


@pytest.fixture
def other_student(options: PipelineOptions) -> PipelineOptions:
    """The same run with another student and the same decoder, with permissive limits against the live bundle."""
    (recipe,) = options.recipes
    wider = replace(recipe, distill=replace(recipe.distill, feed_forward=24))
    gate = replace(options.gate, max_loss=1.0, max_reference_loss=1.0)
    return replace(options, recipes=(wider,), gate=gate)


def test_a_rollback_is_not_undone_by_the_next_run(
    places: Places, other_student: PipelineOptions, tmp_path: Path
) -> None:
    """After a rollback, a run without new events publishes nothing; with new events it does; --force restores."""
    store = BundleStore(places.bundle_root)
    first = store.live_version()
    second = run(other_student, places)[0].bundle_version
    assert (store.rollback(by="ann", reason="bad lists"), second) == (first, store.previous_version())
    sentence = f"{second} was withdrawn by ann at "

    published, shown = run(other_student, places)
    other_gate, _ = run(replace(other_student, gate=replace(other_student.gate, max_loss=0.9)), places)

    assert (published.bundle_version, other_gate.bundle_version, store.live_version()) == (None, None, first)
    assert f"nothing new to publish, {first} stays live: {sentence}" in shown
    assert store.versions() == [first, second]

    some_new_events(tmp_path / "events.csv", 2)
    nightly = replace(other_student, events=tmp_path / "events.csv", warm_start=True)
    third, shown = run(nightly, places)

    bundle = store.live()
    assert third.bundle_version == bundle.version
    assert bundle.version not in {first, second}
    assert bundle.manifest["lineage"]["parents"] == {"started_from": first, "compared_with": first, "reference": first}
    assert f"(bad lists): {first} is live, and is compared with" in shown
    assert sentence in (bundle.path / "report.md").read_text()
    forced, shown = run(replace(other_student, force=True), places)
    assert (forced.bundle_version, second in store.withdrawals()) == (store.live_version(), False)


def run_overtaken(options: PipelineOptions, places: Places, version: str) -> None:
    with Bars(quiet()) as bars:
        for output in flow(ModelRun(options=options, places=places), bars):
            if output.stage == "precompute":
                BundleStore(places.bundle_root).promote(version)


def test_a_promotion_during_a_run_is_not_overwritten(places: Places, other_student: PipelineOptions) -> None:
    """A run publishes only if its initial live version is still live; the next run continues from its stages."""
    store = BundleStore(places.bundle_root)
    first = store.live()
    store.publish(first.path, "by-hand", {name: first.manifest[name] for name in ("prompt", "data")})

    with pytest.raises(BundleMoved, match=f"by-hand and no longer {first.version}.*run the command again"):
        run_overtaken(other_student, places, "by-hand")

    assert store.live_version() == "by-hand"
    again = run_pipeline(other_student, places, quiet())
    assert {"train", "distill", "evaluate"} <= {stage.stage for stage in again.stages if stage.skipped}
    assert [row["champion"] for row in store.live().manifest["against_live"]] == ["by-hand", "by-hand"]
    assert store.live().manifest["lineage"]["parents"]["compared_with"] == "by-hand"


def test_a_renamed_table_is_compared_with_the_live_bundle(
    places: Places, options: PipelineOptions, tmp_path: Path
) -> None:
    """With the live models, so that nothing differs, the data checks still apply, including the volume."""
    store = BundleStore(places.bundle_root)
    before = store.live()
    (tmp_path / "renamed.csv").write_bytes(Path(str(options.events)).read_bytes())
    renamed = replace(options, events=tmp_path / "renamed.csv")

    run_pipeline(renamed, places, quiet())

    live = store.live()
    rows = live.manifest["against_live"]
    assert [(row["champion"], row["low"], row["high"]) for row in rows] == [(before.version, 0, 0)] * 2
    larger = live.manifest | {"data": live.manifest["data"] | {"num_events": 1_000}, "lineage": {}}
    (live.path / "manifest.json").write_text(json.dumps(larger))
    with pytest.raises(StageFailed, match="480 events are 48% of the live bundle's 1000, under 80%"):
        run_pipeline(renamed, places, quiet())


def test_other_data_stops_before_training_unless_it_is_to_replace_what_is_live(
    places: Places, options: PipelineOptions, tmp_path: Path
) -> None:
    """Items of other titles are other items; the suggested option skips comparison and warm start."""
    store, shown = BundleStore(places.bundle_root), io.StringIO()
    before = store.live_version()
    titles = pl.format("Book {}", pl.col("item_id"))
    raw_items(30).with_columns(title=titles).write_ndjson(tmp_path / "items.jsonl")
    other = replace(options, items=tmp_path / "items.jsonl", warm_start=True)

    words = r"0 of 30 items are among the 30 that are live \(30 more share the id.*--replace-live"
    with pytest.raises(StageFailed, match=words):
        run_pipeline(other, places, Console(file=shown))

    assert [line.split()[0] for line in shown.getvalue().splitlines()][:2] == ["ingest", "events"]
    assert store.live_version() == before
    run_pipeline(replace(other, replace_live=True), places, quiet())
    assert set(store.live().manifest["lineage"]["parents"].values()) == {None}
    assert (
        store.live().manifest["about_reference"].startswith(f"not compared with the reference, {before}: 0 of 30 items")
    )
    assert store.live_version() != before
    reference = store.reference()
    assert reference is not None
    assert (reference.version, reference.by) == (store.live_version(), "tailrace pipeline --replace-live")


def test_a_refused_run_leaves_a_report_and_says_what_to_do(places: Places, options: PipelineOptions) -> None:
    """A refusal names the report; both have the reason, the best baseline and remedies. The live bundle stays."""
    beyond, shown = replace(options, gate=GateOptions(baseline="best", student_floor=100)), io.StringIO()
    before = BundleStore(places.bundle_root).live_version()

    with pytest.raises(StageFailed, match=r"nothing was published .*; report: .*report\.md") as refused:
        run_pipeline(beyond, places, Console(file=shown, width=400))

    path = Path(str(refused.value).partition("report: ")[2])
    page, report = path.read_text(), json.loads((path.parent / "report.json").read_text())
    assert BundleStore(places.bundle_root).live_version() == before
    assert "item_knn" in shown.getvalue()
    assert page.startswith("# Not published: the gate rejected these models\n")
    assert "published by force" not in page
    assert report["gate"]["problems"][-1].endswith("(--student-floor)")
    assert any(step.startswith("--student-epochs") for step in report["gate"]["next_steps"])
    assert report["metrics"]["decoder"]["ndcg@10"] > 0
    for sentence in (*report["gate"]["problems"], *report["gate"]["next_steps"]):
        assert f"- {sentence}." in page
    assert all(step in shown.getvalue() for step in report["gate"]["next_steps"])


def test_forced_is_a_fact_of_the_publication_and_not_of_the_models(places: Places, options: PipelineOptions) -> None:
    """A forced publication and a later one that passes its gate are two bundles, and only the first is marked.

    An unchanged run changes nothing and opens no label.
    """
    store, beyond = BundleStore(places.bundle_root), replace(options, gate=GateOptions(student_floor=100))
    forced = run(replace(beyond, force=True), places)[0].bundle_version
    openings = read_ledger(places.stages_dir / LEDGER)

    unchanged, _ = run(beyond, places)

    assert (unchanged.bundle_version, store.live_version()) == (forced, forced)
    assert read_ledger(places.stages_dir / LEDGER) == openings
    assert store.live().manifest["forced"][-1].endswith("(--student-floor)")
    passed, _ = run(replace(options, gate=replace(options.gate, max_loss=0.5)), places)
    bundle = store.live()
    assert passed.bundle_version == bundle.version != forced
    assert bundle.manifest["forced"] == []
    assert "published by force" not in (bundle.path / "report.md").read_text()
    assert "published by force" in (store.open(str(forced)).path / "report.md").read_text()
