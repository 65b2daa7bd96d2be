"""The axis `users`: `python -m benchmarks.scale.users SIZE` prints its row.

SIZE users with 20 items of history each in a real Valkey; p99_ms and loop_ms: one read by a gateway, wall and processor
time;
rss_mb: the store; restart_s: from the store's start until it answers, with all rows read from its file.
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from redis import Redis

from benchmarks.scale import servers
from benchmarks.scale.row import print_fields, times
from services.features.layout import RowLayout
from services.features.ownership import KEY
from services.features.reader import FeatureReader
from services.features.repo import RepoAddress, ensure_applied, project_of
from services.features.schema import USER_HISTORY, LogPosition, UserHistory, event_digest
from services.settings.settings import Settings

_NUM_READS, _NUM_WARM, _PER_EXCHANGE = 2_000, 100, 500
_HISTORY = tuple(f"item-{number:07d}" for number in range(20))


def main(num_users: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        settings = servers.settings_in(Path(folder))
        address = RepoAddress(settings.feature_repo_dir, settings.redis_address)
        ensure_applied(address)
        with servers.valkey(settings):
            _fill(settings, RowLayout(USER_HISTORY, project_of(address)), num_users)
        began_s = time.monotonic()
        with servers.valkey(settings) as pid:
            restart_s = time.monotonic() - began_s
            wall_s, loop_s = asyncio.run(_read(address, settings.topic_partitions, num_users))
            rss_mb = psutil.Process(pid).memory_info().rss / 2**20
        print_fields(**times(wall_s, loop_s) | {"rss_mb": rss_mb, "restart_s": restart_s})


def _fill(settings: Settings, layout: RowLayout[UserHistory], num_users: int) -> None:
    """Write the same row for each user, and mark the partitions as complete."""
    row = UserHistory(
        user_id="",
        item_ids=_HISTORY,
        newest_event_time_ms=1_700_000_000_000,
        num_events=len(_HISTORY),
        row_time_us=1_700_000_000_000_000,
        recent_event_digests=b"".join(event_digest(f"event-{number:07d}") for number in range(20)),
        position=LogPosition("topic", 0, 1),
    )
    cells = layout.cells(row, row.row_time_us)
    with Redis(port=settings.redis_port) as client:
        for first in range(0, num_users, _PER_EXCHANGE):
            pipe = client.pipeline(transaction=False)
            for number in range(first, min(first + _PER_EXCHANGE, num_users)):
                pipe.hset(layout.key(f"user-{number}"), mapping=cells)
            pipe.execute()
        client.hset(KEY, mapping={f"{partition}:whole": 1 for partition in range(settings.topic_partitions)})
        _wait_for_rewrite(client)  # a rewrite may have begun by itself
        client.bgrewriteaof()
        _wait_for_rewrite(client)


def _wait_for_rewrite(client: Redis) -> None:

    def rewrites() -> bool:
        state: Any = client.info("persistence")
        return bool(state["aof_rewrite_in_progress"] or state["aof_rewrite_scheduled"])

    servers.wait_until(lambda: not rewrites(), 120.0, "the store's file was not written")


async def _read(address: RepoAddress, num_partitions: int, num_users: int) -> tuple[Sequence[float], Sequence[float]]:
    reader, rng = FeatureReader(address, num_partitions), np.random.default_rng(0)
    wall_s, loop_s = [], []
    for user in rng.integers(0, num_users, _NUM_WARM + _NUM_READS).tolist():
        began_s, worked_s = time.perf_counter(), time.thread_time()
        row = await reader.read(f"user-{user}", "v", 5.0)
        wall_s.append(time.perf_counter() - began_s)
        loop_s.append(time.thread_time() - worked_s)
        assert row.history_item_ids == _HISTORY
    await reader.close()
    return wall_s[_NUM_WARM:], loop_s[_NUM_WARM:]


if __name__ == "__main__":
    main(int(sys.argv[1]))
