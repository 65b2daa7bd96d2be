"""`python -m services.stream`: one stream worker, composed from the settings, until SIGTERM or Ctrl-C."""

import gc
import signal
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from types import FrameType
from typing import Any

import structlog
from prometheus_client import REGISTRY

from models.registry.bundle import Bundle
from models.registry.bundle_follower import BundleFollower, Serving, due_names
from models.registry.store import BundleStore
from services.contracts.erasure import ErasureStore
from services.contracts.event_roles import read_event_roles
from services.contracts.tenant import DEFAULT_TENANT, tenant_of_name
from services.features.erasing import ErasingWriter
from services.features.repo import RepoAddress, ensure_applied
from services.features.schema import USER_HISTORY
from services.features.shown import ShownWriter
from services.features.writer import FeatureWriter
from services.garbage import freeze_start
from services.items.follower import ItemFollower
from services.items.live_items import LiveItems
from services.observability.log_lines import configure_logging
from services.observability.metrics import ItemsMetrics, ProcessMetrics, StreamMetrics
from services.observability.tracing import open_tracing
from services.settings.fetch_pace import FetchWaits
from services.settings.kafka_topics import wanted_topic
from services.settings.settings import Settings, ending_with_error, load_settings
from services.stream.aggregate import history_limits
from services.stream.background import DEFAULT_PACE, Pace, Timer
from services.stream.decode import LoggedImpression
from services.stream.effects import NO_INTERRUPTIONS, Interruptions
from services.stream.erasure.eraser import Eraser, ErasingFiles
from services.stream.impressions.worker import IMPRESSIONS_GROUP, ImpressionWorker
from services.stream.log.kinds import IMPRESSIONS
from services.stream.log.offline_log import OfflineLog
from services.stream.partition_consumer import LogAddress, PartitionConsumer
from services.stream.popularity import ListedItems
from services.stream.rebuild import base_table
from services.stream.worker import StreamWorker

_log = structlog.get_logger()

GROUP = "tailrace-stream"
_IMPRESSION_WAITS = FetchWaits(busy_ms=200, quiet_ms=500, untouched_ms=1_000)
"""Gateways send impressions five times a second, and no caller waits for them."""
_SNAPSHOT_EVERY_S = 10.0
_LIST_EVERY_S = 20.0
_LEAST_PAUSE_S = 0.02
"""Least time between two reads of names' records."""


