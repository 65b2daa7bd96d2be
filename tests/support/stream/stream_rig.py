"""A stream worker over a real broker and a real Valkey, in a thread of the test, and the expected rows."""

import random
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from kafka import KafkaProducer
from prometheus_client import CollectorRegistry
from redis import Redis

from services.contracts.erasure import Erasure
from services.contracts.events import Interaction
from services.features.repo import RepoAddress
from services.features.schema import LogPosition, UserHistory
from services.features.writer import FeatureWriter
from services.observability.metrics import ItemsMetrics, StreamMetrics
from services.settings.settings import Settings
from services.stream.__main__ import run_worker
from services.stream.aggregate import LoggedEvent, apply, history_limits
from services.stream.background import Pace
from services.stream.log.files import current_files
from tests.support.servers import HOST, Server
from tests.support.stream.topics import read_topic

TOPIC = "interactions"
QUICK = Pace(
    checkpoint_every_s=0.1,
    checkpoint_impressions_every_s=0.1,
    popularity_every_s=0.1,
    lag_every_s=0.1,
    renew_every_s=0.1,
    compact_every_s=0.1,
    retry_after_s=0.1,
    erasure_settle_s=1.0,
    erasure_rewrite_every_s=1.0,
)


@dataclass
class Rig:
    """A broker, a store, and a worker in a thread of the test; events are sent as a gateway sends them."""

    settings: Settings
    features: RepoAddress
    broker: Server

    def __post_init__(self) -> None:
        self.registry = CollectorRegistry()
        self._metrics = StreamMetrics(self.registry)
        self._item_metrics = ItemsMetrics(self.registry)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.settings.stages_dir.mkdir(exist_ok=True)

    def start_worker(self, pace: Pace = QUICK) -> None:
        """Start the worker with the pipeline's folder, as in every stack."""
        self.settings.stages_dir.mkdir(exist_ok=True)
        self._stop.clear()
        parts = (self.settings, self._stop, self._metrics, pace, None, self._item_metrics)
        self._thread = threading.Thread(target=run_worker, args=parts)
        self._thread.start()

    def stop_worker(self) -> None:
        """Stop the worker and wait for its end."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(60)
            assert not self._thread.is_alive()

    def send_to(
        self, partition: int, *events: Interaction, padding: bytes = b"", headers: Sequence[tuple[str, bytes]] = ()
    ) -> None:
        """Produce interactions to this partition regardless of their users, with padding and headers of any size."""
        producer = KafkaProducer(
            bootstrap_servers=self.settings.kafka_bootstrap, max_block_ms=10_000, max_request_size=10_000_000
        )
        for event in events:
            value = event.encode() + padding
            producer.send(TOPIC, key=event.key, value=value, headers=list(headers), partition=partition).get(10)
        producer.close()

    def send(self, *values: Interaction | Erasure | tuple[bytes | None, bytes]) -> None:
        """Produce interactions, erasures, or raw (key, value) pairs, and wait until the broker has them."""
        producer = KafkaProducer(bootstrap_servers=self.settings.kafka_bootstrap, max_block_ms=10_000)
        pairs = [value if isinstance(value, tuple) else (value.key, value.encode()) for value in values]
        with closing(producer):
            for receipt in [producer.send(TOPIC, key=key, value=value) for key, value in pairs]:
                receipt.get(10)

    def rows(self, *user_ids: str) -> dict[str, UserHistory]:
        return FeatureWriter(self.features).read_histories(user_ids)

    def empty_store(self) -> None:
        with Redis(host=HOST, port=self.features.redis.port) as client:
            client.flushall()

    def metric(self, name: str, **labels: str) -> float:
        """Read one of the worker's metrics; 0 before it is first set."""
        return self.registry.get_sample_value(name, labels) or 0.0

    def lags(self) -> list[float | None]:
        """Return each partition's lag; None before it is first set."""
        name = "tailrace_stream_lag_events"
        return [self.registry.get_sample_value(name, {"partition": str(number)}) for number in range(4)]

    def logged(self) -> list[tuple[str, str, int]]:
        """Return (event ID, topic ID, offset) of all rows of the offline log, file by file, without removing
        duplicates.

        Files that the worker has merged into larger files are skipped, as by every reader.
        """
        import pyarrow.parquet as pq

        files = current_files((self.settings.offline_log_dir / "interactions").rglob("*.parquet"))
        rows = [row for path in files for row in pq.ParquetFile(path).read().to_pylist()]
        return [(row["event_id"], row["topic_id"], row["offset"]) for row in rows]


def click(number: int, user_id: str = "u", **changes: Any) -> Interaction:
    """Build an event; its time increases with its number."""
    now_ms = time.time_ns() // 1_000_000
    fields = {"event_id": f"e{number}", "item_id": f"i{number}", "event_time_ms": 1_700_000_000_000 + number}
    return Interaction(user_id=user_id, accepted_time_ms=now_ms, **(fields | changes))


def erasure(user_id: str, erasure_id: str = "x", accepted_time_ms: int | None = None) -> Erasure:
    """Build the erasure of a user, accepted now."""
    now_ms = time.time_ns() // 1_000_000
    return Erasure(erasure_id=erasure_id, user_id=user_id, accepted_time_ms=accepted_time_ms or now_ms)


def many_clicks(num_events: int, num_users: int, seed: int = 0) -> list[Interaction]:
    """Build events of several users, including dislikes, client retries and late events."""
    draw = random.Random(seed)
    events = []
    for number in range(num_events):
        lateness = draw.choice((0, 0, 0, 50))
        kind = draw.choice(("click", "click", "click", "dislike"))
        time_ms = 1_700_000_000_000 + number - lateness
        events.append(click(number, f"u{draw.randrange(num_users)}", event_time_ms=time_ms, event_type=kind))
        if draw.random() < 0.1:
            events.append(events[-1])
    return events


def clean_replay(broker: Server, max_items: int = 30, base: tuple[UserHistory, ...] = ()) -> dict[str, UserHistory]:
    """Return the rows of a clean replay on top of base rows: every record once, in the order of each partition."""
    rows = {row.user_id: row for row in base}
    for event in broker_events(broker):
        outcome = apply(rows.get(event.user_id), [event], history_limits(max_items))
        assert outcome.row is not None
        rows[event.user_id] = outcome.row
    return rows


def in_topic(broker: Server) -> list[tuple[str, str, int]]:
    """Return (event id, topic id, offset) of all readable records, sorted."""
    return sorted((event.event_id, event.position.topic_id, event.position.offset) for event in broker_events(broker))


def broker_events(broker: Server) -> list[LoggedEvent]:
    """Read the whole topic with a separate consumer."""
    from services.stream.decode import Record, decode

    records = read_topic(broker, TOPIC)
    raw = [Record(LogPosition(topic_id, r.partition, r.offset), r.key, r.value, r.timestamp) for topic_id, r in records]
    return [event.event for event in decode(raw, 4, time.time_ns() // 1_000_000).events]
