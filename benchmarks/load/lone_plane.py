"""A gateway's data plane in this process, without stores, broker and LLM: a request's cost without its transport.

Its student ranks by made-up vectors of unit length, and no user is known.
"""

import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from models.catalogue import Catalogue
from models.mixer import Added
from models.registry.bundle import Bundle
from models.registry.store import BundleStore
from models.similar import SIMILAR, SimilarTable
from services.contracts.features import RecentPopularity, UserFeatures
from services.gateway.build import PlaneConfig, Ports, build_data_plane
from services.gateway.data_plane import DataPlane
from services.gateway.overload.admission import AdmissionLimits
from services.gateway.ranking import best_allowed
from services.gateway.request.live_bundle import WishReader
from services.gateway.tiers.llm import Llm
from services.gateway.users.erase import BrokerKeeps
from services.items.live_items import LiveItems
from services.router.deadline import DeadlineLimits
from services.router.policy import LlmRule

HIDDEN_SIZE = 64
_CONFIG = PlaneConfig(
    deadlines=DeadlineLimits(default_ms=1_000, min_ms=5, max_ms=5_000, reserve_ms=8.0),
    admission=AdmissionLimits(max_in_flight=256, max_delay_s=60.0, max_busy=1e9),
    feature_timeout_s=0.05,
    llm_rule=LlmRule(min_history=3),
    max_llm_in_flight=8,
    first_llm_prediction_s=0.0,
    breaker_failures=2,
    breaker_open_s=60.0,
    bundle_poll_s=60.0,
    popular_refresh_s=60.0,
    max_events_per_request=50,
    broker_keeps=BrokerKeeps(events_ms=1, dead_letters_ms=1),
)


LoadReader = Callable[[Bundle, Catalogue], WishReader | None]


@asynccontextmanager
async def lone_plane(
    catalogue: Catalogue, load_reader: LoadReader = lambda _bundle, _catalogue: None
) -> AsyncIterator[DataPlane]:
    """Yield a started data plane on a bundle of this catalogue, with this reader of wishes."""
    with tempfile.TemporaryDirectory() as folder:
        source, store = Path(folder, "source"), BundleStore(Path(folder, "bundles"))
        write_bundle(catalogue, source)
        store.publish(source, "v1", {"dataset": "made up"})
        store.promote("v1")
        plane = plane_over(store, ("default",), CollectorRegistry(), load_reader)
        await plane.start()
        yield plane
        await plane.stop()


def plane_over(
    store: BundleStore,
    names: Sequence[str],
    registry: CollectorRegistry,
    load_reader: LoadReader = lambda _bundle, _catalogue: None,
    llms: Mapping[str, Llm] | None = None,
    items: LiveItems | None = None,
    **config: Any,
) -> DataPlane:
    """Return a data plane that serves these names of a store, not started; `config` replaces fields."""
    nothing: Any = _Nothing()
    ports = Ports(
        bundles=store,
        load_student=lambda _bundle, loaded: _Student(len(loaded.item_ids)),
        load_reader=load_reader,
        features=nothing,
        llms=llms or dict.fromkeys(names, nothing),
        events=nothing,
        impressions=nothing,
        explanations=nothing,
        receipts=nothing,
        page_key=nothing,
        user_data=lambda _user_id: {},
        live_items=items or LiveItems(),
        item_reader=nothing,
        item_log=nothing,
        registry=registry,
    )
    return build_data_plane(ports, replace(_CONFIG, **config))


def write_bundle(catalogue: Catalogue, folder: Path) -> None:
    """Write the files of a bundle of this catalogue, apart from the models."""
    num_items = len(catalogue.item_ids)
    folder.mkdir()
    catalogue.save(folder / "catalogue.parquet")
    SimilarTable(np.zeros((num_items, 1), np.int32), np.ones((num_items, 1), np.float16)).save(folder / SIMILAR)


@cache
def _made_up_vectors(num_items: int) -> np.ndarray:
    vectors = np.random.default_rng(0).normal(size=(num_items, HIDDEN_SIZE)).astype(np.float32)
    unit: np.ndarray = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return unit


class _Student:
    """A copy of made-up vectors: drawing them at each load would cost more than a load."""

    def __init__(self, num_items: int) -> None:
        self._vectors: np.ndarray = _made_up_vectors(num_items).copy()

    def vectors(self, items: np.ndarray) -> np.ndarray:
        rows: np.ndarray = self._vectors[items]
        return rows

    def rank(
        self, history: Sequence[int], allowed: np.ndarray, k: int, added: Added | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        scores = self._vectors @ self._vectors[history[-1]]
        order = np.argsort(-scores, kind="stable")
        return best_allowed(order, scores[order], allowed, k)


class _Nothing:
    """Every port: empty stores, and logs that take every record."""

    def start(self, *_: object) -> None: ...

    def stop(self) -> None: ...

    async def read(self, *_: object) -> UserFeatures:
        return UserFeatures()

    async def read_popular(self, _timeout_s: float) -> RecentPopularity:
        return RecentPopularity()

    async def catch_up(self, _timeout_s: float) -> None: ...

    async def put(self, *_: object) -> None: ...

    async def get(self, _own: bytes | None, _timeout_s: float) -> bytes:
        return b"a key of this process"

    async def close(self) -> None: ...

    def offer(self, _record: tuple[bytes, bytes], on_done: Callable[[bool], None]) -> bool:
        on_done(True)
        return True

    def replicas(self) -> Mapping[str, object]:
        return {}
