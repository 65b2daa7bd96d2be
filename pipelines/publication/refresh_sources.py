"""Counts the live bundle's transitions and similar items again from all events, without training.

The child bundle has the same weights, catalogue and mixer; only its tables differ. Items count from the next refresh
after their first event.
"""

import shutil
import tempfile
from datetime import datetime
from pathlib import Path

import numpy as np
import polars as pl

from models.catalogue import Catalogue
from models.mixer import SOURCES
from models.registry.bundle import Bundle
from models.registry.store import BundleStore
from models.registry.trainings import lineage_of_addition
from models.similar import SIMILAR, num_neighbours
from models.student import read_student
from pipelines.codes.embedding import texts_in
from pipelines.publication.bundle import publish, version_of
from pipelines.similarity.co_visits import count_co_visits, count_transitions
from pipelines.similarity.mix import Mix, Sources, table_of, with_texts
from pipelines.similarity.sources import TRANSITIONS, as_table
from pipelines.similarity.vectors import nearest


def refresh_sources(store: BundleStore, events: pl.DataFrame, now: datetime) -> Bundle:
    """Publish and promote a child of the live bundle with fresh tables; the live bundle if it mixes no sources.

    `events` has user_id, item_id, event_time and count, as the stage `ingest` writes them.

    Raises BundleNotFound, BundleCorrupt, BundleMoved if another bundle was promoted meanwhile, and BundleWithdrawn for
    a withdrawn version.
    """
    live = store.live()
    live.verify()
    if TRANSITIONS not in live.manifest.get("mixer", {}).get("sources", {}):
        return live
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "bundle"
        shutil.copytree(live.path, folder, ignore=shutil.ignore_patterns("manifest.json"))
        catalogue = live.catalogue()
        _write_tables(live, catalogue, *sequences_of(events, catalogue), folder)
        version = version_of(folder, now)
        about = {name: value for name, value in live.manifest.items() if name not in {"version", "files", "lists"}}
        about["lineage"] = lineage_of_addition(live.manifest, live.version)
        return publish(store, folder, version, about, seen=live.version)


def sequences_of(events: pl.DataFrame, catalogue: Catalogue) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return each user's items by the catalogue's index, oldest first, and their counts; other items are skipped."""
    indices = pl.col("item_id").replace_strict(catalogue.index_of, default=None, return_dtype=pl.Int64)
    known = events.sort("event_time", maintain_order=True).with_columns(index=indices).drop_nulls("index")
    users = known.group_by("user_id", maintain_order=True).agg("index", "count")
    items, counts = ([row.to_numpy() for row in users[name]] for name in ("index", "count"))
    return items, counts


def _write_tables(
    live: Bundle, catalogue: Catalogue, sequences: list[np.ndarray], counts: list[np.ndarray], folder: Path
) -> None:
    num_items = len(catalogue.item_ids)
    num = num_neighbours(num_items)
    as_table(count_transitions(sequences, num_items, num, counts)).save(folder / SOURCES / TRANSITIONS)
    mixed = live.report().get("similar")
    if mixed is None or live.student_weights_path is None:
        return
    rows_VD = read_student(live.student_weights_path).head_weight_VD.detach().numpy()
    num_events_V = np.bincount(np.concatenate([np.zeros(0, dtype=np.int64), *sequences]), minlength=num_items)
    visits = count_co_visits(sequences, num_items, 2 * num, counts)
    vectors = with_texts(nearest(rows_VD, 2 * num), catalogue.popularity, texts_in(catalogue))
    table_of(Sources(visits, vectors, num_events_V), Mix(**mixed["mix"])).save(folder / SIMILAR)
