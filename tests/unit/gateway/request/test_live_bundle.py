"""The live bundle follows the registry's pointer, is replaced as a whole, and survives bad bundles."""

import json
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from models.registry.canary import CanaryStage
from models.registry.store import BundleStore
from services.contracts.items import ItemState
from services.errors import BundleIncomplete, DependencyUnavailable
from services.gateway.request.live_bundle import Live, LiveBundle
from services.items.live_items import Knowledge, LiveItems
from services.observability.metrics import GatewayMetrics
from services.residency.state import ModelBytes
from tests.support.gateway.fakes import FakeStudent
from tests.support.training.bundles import point_to
from tests.unit.gateway.world import add_version, catalogue_of, publish


class Follower:
    """A live bundle over a bundle store, with publishing."""

    def __init__(self, root: Path) -> None:
        self.root, self.registry = root, CollectorRegistry()
        metrics = GatewayMetrics(self.registry)
        self.live = LiveBundle(BundleStore(root), lambda _bundle, _catalogue: FakeStudent(), 0.01, metrics)

    async def follow_to(self, version: str, num_items: int = 5) -> None:
        """Publish a version, and poll the name."""
        publish(self.root, version, catalogue_of(num_items))
        await self.live.refresh()

    def info(self, version: str, role: str = "live") -> float | None:
        """Return 1 if the metric gives this version the role, else 0; None if absent."""
        labels = {"version": version, "name": "default", "role": role}
        return self.registry.get_sample_value("tailrace_bundle_info", labels)


@pytest.fixture
async def started(tmp_path: Path) -> Follower:
    """A follower that started with v1."""
    follower = Follower(tmp_path / "bundles")
    await follower.follow_to("v1", 20)
    return follower


async def test_before_the_first_promotion_there_is_none(tmp_path: Path) -> None:
    """Access raises DependencyUnavailable, which has a retry time."""
    live = Follower(tmp_path / "bundles").live
    await live.refresh()

    assert not live.is_loaded
    with pytest.raises(DependencyUnavailable):
        live.current()


async def test_a_loaded_bundle_does_not_keep_lists_of_its_manifest(started: Follower) -> None:
    """A garbage collection would visit each popular item and file of each loaded bundle, and requests wait for it."""
    manifest = json.loads((started.root / "v1" / "manifest.json").read_text())

    assert manifest.keys() - started.live.current().manifest.keys() == {"popular", "files"}
    assert started.live.partial().manifest == started.live.current().manifest


async def test_popular_items_are_read_once(started: Follower) -> None:
    """They answer from memory after `learn`, and are read again for another version."""
    started.live.learn()
    (started.root / "v1" / "manifest.json").rename(started.root / "elsewhere")
    first = [started.live.partial() for _ in range(2)]
    await started.follow_to("v2")
    later = started.live.partial()

    assert [(live.version, len(live.catalogue.item_ids)) for live in (*first, later)] == [("v1", 20)] * 2 + [("v2", 5)]


async def test_popular_items_are_made_at_once_only_if_nothing_is_waited_for(tmp_path: Path) -> None:
    """They need a read before `learn`, another thread's layouts, or states that are unknown."""
    publish(root := tmp_path / "bundles", "v1", catalogue_of(5))
    items = LiveItems()
    live = LiveBundle(
        BundleStore(root), lambda _bundle, _catalogue: FakeStudent(), 1.0, GatewayMetrics(CollectorRegistry()), items
    )
    unread = live.partial_at_once()
    live.learn()
    first = live.partial_at_once()
    with items._lock:
        locked = live.partial_at_once()
    items.knowledge = Knowledge.NONE
    unknown = live.partial_at_once()
    items.knowledge = Knowledge.CURRENT

    assert first is not None
    assert first.catalogue.item_ids == live.partial().catalogue.item_ids
    assert (unread, locked, unknown) == (None, None, None)


async def test_popular_items_of_an_absent_name_follow_their_own_states_only(tmp_path: Path) -> None:
    """Items of an import are not laid out for each absent name, before or after its popular items were made."""
    publish(root := tmp_path / "bundles", "v1", catalogue_of(5))
    items = LiveItems()
    live = LiveBundle(
        BundleStore(root), lambda _bundle, _catalogue: FakeStudent(), 1.0, GatewayMetrics(CollectorRegistry()), items
    )
    live.learn()
    imported = [(f"new-{number}", ItemState(item_id=f"new-{number}")) for number in range(1_000)]
    hidden = [(item_id, ItemState(item_id=item_id, available=False)) for item_id in catalogue_of(5).item_ids[:2]]
    items.apply([*imported, hidden[0]])
    partial = live.partial_at_once()
    items.apply([*imported, hidden[1]])

    assert partial is not None
    for lives in (partial, live.partial()):
        assert lives.items.num_named == 5
        assert lives.items.columns.available[:5].tolist() == [False, False, True, True, True]


