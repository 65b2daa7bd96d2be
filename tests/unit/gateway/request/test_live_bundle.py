"""The live bundle follows the registry's pointer, is replaced as a whole, and survives bad bundles."""

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge

from models.registry import BundleStore
from services.errors import DependencyUnavailable
from services.gateway.request.live_bundle import LiveBundle
from tests.support.gateway.fakes import FakeStudent
from tests.support.wait import until
from tests.unit.gateway.world import catalogue_of, publish


def follower(root: Path) -> tuple[LiveBundle, CollectorRegistry]:
    """A live bundle over a folder."""
    registry = CollectorRegistry()
    info = Gauge("info", "", ["version"], registry=registry)
    quality = Gauge("quality", "", ["version", "model", "metric"], registry=registry)
    return LiveBundle(BundleStore(root), lambda _bundle, _catalogue: FakeStudent(), 0.01, info, quality), registry


async def test_before_the_first_promotion_there_is_none(tmp_path: Path) -> None:
    """Access raises DependencyUnavailable, which has a retry time."""
    live, _ = follower(tmp_path / "bundles")
    await live.refresh()

    assert not live.is_loaded
    with pytest.raises(DependencyUnavailable):
        live.current()


async def test_a_promotion_is_followed_in_the_background(tmp_path: Path) -> None:
    """The old version stays live until the new one is loaded; the metric names the live one alone."""
    root = tmp_path / "bundles"
    publish(root, "v1", catalogue_of())
    live, registry = follower(root)
    await live.start()
    before = live.current().version

    publish(root, "v2", catalogue_of(5))
    await until(lambda: live.current().version == "v2")
    await live.stop()

    assert before == "v1"
    assert len(live.current().catalogue.item_ids) == 5
    assert registry.get_sample_value("info", {"version": "v1"}) == 0
    assert registry.get_sample_value("info", {"version": "v2"}) == 1


@pytest.mark.parametrize("metrics", [{"decoder": {"hr@10": None}}, {"decoder": 0.5}, []])
async def test_a_manifest_with_bad_metrics_does_not_stop_the_follower(tmp_path: Path, metrics: object) -> None:
    """The old one stays live, and a later good one is loaded."""
    root = tmp_path / "bundles"
    publish(root, "v1", catalogue_of())
    live, _ = follower(root)
    await live.start()

    publish(root, "odd", catalogue_of(), metrics=metrics)
    await live.refresh()
    kept = live.current().version
    publish(root, "v3", catalogue_of())
    await until(lambda: live.current().version == "v3")
    await live.stop()

    assert kept == "v1"


async def test_a_bundle_is_live_with_its_tables_made(tmp_path: Path) -> None:
    """The tables of ids and categories take half a second at a million items, which no request may wait for."""
    root = tmp_path / "bundles"
    publish(root, "v1", catalogue_of())
    live, _ = follower(root)
    await live.refresh()

    assert {"index_of", "_items_by_category"} <= vars(live.current().catalogue).keys()
