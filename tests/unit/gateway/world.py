"""One data plane on fakes with a small catalogue of twenty items: what stands behind both doors in these tests."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from models.catalogue import Catalogue
from models.registry import BundleStore
from services.contracts.features import PrecomputedList, UserFeatures
from services.contracts.text import TextWriter
from services.gateway.events.impressions import Impressions
from services.gateway.events.record import RecordEvents
from services.gateway.recommend import Recommend
from services.gateway.records.explanations import Explanations
from services.gateway.records.report import Report
from services.gateway.request.data_plane import DataPlane
from services.gateway.request.load_monitor import LoadWatch
from services.gateway.text.metrics import TextReport
from services.gateway.text.rationale import RationaleWriter
from services.gateway.text.tier import TextLimits, TextTier
from services.gateway.tiers.live_bundle import LiveBundle
from services.gateway.tiers.llm import LlmTier
from services.gateway.tiers.popular import Popular
from services.observability.metrics import GatewayMetrics, TextMetrics
from services.router.admission import Admission, AdmissionLimits
from services.router.breaker import Breaker
from services.router.deadline import DeadlineLimits
from services.router.gate import LlmGate
from services.router.predictor import LatencyPredictor
from tests.support.fakes import FakeFeatures, FakeLlm, FakeLog, FakeShelf, FakeStudent

NUM_ITEMS = 20
VERSION = "v1"
MAX_BODY_BYTES = 15_000
NOW_S = 1_800_000_000.0


def catalogue_of(num_items: int = NUM_ITEMS) -> Catalogue:
    """Items i00, i01, ...: even ones are odd-category "even", the lower the index the more popular."""
    return Catalogue(
        item_ids=tuple(f"i{index:02}" for index in range(num_items)),
        titles=tuple(f"Item {index}" for index in range(num_items)),
        categories=tuple(("even",) if index % 2 == 0 else ("odd",) for index in range(num_items)),
        codes=np.arange(num_items, dtype=np.int32)[:, None],
        level_sizes=(num_items,),
        popularity=np.arange(num_items, 0, -1, dtype=np.float64),
    )


def publish(root: Path, version: str, catalogue: Catalogue, **about: Any) -> None:
    """Publish and promote a bundle that holds a catalogue alone; `about` is what else its manifest says."""
    source = root.parent / f"source-{version}"
    source.mkdir()
    catalogue.save(source / "catalogue.parquet")
    store = BundleStore(root)
    store.publish(source, version, {"dataset": "toy", **about})
    store.promote(version)


def user(*history: str, newest_ms: int | None = None, listed: tuple[str, ...] = (), **stored: Any) -> UserFeatures:
    """Build a user with this history and, when `listed` is given, a fresh precomputed list."""
    newest_ms = int(NOW_S * 1_000) - 5_000 if newest_ms is None and history else newest_ms
    precomputed = None
    if listed:
        fields = {"bundle_version": VERSION, "watermark_ms": newest_ms or 0, **stored}
        scores = tuple(1.0 - place / 100 for place in range(len(listed)))
        precomputed = PrecomputedList(item_ids=listed, scores=scores, **fields)
    return UserFeatures(
        history_item_ids=history, newest_event_time_ms=newest_ms, num_events=len(history), precomputed=precomputed
    )


def standard_users() -> dict[str, UserFeatures]:
    """One user per tier, and some at the edges."""
    everything = tuple(f"i{index:02}" for index in range(NUM_ITEMS))
    return {
        "listed": user("i00", "i01", "i02", listed=tuple(f"i{index:02}" for index in range(5, 17))),
        "long": user("i00", "i01", "i02", "i03"),
        "short": user("i00"),
        "stale": user("i00", "i01", "i02", listed=("i05", "i06"), watermark_ms=1),
        "foreign": user("i00", "i01", "i02", listed=("i05", "i06"), bundle_version="v0"),
        "sated": user(*everything),
        "dropouts": user("gone1", "gone2", "gone3"),
    }


@dataclass
class World:
    """Everything behind the doors, open to the tests."""

    features: FakeFeatures
    llm: FakeLlm
    student: FakeStudent
    events: FakeLog
    impressions: FakeLog
    metrics: GatewayMetrics
    registry: CollectorRegistry
    live: LiveBundle
    popular: Popular
    admission: Admission
    plane: DataPlane
    root: Path
    shelf: FakeShelf
    load: LoadWatch

    def metric(self, name: str, **labels: str) -> float:
        """Read one sample; 0 when it was never touched."""
        return self.registry.get_sample_value(name, labels) or 0.0


def tier_of(writer: TextWriter, load: LoadWatch, report: TextReport) -> TextTier:
    """Put a writer behind its bounds; its wall clock stands still, so that it is never late by itself."""
    return TextTier(
        writer=writer,
        breaker=Breaker(2, 60.0),
        load=load,
        report=report,
        limits=TextLimits(),
        wall_clock=lambda: NOW_S,
    )


def make_world(root: Path, writer: TextWriter | None = None, reserve_ms: float = 8.0) -> World:
    """Compose a plane as the composition root does, on fakes; `writer` writes text, and `reserve_ms` is kept for answering."""
    registry = CollectorRegistry()
    metrics = GatewayMetrics(registry)
    features, student, events, impressions = FakeFeatures(standard_users()), FakeStudent(), FakeLog(), FakeLog()
    llm = FakeLlm([f"i{index:02}" for index in range(4, NUM_ITEMS)], VERSION)
    store, about = BundleStore(root), (metrics.bundle_info, metrics.bundle_quality)
    live = LiveBundle(store, lambda _bundle, _catalogue: student, 60.0, *about)
    popular = Popular(live, features, 60.0)
    gate = LlmGate(Breaker(2, 60.0), LatencyPredictor(0.0), max_in_flight=8)
    report = Report(metrics)
    admission = Admission(AdmissionLimits(max_in_flight=256, max_delay_s=60.0, max_busy=1e9))
    load = LoadWatch(admission, metrics.strain)
    shelf = FakeShelf()
    explanations = Explanations(shelf, metrics.explanations)
    text_report = TextReport(TextMetrics(registry))
    tier = None if writer is None else tier_of(writer, load, text_report)
    recommend = Recommend(
        live=live,
        features=features,
        llm=LlmTier(llm, gate, metrics.breaker_open),
        popular=popular,
        impressions=Impressions(impressions, metrics.impressions),
        report=report,
        explanations=explanations,
        load=load,
        rationale=RationaleWriter(tier, text_report.metrics.rationales, wall_clock=lambda: NOW_S),
        limits=DeadlineLimits(default_ms=1_000, min_ms=5, max_ms=5_000, reserve_ms=reserve_ms),
        feature_timeout_s=0.05,
        min_history_for_llm=3,
        wall_clock=lambda: NOW_S,
    )
    plane = DataPlane(
        recommend=recommend,
        record=RecordEvents(events, max_events=50, wall_clock=lambda: NOW_S),
        live=live,
        popular=popular,
        producers=(events, impressions),
        report=report,
        explanations=explanations,
        load=load,
        text_report=text_report,
        text=tier,
    )
    return World(
        features,
        llm,
        student,
        events,
        impressions,
        metrics,
        registry,
        live,
        popular,
        admission,
        plane,
        root,
        shelf,
        load,
    )