async def test_a_version_that_cannot_be_loaded_keeps_no_memory(tmp_path: Path) -> None:
    """The memory of a refused version is given back: only the versions that serve are counted."""
    follower, sizes = Follower(tmp_path / "bundles"), list[ModelBytes]()

    def reserve(size: ModelBytes) -> bool:
        sizes.append(size)
        return True

    def refuse_v2(live: Live) -> None:
        if live.version == "v2":
            raise BundleIncomplete("v2: refused")

    follower.live.reserve = reserve
    follower.live.before_swap(refuse_v2)
    await follower.follow_to("v1", 20)
    await follower.follow_to("v2", 30)

    assert follower.live.current().version == "v1"
    assert [size.own > sizes[0].own for size in sizes] == [False, True, False]


async def test_popular_items_of_many_bytes_are_not_kept(tmp_path: Path) -> None:
    """A name keeps no more than 32 KiB of popular items; larger ones are read again, and answer the same."""
    root, long = tmp_path / "bundles", "x" * 1_000
    catalogue = replace(catalogue_of(40), titles=tuple(f"{long}{number}" for number in range(40)))
    publish(root, "v1", catalogue)
    live = Follower(root).live
    live.learn()

    assert live._popular is None
    assert set(live.partial().catalogue.titles) == set(catalogue.titles)


async def test_a_fetched_version_is_opened_again_only_if_a_file_is_missing(started: Follower) -> None:
    """Requests for a name that waits for memory fetch it again and again."""
    sizes = [started.live.fetch() for _ in range(2)]
    (started.root / "v1" / "catalogue.parquet").rename(started.root / "elsewhere")

    assert sizes[0] == sizes[1]
    assert sizes[0].total > 0
    with pytest.raises(BundleIncomplete):
        started.live.fetch()

    (started.root / "elsewhere").rename(started.root / "v1" / "catalogue.parquet")
    assert started.live.fetch() == sizes[0]


async def test_a_promotion_is_followed(started: Follower) -> None:
    """The old version stays live until the new version and its lookup tables are loaded."""
    before = started.live.current().version
    await started.follow_to("v2")

    catalogue = started.live.current().catalogue
    assert (before, len(catalogue.item_ids)) == ("v1", 5)
    assert {"index_of", "_items_by_category"} <= vars(catalogue).keys()
    assert [started.info(version) for version in ("v1", "v2")] == [0, 1]


@pytest.mark.parametrize("metrics", [{"decoder": {"hr@10": None}}, {"decoder": 0.5}, []])
async def test_a_manifest_with_bad_metrics_does_not_stop_the_follower(started: Follower, metrics: object) -> None:
    """The old version stays live, and a later good version is loaded."""
    path = started.root / "v1" / "manifest.json"
    shutil.copytree(path.parent, started.root / "odd")
    odd = json.loads(path.read_text()) | {"version": "odd", "metrics": metrics}
    (started.root / "odd" / "manifest.json").write_text(json.dumps(odd))
    point_to(started.root, "odd")
    await started.live.refresh()
    kept = started.live.current().version
    await started.follow_to("v3")

    assert kept == "v1"


@pytest.fixture
async def three(tmp_path: Path) -> BundleStore:
    """A bundle store with v1 live, and v2 and v3."""
    publish(tmp_path / "bundles", "v1", catalogue_of(3))
    for version in ("v2", "v3"):
        add_version(tmp_path / "bundles", version, catalogue_of(3))
    return BundleStore(tmp_path / "bundles")


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    unit_ids=st.lists(st.text(min_size=1, max_size=20), min_size=1, max_size=40),
    shares=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=4, unique=True)
    .map(sorted)
    .filter(lambda shares: shares[0] < 1),
    looks=st.lists(st.booleans(), min_size=6, max_size=6),
)
async def test_a_unit_has_the_same_version_in_each_process_whatever_it_loaded_before(
    three: BundleStore, unit_ids: list[str], shares: list[float], looks: list[bool]
) -> None:
    """Processes agree on a unit's version, growing fractions move no unit back, and stages hold from their time."""
    store, now_ms = three, 1_000
    old, new = (
        LiveBundle(store, lambda *_: FakeStudent(), 60.0, GatewayMetrics(CollectorRegistry())) for _ in range(2)
    )
    store.promote("v1", force=True)
    moves = [
        lambda: store.release("v3", [CanaryStage(0.5, 0.0)], 0),
        lambda: store.promote("v3"),
        lambda: store.promote("v1"),
        lambda: store.release("v2", [CanaryStage(share, 0.0) for share in shares], now_ms),
    ]
    for move, is_seen in zip(moves, looks, strict=False):
        move()
        if is_seen:
            await old.refresh()
    rows: list[list[str]] = []
    for stage in range(len(shares)):
        if stage:
            store.move_canary("v2", stage, now_ms, now_ms)
        for bundle in (old, new):
            await bundle.refresh()
        before, after = ([replica.of_unit(unit, now_ms).version for unit in unit_ids] for replica in (old, new))
        assert before == after
        rows.append(after)

    versions = [set(row) for row in rows]
    early = [new.of_unit(unit, now_ms - 1).version for unit in unit_ids]
    assert all(row <= {"v1", "v2"} for row in versions)
    assert all(b == "v2" for low, high in pairwise(rows) for a, b in zip(low, high, strict=True) if a == "v2")
    assert early == (rows[-2] if len(rows) > 1 else ["v1"] * len(unit_ids))
    assert new.of_unit(None, now_ms).version == "v1"
    assert shares[-1] < 1.0 or versions[-1] == {"v2"}
    store.end_canary("v2")
