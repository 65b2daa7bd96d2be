"""The live bundle follows the registry's pointer, is replaced as a whole, and survives bad bundles."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from models.registry import BundleStore
from services.errors import DependencyUnavailable
from services.gateway.request.live_bundle import LiveBundle
from services.observability.metrics import GatewayMetrics
from tests.support.gateway.fakes import FakeStudent
from tests.support.wait import until
from tests.unit.gateway.world import catalogue_of, publish


class Follower:
    """A live bundle over a folder, and how it is published to."""

    def __init__(self, root: Path) -> None:
        self.root, self.registry = root, CollectorRegistry()
        metrics = GatewayMetrics(self.registry)
        self.live = LiveBundle(BundleStore(root), lambda _bundle, _catalogue: FakeStudent(), 0.01, metrics)

    async def follow_to(self, version: str, num_items: int = 5) -> None:
        """Publish a version and wait until it is live."""
        publish(self.root, version, catalogue_of(num_items))
        await until(lambda: self.live.current().version == version)

    def info(self, version: str, role: str = "live") -> float | None:
        """Return whether the metric says that this version has the role."""
        labels = {"version": version, "name": "default", "role": role}
        return self.registry.get_sample_value("tailrace_bundle_info", labels)


@pytest.fixture
async def started(tmp_path: Path) -> AsyncIterator[Follower]:
    """A follower that has begun with v1."""
    follower = Follower(tmp_path / "bundles")
    publish(follower.root, "v1", catalogue_of())
    await follower.live.start()
    yield follower
    await follower.live.stop()


async def test_before_the_first_promotion_there_is_none(tmp_path: Path) -> None:
    """Access raises DependencyUnavailable, which has a retry time."""
    live = Follower(tmp_path / "bundles").live
    await live.refresh()

    assert not live.is_loaded
    with pytest.raises(DependencyUnavailable):
        live.current()


async def test_a_promotion_is_followed_in_the_background(started: Follower) -> None:
    """The old version stays live until the new one is loaded; the metric names the live one alone.

    A bundle is live with its tables of ids and categories made: they take half a second at a million items, which no request may wait for.
    """
    before = started.live.current().version
    await started.follow_to("v2")

    catalogue = started.live.current().catalogue
    assert (before, len(catalogue.item_ids)) == ("v1", 5)
    assert {"index_of", "_items_by_category"} <= vars(catalogue).keys()
    assert [started.info(version) for version in ("v1", "v2")] == [0, 1]


@pytest.mark.parametrize("metrics", [{"decoder": {"hr@10": None}}, {"decoder": 0.5}, []])
async def test_a_manifest_with_bad_metrics_does_not_stop_the_follower(started: Follower, metrics: object) -> None:
    """The old one stays live, and a later good one is loaded."""
    publish(started.root, "odd", catalogue_of(), metrics=metrics)
    await started.live.refresh()
    kept = started.live.current().version
    await started.follow_to("v3")

    assert kept == "v1"
