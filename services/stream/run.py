"""Composes the stream worker of one process from settings. Decides nothing."""

import fcntl
import threading
from typing import TextIO

import structlog

from models.bundle_follower import BundleFollower
from models.registry import BundleStore
from services.features.repo import RepoAddress, ensure_applied
from services.features.writer import FeatureWriter
from services.observability.metrics import StreamMetrics
from services.observability.tracing import open_tracing
from services.settings.settings import Settings
from services.stream.aggregate import history_limits
from services.stream.listed_items import ListedItems
from services.stream.offline_log import OfflineLog
from services.stream.partition_consumer import LogAddress, PartitionConsumer
from services.stream.worker import Interruptions, Pace, StreamWorker

GROUP = "tailrace-stream"
_log = structlog.get_logger()


def run_worker(
    settings: Settings,
    stop: threading.Event,
    metrics: StreamMetrics,
    pace: Pace | None = None,
    interruptions: Interruptions | None = None,
) -> None:
    """Apply events until `stop` is set. Waits while another worker of the same index runs on this node."""
    features = RepoAddress(settings.feature_repo_dir, settings.redis_address)
    ensure_applied(features)
    log = OfflineLog(settings.offline_log_dir)
    address = LogAddress(
        kafka=settings.kafka_address,
        topic=settings.interactions_topic,
        dead_letter_topic=settings.dead_letter_topic,
        group=GROUP,
        num_partitions=settings.topic_partitions,
        worker_index=settings.worker_index,
        num_workers=settings.num_workers,
        max_poll_records=settings.worker_batch_events,
    )
    items = ListedItems()
    follower = BundleFollower(
        BundleStore(settings.bundle_root), settings.bundle_poll_s, lambda bundle: bundle.item_ids(), items.replace
    )
    tracing = open_tracing(settings.otlp_endpoint, settings.trace_share, "tailrace-stream")
    worker = StreamWorker(
        open_consumer=lambda: PartitionConsumer(address, log.last_offset),
        writer=FeatureWriter(features),
        log=log,
        items=items,
        limits=history_limits(settings.history_max_items),
        metrics=metrics,
        pace=pace or Pace(),
        interruptions=interruptions or Interruptions(),
        beat=settings.worker_heartbeat.touch,
        tracing=tracing,
    )
    lock = settings.offline_log_dir / f"worker-{settings.worker_index}-of-{settings.num_workers}.lock"
    for folder in (lock.parent, settings.worker_heartbeat.parent):
        folder.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as held:
        if _lock_file(held, stop):
            follower.start()
            worker.run(stop)
            follower.stop()
    tracing.stop()


def _lock_file(lock: TextIO, stop: threading.Event) -> bool:
    """Lock the open file, since two writers of one user's row would race. False when stopped before that."""
    while not stop.is_set():
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.warning("stream.waiting_for_other_worker", lock=lock.name)
            stop.wait(0.5)
        else:
            return True
    return False
