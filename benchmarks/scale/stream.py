"""The stream workers' axes: `python -m benchmarks.scale.stream AXIS SIZE [SECONDS]` prints one row.

    catalogue   SIZE distinct items within the windows of 8 partitions, one worker
    workers     SIZE workers for 8 partitions
    history     SIZE events in the offline log, all of them in the store; popularity is recounted while events come

Real Valkey, broker and worker processes; 2,000 events a second of 10,000 users for SECONDS. freshness_p99_ms: from
accepted to visible; loop_ms: processor time of all workers per event; rss_mb: the largest worker; restart_s: from the
workers' start until they have applied an event of each partition that waited in the topic.
"""

import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from kafka import KafkaProducer
from redis import Redis

from benchmarks.scale import servers
from benchmarks.scale.row import catalogue_of, print_fields
from infra.kafka.topics import create_missing
from models.registry.store import BundleStore
from services.contracts.events import Interaction
from services.features.layout import RowLayout
from services.features.ownership import KEY, partition_of
from services.features.repo import RepoAddress, ensure_applied, project_of
from services.features.schema import POPULARITY, USER_HISTORY
from services.settings.kafka_topics import wanted_topics
from services.settings.settings import Settings
from services.stream.log.files import FULL_SIZE, Span
from services.stream.log.kinds import INTERACTIONS

_PARTITIONS = 8
_RATE, _SECONDS, _SETTLE_S = 2_000, 20.0, 3.0
_MOST_S = 200.0
_NUM_USERS = 10_000
_TOPIC_ID, _VERSION = "topic-before", "v1"
_HOUR_MS = 3_600_000


@dataclass(frozen=True, slots=True)
class StreamLoad:
    """The configuration of a point. `is_counted`: events are sent when popularity is counted, not at once."""

    num_items: int = 10_000
    num_logged: int = 0
    num_workers: int = 1
    is_counted: bool = True


def main(axis: str, size: int, seconds: float = _SECONDS) -> None:
    """Run one point."""
    case = {
        "catalogue": StreamLoad(num_items=size, num_logged=size),
        "workers": StreamLoad(num_workers=size),
        "history": StreamLoad(num_logged=size, is_counted=False),
    }[axis]
    with tempfile.TemporaryDirectory() as folder:
        settings = servers.settings_in(Path(folder), topic_partitions=_PARTITIONS, log_level="warning")
        catalogue = catalogue_of(case.num_items)
        item_ids = catalogue.item_ids
        with tempfile.TemporaryDirectory() as bundle:
            catalogue.save(Path(bundle) / "catalogue.parquet")
            BundleStore.of(settings).publish(Path(bundle), _VERSION, {})
        BundleStore.of(settings).promote(_VERSION)
        with servers.valkey(settings), servers.broker(settings), Redis(port=settings.redis_port) as client:
            ensure_applied(RepoAddress(settings.feature_repo_dir, settings.redis_address))
            _write_log(settings, client, item_ids, case.num_logged)
            print_fields(**_measure(settings, client, case, item_ids, seconds))


def _measure(
    settings: Settings, client: Redis, case: StreamLoad, item_ids: Sequence[str], seconds: float
) -> dict[str, float]:
    notes = settings.state_dir / "notes"
    notes.mkdir()
    first = _one_user_per_partition()
    create_missing(settings.kafka_address.client_options(), wanted_topics(settings))
    _send(settings, [(user_id, item_ids[0]) for user_id in first], _RATE)
    project = project_of(RepoAddress(settings.feature_repo_dir, settings.redis_address))
    histories, popularity = RowLayout(USER_HISTORY, project), RowLayout(POPULARITY, project)
    rows = [histories.key(user_id) for user_id in first]
    counted = [popularity.key(str(number)) for number in range(_PARTITIONS)]
    with servers.workers(settings, case.num_workers, notes) as pids:
        restart_s = servers.wait_until(lambda: client.exists(*rows) == _PARTITIONS, _MOST_S, "no event was applied")
        processes = [psutil.Process(pid) for pid in pids]
        if case.is_counted:
            servers.wait_until(lambda: client.exists(*counted) == _PARTITIONS, _MOST_S, "popularity was not counted")
        time.sleep(_SETTLE_S)
        used_s, began_s = _cpu_s(processes), time.time()
        num_events = _send(settings, _draw(item_ids, round(_RATE * seconds)), _RATE)
        servers.wait_until(
            lambda: _num_applied(client) == _PARTITIONS + num_events, _MOST_S, "the last event was not applied"
        )
        used_s, rss = _cpu_s(processes) - used_s, max(process.memory_info().rss for process in processes)
    noted = np.concatenate([np.load(path) for path in notes.iterdir()])
    waited_s = noted[noted[:, 0] >= began_s, 1]
    return {
        "loop_ms": 1_000 * used_s / num_events,
        "rss_mb": rss / 2**20,
        "freshness_p99_ms": 1_000 * float(np.percentile(waited_s, 99)),
        "restart_s": restart_s,
    }


