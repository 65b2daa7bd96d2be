"""A data plane on fakes with a catalogue of twenty items, for the tests of the doors."""

import atexit
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from models.catalogue import Catalogue
from models.registry.bundle import Bundle
from models.registry.name_record import DEFAULT_NAME
from models.registry.store import BundleStore
from models.similar import SIMILAR, SimilarTable
from services.contracts.access import ANYONE, Priority
from services.contracts.features import PrecomputedList, UserFeatures
from services.contracts.recommend import Recommendation, RecommendRequest
from services.contracts.text import TextWriter
from services.features.page_key import FilePageKey
from services.gateway.access.authorize import KeyedAccess
from services.gateway.access.keyring import KeyRing
from services.gateway.access.keys import KeysFile, StoredKey, write_keys
from services.gateway.access.shared_rates import SharedRates
from services.gateway.access.tenants import FollowedTenants, StoredTenant, TenantsFile, write_tenants
from services.gateway.build import PlaneConfig, Ports, build_data_plane
from services.gateway.data_plane import DataPlane
from services.gateway.overload.admission import AdmissionLimits
from services.gateway.request.live_bundle import WishReader
from services.gateway.text.tier import TextLimits, TextTier
from services.gateway.users.erase import BrokerKeeps
from services.router.breaker import Breaker
from services.router.deadline import Arrival, DeadlineLimits
from services.router.policy import LlmRule
from tests.support.gateway.fakes import (
    FakeFeatures,
    FakeItemTopic,
    FakeLlm,
    FakeLog,
    FakeReader,
    FakeReceipts,
    FakeShelf,
    FakeStudent,
)

NUM_ITEMS = 20
VERSION = "v1"
MAX_BODY_BYTES = 15_000
NOW_S = 1_800_000_000.0
BREAKER_FAILURES = 2


def catalogue_of(num_items: int = NUM_ITEMS) -> Catalogue:
    """Return items i00, i01, ... in the categories "even" and "odd"; a lower index is more popular."""
    return Catalogue(
        item_ids=tuple(f"i{index:02}" for index in range(num_items)),
        titles=tuple(f"Item {index}" for index in range(num_items)),
        categories=tuple(("even",) if index % 2 == 0 else ("odd",) for index in range(num_items)),
        codes=np.arange(num_items, dtype=np.int32)[:, None],
        level_sizes=(num_items,),
        popularity=np.arange(num_items, 0, -1, dtype=np.float64),
    )


def ring_of(num_items: int) -> SimilarTable:
    """Return a table where an item's neighbours are the next three items by index, modulo the number of items."""
    neighbours = (np.arange(num_items)[:, None] + np.arange(1, 4)) % num_items
    return SimilarTable(neighbours.astype(np.int32), np.tile(np.array([0.75, 0.5, 0.25], np.float16), (num_items, 1)))


def publish(root: Path, version: str, catalogue: Catalogue, **about: Any) -> None:
    """Publish and promote a bundle of only a catalogue and similar items; `about` is added to its manifest."""
    add_version(root, version, catalogue, **about)
    BundleStore(root).promote(version)


def add_version(root: Path, version: str, catalogue: Catalogue, **about: Any) -> None:
    """Publish such a bundle without promoting it."""
    source = root.parent / f"source-{version}"
    source.mkdir()
    catalogue.save(source / "catalogue.parquet")
    ring_of(len(catalogue.item_ids)).save(source / SIMILAR)
    BundleStore(root).publish(source, version, {"dataset": "toy", **about})


