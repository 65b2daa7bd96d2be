"""The live bundle that a run will replace, matched by items."""

import json
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

from models.registry.store import BundleStore
from pipelines.options import PipelineOptions
from pipelines.publication.bundle import publish
from pipelines.publication.live import describe_other, live_of, reference_of
from pipelines.runner.stage import StageOutput
from services.errors import StageFailed
from tests.support.training.bundles import build_catalogue, live_store

OWN = PipelineOptions(events=Path("shop/events.csv"), items=Path("shop/items.csv"))
COMMAND = "tailrace pipeline --events shop/events.csv --items shop/items.csv"


def items(*numbers: int, title: str = "Item {}") -> pl.DataFrame:
    """Build items named like in the test catalogue."""
    return pl.DataFrame({"item_id": [f"i{n}" for n in numbers], "title": [title.format(n) for n in numbers]})


def ingested(folder: Path, table: pl.DataFrame) -> StageOutput:
    """Build the output of the stage `ingest` with items only."""
    table.write_parquet(folder / "items.parquet")
    return StageOutput("ingest", "key", folder, skipped=False, seconds=0.0)


@pytest.fixture
def store(tmp_path: Path) -> BundleStore:
    """A store with a live bundle of 30 items."""
    (tmp_path / "source").mkdir()
    build_catalogue(30).save(tmp_path / "source" / "catalogue.parquet")
    return live_store(tmp_path / "bundles", tmp_path / "source", "v1", {"dataset": "ml-100k"})


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (items(*range(30)), None),
        (items(0, 1), None),
        (items(*range(27, 300)), None),
        (items(*range(28, 300)), "2 of 272 items are among the 30 that are live"),
        (items(*range(100, 140)), "0 of 40 items are among the 30 that are live"),
        (
            items(*range(40), title="Book {}"),
            "0 of 40 items are among the 30 that are live (30 more share the id, with another title)",
        ),
    ],
)
def test_data_is_known_by_its_items(table: pl.DataFrame, words: str | None) -> None:
    """Subsets, supersets and mostly replaced catalogues match; equal ids with other titles do not."""
    assert describe_other(table, build_catalogue(30)) == words


@pytest.mark.parametrize("options", [OWN, replace(OWN, events=Path("renamed.csv")), replace(OWN, replace_live=True)])
def test_the_live_bundle_of_the_same_data_is_compared_whatever_the_table_is_called(store, tmp_path, options) -> None:
    """The live bundle of the same data is compared, even with a leftover --replace-live option."""
    live = live_of(store, "v1", ingested(tmp_path, items(*range(30))), options, COMMAND)

    assert live is not None
    assert live.version == "v1"


def test_other_data_is_refused_with_the_command_that_replaces_what_is_live(store: BundleStore, tmp_path: Path) -> None:
    """Other data is rejected unless --replace-live is given or the run does not publish."""
    other = ingested(tmp_path, items(*range(100, 140)))

    with pytest.raises(StageFailed) as refused:
        live_of(store, "v1", other, OWN, COMMAND)

    assert "the live bundle v1 (ml-100k)" in str(refused.value)
    fix = f"nothing was trained. To replace that bundle by one of this data: {COMMAND} --replace-live."
    assert fix in str(refused.value)
    for options in (replace(OWN, replace_live=True), replace(OWN, until="train"), replace(OWN, split="global-time")):
        assert live_of(store, "v1", other, options, COMMAND) is None


def test_the_history_names_the_pipeline_as_the_actor_of_its_promotions(store: BundleStore, tmp_path: Path) -> None:
    """A promotion by a publication can be told from that of a person."""
    publish(store, tmp_path / "source", "v2", {"dataset": "ml-100k"})

    move = store.record().history[-1]
    assert (move.act, move.version, move.by) == ("promote", "v2", "pipeline")


def test_a_reference_without_models_is_not_compared(tmp_path: Path) -> None:
    """An earlier rollback may have recorded the items of a first start as the reference; the run says so."""
    (tmp_path / "source").mkdir()
    build_catalogue(30).save(tmp_path / "source" / "catalogue.parquet")
    store = live_store(tmp_path / "bundles", tmp_path / "source", "v0", {"dataset": "ml-100k", "trained": False})
    path = tmp_path / "bundles" / "names" / "default.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"reference": {"version": "v0", "by": "a", "at": "b"}}))

    reference, words = reference_of(store, ingested(tmp_path, items(*range(30))).path)

    assert reference is None
    assert "v0, which has no models; " in words


def test_a_live_bundle_that_cannot_be_read_can_be_replaced(store: BundleStore, tmp_path: Path) -> None:
    """With a manifest, an unreadable live bundle still limits the volume; without a manifest it is not compared."""
    table = ingested(tmp_path, items(*range(30)))
    (tmp_path / "bundles" / "v1" / "catalogue.parquet").write_bytes(b"")

    damaged = live_of(store, "v1", table, OWN, COMMAND)

    assert damaged is not None
    (tmp_path / "bundles" / "v1" / "manifest.json").write_text("{")
    assert live_of(store, "v1", table, OWN, COMMAND) is None
    assert live_of(store, None, table, OWN, COMMAND) is None
