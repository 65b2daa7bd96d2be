"""Sources counted again from newer events, without training."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import polars as pl

from models.registry.store import BundleStore
from pipelines.publication.refresh_sources import refresh_sources
from tests.unit.pipelines.conftest import MADE_AT, Built

MIXER = {
    "sources": {name: {"newest": 5, "decay": 0.5} for name in ("transitions", "similar")},
    "blends": {"student": [{"history": [0, None], "weights": {"model": 1.0, "transitions": 1.0}}]},
}


def events_of(*users: list[str]) -> pl.DataFrame:
    """Return the users' events as the stage `ingest` writes them, one second apart."""
    rows = [
        (f"u{number}", item, datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=index), 1.0)
        for number, items in enumerate(users)
        for index, item in enumerate(items)
    ]
    return pl.DataFrame(rows, schema=["user_id", "item_id", "event_time", "count"], orient="row")


def test_fresh_counts_serve_with_the_same_weights(built: Built, tmp_path: Path) -> None:
    """The child bundle's transitions are counted in the events; models and mixer are the parent's."""
    store = BundleStore(tmp_path / "bundles")
    parent = store.publish(built.assembled / "bundle", "v1", {"mixer": MIXER})
    store.promote("v1")

    child = refresh_sources(store, events_of(["i03", "i09"], ["i03", "i09"], ["i03", "unknown", "i05"]), MADE_AT)

    catalogue, mixer = child.catalogue(), child.mixer(child.catalogue())
    assert store.live_version() == child.version != "v1"
    assert mixer is not None
    items, shares = mixer.sources["transitions"].read(catalogue.indices(["i03"]))
    assert items.tolist() == catalogue.indices(["i09", "i05"])
    np.testing.assert_allclose(shares, [2 / 3, 1 / 3], atol=1e-3)
    changed = {name for name, digest in child.manifest["files"].items() if parent.manifest["files"].get(name) != digest}
    assert changed
    assert all(name.startswith(("similar/", "sources/transitions/")) for name in changed)
    assert child.manifest["mixer"] == MIXER
    assert child.lineage["items_added_to"] == "v1"


def test_a_bundle_without_sources_stays_live(built: Built, tmp_path: Path) -> None:
    """No child is published for a bundle that mixes no sources."""
    store = BundleStore(tmp_path / "bundles")
    store.publish(built.assembled / "bundle", "v1", {})
    store.promote("v1")

    assert refresh_sources(store, events_of(["i03", "i09"]), MADE_AT).version == "v1"