@cache
def usual_bundles() -> Path:
    """Publish the usual bundle once per process: its disk syncs dominate the time to build a world."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    publish(folder / "bundles", VERSION, catalogue_of())
    return folder / "bundles"


def user(*history: str, newest_ms: int | None = None, listed: tuple[str, ...] = (), **stored: Any) -> UserFeatures:
    """Return a user with this history and, if `listed` is given, a fresh stored list."""
    newest_ms = int(NOW_S * 1_000) - 5_000 if newest_ms is None and history else newest_ms
    row_us = newest_ms * 1_000 if newest_ms is not None else 0
    precomputed = None
    if listed:
        fields = {"bundle_version": VERSION, "made_from_row_us": row_us, **stored}
        scores = tuple(1.0 - position / 100 for position in range(len(listed)))
        precomputed = PrecomputedList(item_ids=listed, scores=scores, **fields)
    return UserFeatures(
        history_item_ids=history,
        newest_event_time_ms=newest_ms,
        num_events=len(history),
        as_of_us=row_us,
        precomputed=precomputed,
    )


def standard_users() -> dict[str, UserFeatures]:
    """Return one user per tier, and some edge cases."""
    everything = tuple(f"i{index:02}" for index in range(NUM_ITEMS))
    return {
        "listed": user("i00", "i01", "i02", listed=tuple(f"i{index:02}" for index in range(5, 17))),
        "long": user("i00", "i01", "i02", "i03"),
        "short": user("i00"),
        "stale": user("i00", "i01", "i02", listed=("i05", "i06"), made_from_row_us=1),
        "foreign": user("i00", "i01", "i02", listed=("i05", "i06"), bundle_version="v0"),
        "sated": user(*everything),
        "dropouts": user("gone1", "gone2", "gone3"),
    }


def no_user_data(user_id: str) -> dict[str, Any]:
    """Return the data of a user without stored data."""
    kept: dict[str, Any] = {name: [] for name in ("shown", "lists", "explanations", "events", "impressions")}
    return {"user_id": user_id, "history": None, **kept}


CONFIG = PlaneConfig(
    deadlines=DeadlineLimits(default_ms=10_000, min_ms=5, max_ms=50_000, reserve_ms=8.0),
    admission=AdmissionLimits(max_in_flight=256, max_delay_s=60.0, max_busy=1e9),
    feature_timeout_s=60.0,
    llm_rule=LlmRule(min_history=3),
    max_llm_in_flight=8,
    first_llm_prediction_s=0.0,
    breaker_failures=2,
    breaker_open_s=60.0,
    bundle_poll_s=60.0,
    popular_refresh_s=60.0,
    max_events_per_request=50,
    broker_keeps=BrokerKeeps(events_ms=7 * 86_400_000, dead_letters_ms=30 * 86_400_000),
    record_every_s=0.0,
)


@dataclass
class World:
    """A data plane, and the fakes behind its ports."""

    plane: DataPlane
    features: FakeFeatures
    llm: FakeLlm
    student: FakeStudent
    reader: FakeReader
    events: FakeLog
    impressions: FakeLog
    shelf: FakeShelf
    registry: CollectorRegistry
    receipts: FakeReceipts
    items: FakeItemTopic
    others: Mapping[str, FakeLlm]

    async def recommend(
        self, user_id: str | None = "long", priority: Priority = ANYONE.priority, **fields: Any
    ) -> Recommendation:
        """Request three items as a door does; the default user "long" is answered by the LLM."""
        request = RecommendRequest(user_id=user_id, **{"request_id": "r", "k": 3, **fields})
        return await self.plane.recommend(
            request, Arrival(time.monotonic()), "rest", replace(ANYONE, priority=priority)
        )

    def metric(self, name: str, /, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0

    def strain(self, num_units: int) -> None:
        """Report a late event loop to admission until the strain is this high; the windows end after the test."""
        look_s = time.monotonic() + 86_400
        while self.plane.load.admission.strain < num_units:
            look_s += 0.5
            self.plane.load.admission.looked(look_s, 1_200.0, 0.0)


def make_world(
    root: Path,
    writer: TextWriter | None = None,
    others: Mapping[str, FakeLlm] = {},
    load_reader: Callable[[Bundle, Catalogue], WishReader | None] | None = None,
    ports: Mapping[str, Any] = {},
    **config: Any,
) -> World:
    """Build a data plane on fakes.

    Args:
        writer: The text writer, if any.
        others: LLMs of served names other than the default.
        load_reader: Loads a bundle's reader of wishes; by default the fake.
        ports: Ports that replace the fakes.
        config: Fields of CONFIG to replace.
    """
    features, student, events, impressions = FakeFeatures(standard_users()), FakeStudent(), FakeLog(), FakeLog()
    llm = FakeLlm([f"i{index:02}" for index in range(4, NUM_ITEMS)], VERSION)
    reader = FakeReader()
    shelf, registry, receipts, items = FakeShelf(), CollectorRegistry(), FakeReceipts(), FakeItemTopic()
    made = Ports(
        bundles=BundleStore(root),
        load_student=lambda _bundle, _catalogue: student,
        load_reader=load_reader or (lambda _bundle, _catalogue: reader),
        features=features,
        llms={DEFAULT_NAME: llm, **others},
        events=events,
        impressions=impressions,
        explanations=shelf,
        receipts=receipts,
        page_key=FilePageKey(b"a key of these tests"),
        user_data=no_user_data,
        live_items=items.live_items,
        item_reader=items,
        item_log=items,
        registry=registry,
        text_writer=writer,
        wall_clock=lambda: NOW_S,
    )
    plane = build_data_plane(replace(made, **ports), replace(CONFIG, **config))
    return World(plane, features, llm, student, reader, events, impressions, shelf, registry, receipts, items, others)


@asynccontextmanager
async def started_world(
    root: Path, writer: TextWriter | None = None, about: Mapping[str, Any] = {}, **config: Any
) -> AsyncIterator[World]:
    """Yield a started world on a bundle published below `root`; `about` is added to its manifest."""
    if about:
        publish(root / "bundles", VERSION, catalogue_of(), **about)
    else:
        shutil.copytree(usual_bundles(), root / "bundles")
    world = make_world(root / "bundles", writer, **config)
    await world.plane.start()
    yield world
    await world.plane.stop()


def let_write(
    world: World, writer: TextWriter, limits: TextLimits, clock: Callable[[], float] = time.monotonic
) -> TextTier:
    """Install this writer in the world's text tier, with eight slots and a ten-second breaker."""
    world.plane.text = TextTier(
        writer=writer,
        breaker=Breaker(BREAKER_FAILURES, 10.0),
        load=world.plane.load,
        report=world.plane.text_report,
        limits=limits,
        num_places=8,
        clock=clock,
    )
    return world.plane.text


def keyed_access(folder: Path, *keys: StoredKey, max_k: int = 100, tenants: Sequence[StoredTenant] = ()) -> KeyedAccess:
    """Return access control with these keys and tenants, stored in the folder."""
    path, tenants_path = folder / "keys.json", folder / "tenants.json"
    write_keys(path, KeysFile(keys=keys))
    write_tenants(tenants_path, TenantsFile(tenants=tuple(tenants)))
    return KeyedAccess(KeyRing(path, max_k), FollowedTenants(tenants_path), SharedRates())
