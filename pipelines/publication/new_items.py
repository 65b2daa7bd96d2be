"""Adds items that only the live catalogue has to the live bundle, as one child bundle per run.

`python -m pipelines.publication.new_items` does so for every model name that the stack serves. An item without a title
waits for one, because codes and rows come from its texts; a hidden item waits until it is shown, also by its dates.
"""

import sys
from collections.abc import Callable
from datetime import UTC, datetime

import polars as pl

from models.registry.store import BundleStore
from pipelines.imports.following import following_catalogue
from pipelines.publication.add_items import append_items, has_given_codes
from pipelines.tables.files import Frame
from pipelines.tables.reader import ItemTable
from services.contracts.tenant import tenant_of_name
from services.errors import BundleError, ConfigError, DataError, DependencyUnavailable
from services.items.live_items import LiveItems
from services.observability.log_lines import configure_logging
from services.settings.settings import Settings, load_settings

TABLE = "the live catalogue"
_TEXTS = pl.List(pl.String)
_FAILURES = (BundleError, ConfigError, DataError, OSError)


def read_live_items(settings: Settings) -> LiveItems:
    """Return the live catalogue's items. Raises as `following_catalogue`."""
    with following_catalogue(settings) as catalogue:
        return catalogue.items


def new_items(items: LiveItems, store: BundleStore) -> pl.DataFrame:
    """Return the items that the live catalogue shows and the live bundle lacks, as an exact table.

    Raises BundleNotFound, BundleCorrupt.
    """
    known = set(store.live().item_ids())
    states = (items.layout.state(item_id) for item_id in items.layout.new_ids if item_id not in known)
    rows = [
        (state.item_id, state.title, list(state.categories or ()))
        for state in states
        if state is not None and state.title and not items.hides(state.item_id)
    ]
    return pl.DataFrame(rows, {"item_id": pl.String, "title": pl.String, "categories": _TEXTS}, orient="row")


def add_new_items(store: BundleStore, items: LiveItems, report: Callable[[str], object], keep_bundles: int) -> int:
    """Publish the live bundle with the live catalogue's new items; return their number.

    Without new items it is unchanged.

    Raises as `append_items`.
    """
    raw = new_items(items, store)
    if not len(raw):
        return 0
    if has_given_codes(live := store.live()):
        report(
            f"{len(raw)} new items wait: the codes of {live.version} came from an index; add them by add-items --index"
        )
        return 0
    bundle, num_new = append_items(store, ItemTable(Frame(raw, TABLE, is_exact=True)), datetime.now(UTC), report=report)
    store.prune_after_publication(keep_bundles)
    report(f"{num_new} new items; {bundle.version} is live")
    return num_new


def main() -> None:
    """Add new items to the bundle of each model name. Exits with the errors of all that failed, or for bad settings."""
    failures = []
    try:
        settings = load_settings()
    except ConfigError as error:
        sys.exit(str(error))
    configure_logging("warning", "release", settings.log_file)
    try:
        items = read_live_items(settings)
    except DependencyUnavailable as error:
        sys.exit(str(error))
    for name in settings.served_names:
        try:
            add_new_items(BundleStore.of(settings, name), items.of(tenant_of_name(name)), print, settings.keep_bundles)
        except _FAILURES as error:
            failures.append(f"{name}: {error}")
    sys.exit("\n".join(failures) or None)


if __name__ == "__main__":
    main()
