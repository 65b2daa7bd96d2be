"""The first bundle of a shop with items but no events: a catalogue and similar items by text. No models.

Its manifest says `trained: false`. Gateways then answer with popular items (without events, the most recently
published) and similar items; the LLM replicas wait. The first training replaces the bundle like any other, and is
compared with nothing.
"""

import json
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from models.catalogue import Catalogue
from models.registry.bundle import Bundle
from models.registry.store import BundleStore
from models.similar import NONE, SIMILAR, SimilarTable, num_neighbours
from pipelines.codes.embedding import fit_text, texts_of
from pipelines.data import ingest
from pipelines.evaluation.evaluate import REPORT
from pipelines.places import Places
from pipelines.publication.bundle import publish, version_of
from pipelines.similarity.vectors import nearest
from pipelines.tables.reader import ItemTable
from services.errors import DataError
from services.features.schema import SERVICE

_TEXT_SIZE = 64
_LEAST_COSINE = 0.01
"""Rounding error of the distance between texts without a common word."""


def publish_items(store: BundleStore, table: ItemTable, now: datetime) -> Bundle:
    """Publish a bundle of only these items and promote it, unless a version is live.

    Raises DataError naming the table, and BundleMoved if another bundle was promoted meanwhile.
    """
    items, name = table.read_catalogue(), table.table.name
    if items.height < 2:
        raise DataError("", f"{items.height} items of {name} can be used; give at least 2", "'i42'")
    return _publish(store, items.with_columns(num_events=pl.lit(0)), Path(name).stem, now)


def publish_ingested(store: BundleStore, ingested: Path, dataset: str, now: datetime) -> Bundle:
    """Publish a bundle of the ingested items, popular by their events, and promote it, unless a version is live.

    Raises BundleMoved if another bundle was promoted meanwhile.
    """
    counts = pl.scan_parquet(ingested / "events.parquet").group_by("item_id").agg(num_events=pl.len())
    items = pl.scan_parquet(ingested / "items.parquet").join(counts, on="item_id", how="left")
    return _publish(store, items.with_columns(pl.col("num_events").fill_null(0)).collect(), dataset, now)


def describe(bundle: Bundle) -> str:
    """Return a sentence: the live bundle of items, and what it answers."""
    num_items = bundle.manifest.get("num_items")
    return f"{bundle.version} is live with {num_items} items and no models: it answers popular and similar items"


def _publish(store: BundleStore, items: pl.DataFrame, dataset: str, now: datetime) -> Bundle:
    items = items.sort("item_id")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "bundle"
        folder.mkdir()
        _catalogue_of(items).save(folder / "catalogue.parquet")
        similar_by_text(texts_of(items)).save(folder / SIMILAR)
        about: dict[str, Any] = {"dataset": dataset, "num_items": items.height}
        (folder / REPORT).write_text(json.dumps(about | {"metrics": {}}, indent=1))
        about |= {"model_name": store.name, "trained": False, "feature_service": SERVICE, "depth": 1, "repeats": False}
        return publish(store, folder, version_of(folder, now), about, seen=None)


def similar_by_text(texts: list[str]) -> SimilarTable:
    """Return for each item the items with the most similar titles, categories and texts.

    None for an item without words.
    """
    num = num_neighbours(len(texts))
    neighbours = nearest(fit_text(texts, _TEXT_SIZE, seed=0).encode(texts), num)
    is_alike = neighbours.figures_VC > _LEAST_COSINE
    return SimilarTable(
        np.where(is_alike, neighbours.items_VC, NONE).astype(np.int32),
        np.where(is_alike, neighbours.figures_VC, 0).astype(np.float16),
    )


def describe_missing(bundle: Bundle, places: Places) -> str:
    """Return what the live log still lacks for a first training, or that it has enough events."""
    source = ingest.IngestSources(None, None, ingest.live_log_files(places.offline_log_dir), places.event_roles)
    num_events, num_users, num_missing = ingest.count_for_training(source, bundle.item_ids())
    seen = (
        f"{bundle.version} has no models yet; the live log has {num_events} positive events of {num_users} users on "
        "its items"
    )
    if num_missing:
        return f"{seen}: a first training needs {num_missing} more of one user"
    return f"{seen}, enough for a first training: tailrace pipeline --items FILE"


def _catalogue_of(items: pl.DataFrame) -> Catalogue:
    ids = tuple(items["item_id"])
    return Catalogue(
        item_ids=ids,
        titles=tuple(items["title"]),
        categories=tuple(tuple(names) for names in items["categories"].to_list()),
        codes=np.arange(len(ids), dtype=np.int32).reshape(-1, 1),
        level_sizes=(len(ids),),
        popularity=items["num_events"].to_numpy().astype(np.float64),
    )
