"""A bundle of items without models: its content, readers, and the first training."""

from datetime import UTC, datetime
from pathlib import Path

import polars as pl
import pytest

from models.registry.store import BundleStore
from pipelines.options import PipelineOptions
from pipelines.publication.add_items import append_items
from pipelines.publication.cold_start import publish_ingested, publish_items
from pipelines.publication.live import live_of
from pipelines.runner.stage import StageOutput
from pipelines.tables.files import Frame
from pipelines.tables.reader import ItemTable
from services.errors import BundleMoved, BundleUntrained, ConfigError, DataError

NOW = datetime(2026, 1, 2, tzinfo=UTC)
ITEMS = pl.DataFrame(
    {
        "item_id": ["b", "a", "c", "d"],
        "title": ["red wool hat", "red wool scarf", "garden chair", "garden table"],
        "categories": ["hats", "scarves", "", "garden|wood"],
    }
)


@pytest.fixture
def store(tmp_path: Path) -> BundleStore:
    """A store with a live bundle of the items."""
    store = BundleStore(tmp_path / "bundles")
    publish_items(store, ItemTable(Frame(ITEMS, "items.csv")), NOW)
    return store


def test_it_holds_the_items_and_for_each_the_nearest_by_text(store: BundleStore) -> None:
    """Items are ordered by id without events, and items without a common word are not similar."""
    bundle = store.live()
    bundle.verify()
    catalogue = bundle.catalogue()
    similar = bundle.similar(4)

    assert catalogue.item_ids == ("a", "b", "c", "d")
    assert catalogue.categories == (("scarves",), ("hats",), (), ("garden", "wood"))
    assert not catalogue.popularity.any()
    assert [row[0] for row in similar.neighbours_VN.tolist()] == [1, 0, 3, 2]
    assert (bundle.manifest["dataset"], bundle.manifest["num_items"]) == ("items", 4)


def test_ingested_items_are_popular_by_their_events(tmp_path: Path) -> None:
    """Items without events count zero."""
    items = ITEMS.with_columns(pl.col("categories").str.split("|"), text=pl.lit(""))
    items.write_parquet(tmp_path / "items.parquet")
    pl.DataFrame({"item_id": ["c", "a", "c"]}).write_parquet(tmp_path / "events.parquet")
    catalogue = publish_ingested(BundleStore(tmp_path / "bundles"), tmp_path, "ml-100k", NOW).catalogue()

    assert dict(zip(catalogue.item_ids, catalogue.popularity.tolist(), strict=True)) == {"a": 1, "b": 0, "c": 2, "d": 0}


def test_its_models_are_missing_by_name(store: BundleStore) -> None:
    """Requests for the models raise BundleUntrained, and the bundle is not a reference for later trainings."""
    bundle = store.live()

    assert not bundle.is_trained
    for wanted in ("decoder_dir", "student_path"):
        with pytest.raises(BundleUntrained, match="made of items only"):
            getattr(bundle, wanted)
    assert store.reference() is None


def test_a_first_training_is_compared_with_nothing(store: BundleStore, tmp_path: Path) -> None:
    """A first training is not compared, even with other items, since no trained model is replaced."""
    pl.DataFrame({"item_id": ["z"], "title": ["other"]}).write_parquet(tmp_path / "items.parquet")
    ingested = StageOutput("ingest", "key", tmp_path, skipped=False, seconds=0.0)

    assert live_of(store, store.live_version(), ingested, PipelineOptions(), "tailrace pipeline") is None


def test_items_are_not_added_to_models_that_are_not_there(store: BundleStore) -> None:
    """The error names the command to use."""
    with pytest.raises(ConfigError, match="tailrace pipeline --items"):
        append_items(store, ItemTable(Frame(ITEMS, "items.csv")), NOW)


def test_it_replaces_no_other_bundle(store: BundleStore) -> None:
    """A bundle that went live in the meantime is not replaced."""
    live = store.live_version()
    with pytest.raises(BundleMoved):
        publish_items(store, ItemTable(Frame(ITEMS.head(3), "items.csv")), NOW)

    assert store.live_version() == live


def test_one_item_is_no_shop(tmp_path: Path) -> None:
    """A single item is rejected, and the error names the table."""
    with pytest.raises(DataError, match=r"1 items of items\.csv"):
        publish_items(BundleStore(tmp_path), ItemTable(Frame(ITEMS.head(1), "items.csv")), NOW)