@ending_with_error()
def main() -> None:
    """Apply events until a signal, then write a last checkpoint and exit. Bad settings exit with their error."""
    settings = load_settings()
    configure_logging(settings.log_level, "worker", settings.log_file)
    stop = threading.Event()

    def end(_signal: int, _frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    ProcessMetrics(REGISTRY, "worker")
    run_worker(settings, stop, StreamMetrics(REGISTRY))


def run_worker(
    settings: Settings,
    stop: threading.Event,
    metrics: StreamMetrics,
    pace: Pace | None = None,
    interruptions: Interruptions | None = None,
    item_metrics: ItemsMetrics | None = None,
) -> None:
    """Apply events until `stop` is set. `item_metrics` are shared by the whole process; None creates them."""
    features = RepoAddress(settings.feature_repo_dir, settings.redis_address)
    ensure_applied(features)
    log = OfflineLog(settings.offline_log_dir)
    impressions = OfflineLog(settings.offline_log_dir, kind=IMPRESSIONS, ledger=log.ledger)
    address = _log_address(settings)
    items = ListedItems()
    counted = ItemsToCount(items)
    pace = pace or DEFAULT_PACE
    listing = _Listing(settings, counted)
    item_follower = _item_follower(settings, counted, item_metrics or ItemsMetrics(REGISTRY))
    tracing = open_tracing(settings.otlp_endpoint, settings.trace_share, "tailrace-stream")
    worker = StreamWorker(
        open_consumer=lambda: PartitionConsumer(address),
        writer=FeatureWriter(features, owner=f"{socket.gethostname()}/worker-{settings.worker_index}"),
        log=log,
        items=items,
        base_table=base_table(settings.offline_log_dir),
        limits=history_limits(settings.history_max_items),
        metrics=metrics,
        pace=pace,
        interruptions=interruptions or NO_INTERRUPTIONS,
        beat=settings.worker_heartbeat.touch,
        tracing=tracing,
        keep_days=settings.log_keep_days,
        roles=read_event_roles(settings.events_file),
        eraser=_eraser(settings, features, log, impressions, pace),
    )
    landing = _impression_worker(settings, features, impressions, metrics, pace)
    for folder in (settings.offline_log_dir, settings.worker_heartbeat.parent):
        folder.mkdir(parents=True, exist_ok=True)
    listing.start()
    shown = threading.Thread(target=landing.run, args=(stop,), name="impressions")
    shown.start()
    item_follower.start()
    freeze_start()  # a full collection of these objects would delay events by a tenth of a second
    worker.run(stop)
    gc.unfreeze()
    _log.info("stopping")
    shown.join()
    listing.stop()
    item_follower.stop()
    tracing.stop()


class _Listing:
    """Follows the records of all served names in one thread, and lists the items of their bundles.

    With many names, only the first and the resident names are listed when `start` returns.
    """

    def __init__(self, settings: Settings, counted: "ItemsToCount") -> None:
        store, self._poll_s = BundleStore.of(settings), settings.bundle_poll_s
        self._followers = {
            name: BundleFollower(store.named(name), Bundle.item_ids, partial(counted.replace, name))
            for name in settings.served_names
        }
        is_many = settings.llm_memory_gib is not None
        self._listed_first = {settings.first_name, *settings.resident_names} if is_many else set(self._followers)
        self._counted = counted
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="listing", daemon=True)

    def start(self) -> None:
        """List the first names, then follow all names in the background."""
        for name in self._listed_first & self._followers.keys():
            self._followers[name].refresh()
        self._counted.list_replaced()
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def _follow(self) -> None:
        while not self._stopped.wait(self._poll_s):
            for name in due_names(self._followers):
                self._followers[name].refresh()
                self._counted.list_replaced()
                if self._stopped.wait(_LEAST_PAUSE_S):
                    return
            self._counted.list_replaced()


class ItemsToCount:
    """Lists the items whose popularity is counted: items of all serving bundles and new items of the live catalogue."""

    def __init__(self, listed: ListedItems) -> None:
        self.live_items = LiveItems()
        self._listed = listed
        self._lock = threading.Lock()
        self._by_name: dict[str, Mapping[str, tuple[str, ...]]] = {}
        self._stated: tuple[int, frozenset[str]] = (0, frozenset())
        self._due = Timer(_LIST_EVERY_S)
        self._is_replaced = False
        self._next_s = 0.0

    def replace(self, name: str, serving: Serving[tuple[str, ...]]) -> None:
        """Set the bundles that a name serves now; `list_replaced` lists their items."""
        if self._by_name.get(name, {}).keys() != serving.loaded.keys():
            with self._lock:
                self._by_name[name] = serving.loaded
                self._is_replaced = True

    def list_replaced(self) -> None:
        """List the items of replaced bundles, spending at most a tenth of the time: a listing covers all names."""
        began_s = time.monotonic()
        if not self._is_replaced or began_s < self._next_s:
            return
        self._is_replaced = False
        self.list_now()
        now_s = time.monotonic()
        self._next_s = now_s + 9 * (now_s - began_s)

    def look(self) -> None:
        """List the items that only the live catalogue has, and none of a deleted tenant.

        Rate limited: with a million items it takes a second.
        """
        if self._due.due() and self._read_stated() != self._stated:
            self.list_now()

    def list_now(self) -> None:
        """List the items of each tenant."""
        with self._lock:
            self._stated = self._read_stated()
            names: dict[str, list[str]] = {DEFAULT_TENANT: []}
            for name in self._by_name:
                names.setdefault(tenant_of_name(name), []).append(name)
            for tenant, own in names.items():
                of_bundles = (item_ids for name in own for item_ids in self._by_name[name].values())
                stated = self.live_items.of(tenant).read(lambda layout: layout.new_ids)
                is_dropped = tenant in self.live_items.dropped
                self._listed.of(tenant).replace(() if is_dropped else tuple(dict.fromkeys(chain(*of_bundles, stated))))

    def _read_stated(self) -> tuple[int, frozenset[str]]:
        """Return the number of items that the live catalogues name, and the deleted tenants."""
        catalogues = (self.live_items, *self.live_items.tenants.values())
        return sum(catalogue.layout.num_named for catalogue in catalogues), self.live_items.dropped


