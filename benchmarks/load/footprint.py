"""CPU seconds and memory of a running stack's processes by role, and the store's bytes by kind of row."""

import random
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import redis

from infra.local.supervisor.processes import REPLICA, name_of, process_tree
from infra.local.supervisor.stackfile import StackFile
from services.contracts.events import Interaction
from services.features.schema import BUNDLE_VERSION, USER_ID, LogPosition
from services.settings.addresses import RedisAddress
from services.settings.redis_clients import client_options
from services.stream.decode import LoggedInteraction
from services.stream.log.offline_log import OfflineLog

_ROLES = (("gateway", f"{REPLICA}Gateway"), ("llm", f"{REPLICA}llm"), ("ingress", "haproxy"))
_MAX_KEYS = 2_000
_NUM_LOGGED = 10_000
_KINDS = ((BUNDLE_VERSION.name.encode(), "list"), (USER_ID.name.encode(), "history"))
"""Parts of a key's name by kind, more specific kinds first: a list's key also contains its user."""

Groups = dict[str, list[psutil.Process]]


def find_groups(state_dir: Path) -> Groups:
    """Group the processes of this folder's stack by role: its parts; of serve replicas, Ray's HAProxy, Ray."""
    record = StackFile(state_dir).read()
    groups: Groups = {}
    for name, part in record.parts.items() if record else ():
        for process in process_tree(part):
            groups.setdefault(_role(process) if name == "serve" else name, []).append(process)
    return groups


@dataclass(slots=True)
class Usage:
    """The CPU seconds of each group of processes over a duration."""

    cpu_s: dict[str, float] = field(default_factory=dict)
    wall_s: float = 0.0

    def less(self, idle: "Usage") -> dict[str, float]:
        """Return the CPU seconds of each group above its idle consumption."""
        return {name: s - idle.cpu_s.get(name, 0.0) / idle.wall_s * self.wall_s for name, s in self.cpu_s.items()}


class CpuMeter(NamedTuple):
    """The stack's groups of processes, and their use without requests."""

    groups: Groups
    idle: Usage

    def per_request(self, usage: Usage, num_requests: int) -> dict[str, Any]:
        """Return the processor milliseconds of a request above idle, in all and by group of processes."""
        by_group = {name: round(1_000 * cpu_s / num_requests, 3) for name, cpu_s in usage.less(self.idle).items()}
        return {"cpu_ms": round(sum(by_group.values()), 3), "cpu_ms_by_group": by_group}


@contextmanager
def used_by(groups: Groups) -> Iterator[Usage]:
    """Yield a record, which gets the use of these processes during the block at its end."""
    usage, before_s, began_s = Usage(), _cpu_seconds(groups), time.monotonic()
    yield usage
    usage.wall_s = time.monotonic() - began_s
    usage.cpu_s = {name: seconds - before_s[name] for name, seconds in _cpu_seconds(groups).items()}


def _cpu_seconds(groups: Groups) -> dict[str, float]:
    return {name: sum(map(_cpu_s, processes)) for name, processes in groups.items()}


def memory_mb(groups: Groups) -> dict[str, float]:
    """Return the unique memory of one process of each group (for Ray and the metrics server: of all together)."""
    sizes_mb = {}
    for name, processes in groups.items():
        sizes = [process.memory_full_info().uss / 2**20 for process in processes if process.is_running()]
        sizes_mb[name] = round(max(sizes) if name in {"gateway", "llm"} else sum(sizes), 1)
    return sizes_mb


def store_bytes(address: RedisAddress) -> dict[str, Any]:
    """Return the mean size of the store's rows by kind (histories, lists, other), each from at most 2,000 keys.

    All fields of a row are measured: Valkey's default of five varies by a factor of three between starts.
    """
    client: Any = redis.Redis(**client_options(address))
    sizes: dict[str, list[int]] = {}
    for key in client.scan_iter(count=500):
        kind = next((kind for mark, kind in _KINDS if mark in key), "other")
        if len(sizes.setdefault(kind, [])) < _MAX_KEYS:
            sizes[kind].append(client.memory_usage(key, samples=0) or 0)
    used = client.info("memory")["used_memory"]
    client.close()
    rows = {
        kind: {"rows": len(row_sizes), "mean_bytes": round(sum(row_sizes) / len(row_sizes))}
        for kind, row_sizes in sizes.items()
    }
    return {"used_bytes": used, "by_kind": rows}


def log_bytes_per_event() -> float:
    """Return the bytes of an event in one merged file of the offline log, with random ids and users."""
    draw = random.Random(0)
    events = [
        LoggedInteraction(
            Interaction(
                event_id=str(uuid.UUID(int=draw.getrandbits(128))),
                user_id=str(draw.randrange(100_000)),
                item_id=str(draw.randrange(10_000)),
                event_time_ms=1_790_000_000_000 + 40 * number,
                accepted_time_ms=1_790_000_000_005 + 40 * number,
            ),
            LogPosition("01a1fcb0-c6a8-7871-8401-8cc9650bb424", 0, number),
        )
        for number in range(_NUM_LOGGED)
    ]
    with tempfile.TemporaryDirectory() as folder:
        OfflineLog(Path(folder)).append(events)
        return sum(path.stat().st_size for path in Path(folder).rglob("*.parquet")) / _NUM_LOGGED


def _role(process: psutil.Process) -> str:
    title = name_of(process)
    return next((role for role, mark in _ROLES if title.startswith(mark)), "ray")


def _cpu_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)
