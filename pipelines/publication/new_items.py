"""Items that only the live catalogue has join the live bundle, by themselves: all that came since the last time, as one child bundle.

The worker's snapshot says which they are. An item without a title waits for one, since codes and rows come from its texts; one that is hidden
waits until it is shown.
"""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import polars as pl

from models.registry import BundleStore
from pipelines.publication.add_items import append_items
from services.errors import BundleError, ConfigError, DataError
from services.items.live_items import LiveItems
from services.items.snapshot import read_snapshot

TABLE = "the live catalogue"
_FAILURES = (BundleError, ConfigError, DataError, OSError)


def new_items(snapshot: Path, store: BundleStore) -> pl.DataFrame:
    """Return the items that the live catalogue shows and the live bundle lacks, as a raw table. Raises BundleNotFound, BundleCorrupt."""
    known, items = set(store.live().item_ids()), LiveItems()
    read_snapshot(snapshot, items)
    states = (items.layout.state(item_id) for item_id in items.layout.new_ids if item_id not in known)
    rows = [
        (one.item_id, one.title, "|".join(one.categories or ()))
        for one in states
        if one is not None and one.available and one.title
    ]
    return pl.DataFrame(rows, {"item_id": pl.String, "title": pl.String, "categories": pl.String}, orient="row")


def add_new_items(store: BundleStore, snapshot: Path, report: Callable[[str], object], keep_bundles: int) -> int:
    """Publish the live bundle with the live catalogue's new items, and return their number; without any it stays as it is.

    Raises what `append_items` does.
    """
    raw = new_items(snapshot, store)
    if not len(raw):
        return 0
    bundle, num_new = append_items(store, raw, TABLE, datetime.now(UTC), report=report)
    store.prune(keep_bundles)
    report(f"{num_new} new items; {bundle.version} is live")
    return num_new


def keep_adding(
    store: BundleStore, snapshot: Path, every_s: float, report: Callable[[str], object], keep_bundles: int
) -> None:
    """Add new items again and again. A failure is reported, the same one in a row once, and what failed is tried again the next time."""
    failure = ""
    while True:
        try:
            add_new_items(store, snapshot, report, keep_bundles)
            failure = ""
        except _FAILURES as error:
            if str(error) != failure:
                failure = str(error)
                report(f"not added: {failure}")
        time.sleep(every_s)
