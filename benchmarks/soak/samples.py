"""The resources of a stack: memory, descriptors and threads of each process, files by folder, Redis keys by kind.

Read from outside, through the supervisor's record and the process table; only Redis is queried.
"""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from redis import Redis, RedisError

from infra.local.servers.ray_home import ray_home
from infra.local.supervisor.processes import REPLICA, name_of, process_tree
from infra.local.supervisor.stackfile import StackFile
from services.settings.redis_clients import client_options
from services.settings.settings import Settings
from services.stream.log.files import current_files

_MB = 2**20
_KEYS_PER_SCAN = 1_000


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """One process, identified by `started_s` (Unix) and `pid`."""

    role: str
    pid: int
    started_s: float
    rss_mb: float
    num_descriptors: int
    num_threads: int


@dataclass(frozen=True, slots=True)
class Sample:
    """The stack at one moment (Unix seconds). Keys are empty while Redis does not answer."""

    at_s: float
    processes: tuple[ProcessSample, ...]
    files: dict[str, int]
    keys: dict[str, int] = field(default_factory=dict)


class Sampler:
    """Takes samples of one stack. Blocks for some tens of milliseconds."""

    def __init__(self, settings: Settings) -> None:
        self._state_dir = settings.state_dir
        self._file = StackFile(settings.state_dir)
        self._redis = Redis(**client_options(settings.redis_address) | {"socket_timeout": 1.0})

    def take(self) -> Sample:
        """Return the current state; a process that ends meanwhile is skipped."""
        return Sample(time.time(), tuple(self._processes()), _files(self._state_dir), self._keys())

    def close(self) -> None:
        self._redis.close()

    def _processes(self) -> Iterator[ProcessSample]:
        record = self._file.read()
        for name, part in (record.parts if record else {}).items():
            for number, process in enumerate(process_tree(part)):
                with suppress(psutil.Error):
                    yield _sample(process, f"{name}: {_title(process)}" if number else name)

    def _keys(self) -> dict[str, int]:
        try:
            return dict(Counter(map(_kind, self._redis.scan_iter(count=_KEYS_PER_SCAN))))
        except RedisError:
            return {}


def _sample(process: psutil.Process, role: str) -> ProcessSample:
    with process.oneshot():
        return ProcessSample(
            role,
            process.pid,
            process.create_time(),
            process.memory_info().rss / _MB,
            process.num_fds(),
            process.num_threads(),
        )


def _title(process: psutil.Process) -> str:
    """Return a replica's deployment, a script's name, or the program's."""
    title = name_of(process)
    if title.startswith(REPLICA):
        return title.removeprefix(REPLICA).split(".")[0].split("#")[0]
    scripts = (Path(word).name for word in process.cmdline()[1:] if word.endswith(".py"))
    return title if title.startswith("ray::") else next(scripts, title)


def _files(state_dir: Path) -> dict[str, int]:
    """Count files by folder; superseded files of the event log, which stay for an hour, are counted separately."""
    folders = {"metrics": state_dir / "run" / "metrics", "logs": state_dir / "logs", "bundles": state_dir / "bundles"}
    folders |= {"store": state_dir / "valkey", "features": state_dir / "features", "ray": ray_home(state_dir)}
    counts = {name: sum(1 for path in folder.rglob("*") if path.is_file()) for name, folder in folders.items()}
    events = list((state_dir / "log").rglob("*.parquet"))
    num_current = len(current_files(events))
    return {**counts, "event log": num_current, "event log, superseded": len(events) - num_current}


def _kind(key: bytes) -> str:
    """Return the purpose of a key: the words before its number or user, for Feast's keys the entity names."""
    if key.startswith((b"tailrace:", b"{tailrace:")):
        return ":".join(part.strip("{}0123456789") for part in key.decode(errors="replace").split(":")[:2])
    return " ".join(name for name in ("user_id", "bundle_version", "partition_id") if name.encode() in key) or "other"