def _one_user_per_partition() -> list[str]:
    users: dict[int, str] = {}
    number = 0
    while len(users) < _PARTITIONS:
        users.setdefault(partition_of(f"first-{number}", _PARTITIONS), f"first-{number}")
        number += 1
    return list(users.values())


def _num_applied(client: Redis) -> int:
    """Return how many events of the topic are in the store's rows."""
    offsets: Any = client.hmget(KEY, [f"{partition}:offset" for partition in range(_PARTITIONS)])
    return sum(int(offset) + 1 for offset in offsets if offset is not None)


def _cpu_s(processes: list[psutil.Process]) -> float:
    return float(sum(times.user + times.system for times in (process.cpu_times() for process in processes)))


def _write_log(settings: Settings, client: Any, item_ids: Sequence[str], num_events: int) -> None:
    """Write merged files of a former topic, its newest event an hour old, and write their effect to the store."""
    num_each = num_events // settings.topic_partitions
    if not num_each:
        return
    day = time.strftime("%Y-%m-%d", time.gmtime())
    items = pa.array(item_ids)
    for partition in range(settings.topic_partitions):
        folder = settings.offline_log_dir / "interactions" / f"partition={partition}" / _TOPIC_ID / day
        folder.mkdir(parents=True)
        for first in range(0, num_each, FULL_SIZE):
            offsets = np.arange(first, min(first + FULL_SIZE, num_each))
            numbers = offsets * settings.topic_partitions + partition
            pq.write_table(
                _events(items, numbers, offsets, partition),
                folder / Span(first, int(offsets[-1])).name,
                compression="zstd",
            )
        header = {"topic_id": _TOPIC_ID, "offset": num_each - 1, "saved": f"{_TOPIC_ID}/{num_each - 1}", "whole": 1}
        client.hset(KEY, mapping={f"{partition}:{name}": value for name, value in header.items()})


def _events(items: pa.Array, numbers: np.ndarray, offsets: np.ndarray, partition: int) -> pa.Table:
    """Return one file's events: event n has item n, modulo the catalogue, so that all items occur."""
    size = len(numbers)
    times_ms = time.time_ns() // 1_000_000 - _HOUR_MS - np.arange(size)[::-1]
    columns = {
        "event_id": [f"past-{number}" for number in numbers],
        "user_id": [f"past-{number % 100_003}" for number in numbers],
        "item_id": items.take(pa.array(numbers % len(items))),
        "event_type": ["click"] * size,
        "event_time_ms": times_ms,
        "value": np.ones(size),
        "topic_id": [_TOPIC_ID] * size,
        "partition": np.full(size, partition, dtype=np.int32),
        "offset": offsets,
        "accepted_time_ms": times_ms,
        "request_id": pa.nulls(size),
    }
    return pa.table(columns, schema=INTERACTIONS.schema)


def _draw(item_ids: Sequence[str], num_events: int) -> Iterator[tuple[str, str]]:
    """Draw users and items uniformly."""
    rng = np.random.default_rng(0)
    for user, item in zip(
        rng.integers(0, _NUM_USERS, num_events), rng.integers(0, len(item_ids), num_events), strict=True
    ):
        yield f"user-{user}", item_ids[item]


def _send(settings: Settings, touches: Iterable[tuple[str, str]], rate: int) -> int:
    """Send an event for each (user, item), accepted when sent; return their number once all are acknowledged."""
    producer = KafkaProducer(**settings.kafka_address.client_options(), acks="all", metrics_enabled=False)
    began_s, number = time.monotonic(), 0
    stamp = time.time_ns()
    for number, (user_id, item_id) in enumerate(touches, 1):
        if (ahead_s := began_s + number / rate - time.monotonic()) > 0:
            time.sleep(ahead_s)
        now_ms = time.time_ns() // 1_000_000
        event = Interaction(
            event_id=f"{stamp}-{number}",
            user_id=user_id,
            item_id=item_id,
            event_time_ms=now_ms,
            accepted_time_ms=now_ms,
        )
        producer.send(settings.interactions_topic, event.encode(), event.key)
    producer.flush(30)
    producer.close()
    return number


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *map(float, sys.argv[3:4]))
