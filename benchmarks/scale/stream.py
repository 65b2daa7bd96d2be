"""The stream workers' axes: `python -m benchmarks.scale.stream AXIS SIZE` prints one row (`SECONDS` as a third argument: for how long events come).

    catalogue   SIZE distinct items within the windows of 8 partitions, one worker
    workers     SIZE workers for 8 partitions
    history     SIZE events in the offline log, of which the store lacks none; popularity is counted again while events come

Real Valkey, broker and worker processes; 2,000 events a second of 10,000 users. freshness_p99_ms: from accepted to visible; loop_ms: processor
time of all workers per event; rss_mb: the largest worker; restart_s: from the workers' start until an event of each partition, which waited
in the topic, was applied.
"""

import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from redis import Redis

from benchmarks.scale import feed, servers
from benchmarks.scale.past import publish_items, write_log
from benchmarks.scale.row import print_fields
from services.features.layout import RowLayout
from services.features.ownership import KEY, partition_of
from services.features.repo import RepoAddress, ensure_applied, open_store
from services.features.schema import POPULARITY, USER_HISTORY
from services.settings.settings import Settings

_PARTITIONS = 8
_RATE, _SECONDS, _SETTLE_S = 2_000, 20.0, 3.0
_MOST_S = 200.0


@dataclass(frozen=True, slots=True)
class Case:
    """What one point runs with. `is_counted`: events are sent when popularity is counted, not at once."""

    num_items: int = 10_000
    num_logged: int = 0
    num_workers: int = 1
    is_counted: bool = True


def main(axis: str, size: int, seconds: float = _SECONDS) -> None:
    """Run one point."""
    case = {
        "catalogue": Case(num_items=size, num_logged=size),
        "workers": Case(num_workers=size),
        "history": Case(num_logged=size, is_counted=False),
    }[axis]
    with tempfile.TemporaryDirectory() as folder:
        settings = servers.settings_in(Path(folder), topic_partitions=_PARTITIONS, log_level="warning")
        item_ids = [f"item-{number:07d}" for number in range(case.num_items)]
        publish_items(settings.bundle_root, item_ids)
        with servers.valkey(settings), servers.broker(settings), Redis(port=settings.redis_port) as client:
            ensure_applied(RepoAddress(settings.feature_repo_dir, settings.redis_address))
            write_log(settings, client, item_ids, case.num_logged)
            print_fields(axis, size, _measure(settings, client, case, item_ids, seconds))


def _measure(
    settings: Settings, client: Redis, case: Case, item_ids: list[str], seconds: float
) -> dict[str, float | None]:
    notes = settings.state_dir / "notes"
    notes.mkdir()
    first = _one_user_per_partition()
    feed.create_topic(settings)
    feed.send(settings, [(user_id, item_ids[0]) for user_id in first], _RATE)
    project = open_store(RepoAddress(settings.feature_repo_dir, settings.redis_address)).project
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
        num_events = feed.send(settings, feed.draw(item_ids, round(_RATE * seconds)), _RATE)
        servers.wait_until(
            lambda: _num_applied(client) == _PARTITIONS + num_events, _MOST_S, "the last event was not applied"
        )
        used_s, rss = _cpu_s(processes) - used_s, max(one.memory_info().rss for one in processes)
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
    """Return how many events of the topic the store's rows hold."""
    offsets: Any = client.hmget(KEY, [f"{partition}:offset" for partition in range(_PARTITIONS)])
    return sum(int(offset) + 1 for offset in offsets if offset is not None)


def _cpu_s(processes: list[psutil.Process]) -> float:
    return float(sum(times.user + times.system for times in (one.cpu_times() for one in processes)))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *map(float, sys.argv[3:4]))