def _eraser(
    settings: Settings, features: RepoAddress, log: OfflineLog, impressions: OfflineLog[LoggedImpression], pace: Pace
) -> Eraser:
    """Return the eraser of users' data outside their rows."""
    files = erasing_files(settings, {ErasureStore.INTERACTIONS: log, ErasureStore.IMPRESSIONS: impressions})
    versions = BundleStore.of(settings).versions
    return Eraser(
        log.ledger,
        ErasingWriter(features),
        files,
        versions,
        settle_s=pace.erasure_settle_s,
        rewrite_every_s=pace.erasure_rewrite_every_s,
    )


def erasing_files(settings: Settings, logs: Mapping[ErasureStore, OfflineLog[Any]]) -> ErasingFiles:
    """Return the files whose users this worker erases; each path must be on storage shared with the pipeline."""
    return ErasingFiles(
        logs=logs,
        offline_log_dir=settings.offline_log_dir,
        base_histories=base_table(settings.offline_log_dir),
        offline_features=RepoAddress(settings.feature_repo_dir, settings.redis_address).table_path(USER_HISTORY.name),
        stages_dir=settings.stages_dir,
    )


def _impression_worker(
    settings: Settings,
    features: RepoAddress,
    log: OfflineLog[LoggedImpression],
    metrics: StreamMetrics,
    pace: Pace,
) -> ImpressionWorker:
    """Return the worker that applies impressions, next to this process's worker of interactions."""
    address = replace(
        _log_address(settings),
        topic=settings.impressions_topic,
        group=IMPRESSIONS_GROUP,
        fetch_waits=_IMPRESSION_WAITS,
    )
    return ImpressionWorker(
        open_consumer=lambda: PartitionConsumer(address),
        writer=ShownWriter(features, owner=f"{socket.gethostname()}/worker-{settings.worker_index}"),
        log=log,
        metrics=metrics,
        pace=pace,
        keep_days=settings.impressions_keep_days,
    )


def _item_follower(settings: Settings, counted: ItemsToCount, metrics: ItemsMetrics) -> ItemFollower:
    """Return the follower that creates the items topic and, in the first worker, writes its snapshot."""
    is_first = settings.worker_index == 0
    return ItemFollower(
        counted.live_items,
        settings.kafka_address,
        settings.items_topic,
        settings.items_snapshot,
        makes=wanted_topic(settings, settings.items_topic),
        write_every_s=_SNAPSHOT_EVERY_S if is_first else None,
        arrivals_dir=settings.arrivals_dir,
        on_refused=metrics.refused.inc,
        on_unavailable=metrics.unavailable.set,
        on_left_out=metrics.left_out.inc,
        on_knowledge=metrics.knowledge.set,
        on_look=counted.look,
    )


def _log_address(settings: Settings) -> LogAddress:
    return LogAddress(
        kafka=settings.kafka_address,
        topic=settings.interactions_topic,
        dead_letter_topic=settings.dead_letter_topic,
        group=GROUP,
        num_partitions=settings.topic_partitions,
        worker_index=settings.worker_index,
        num_workers=settings.num_workers,
        max_poll_records=settings.worker_batch_events,
        arrivals_dir=settings.arrivals_dir,
    )


if __name__ == "__main__":
    main()
