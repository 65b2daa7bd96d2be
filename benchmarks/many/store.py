"""Many small bundles in an object store, which share their files by content, and the faults of that store."""

import json
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.faults.tcp_proxy import Wire
from benchmarks.load.lone_plane import write_bundle
from benchmarks.many.wire import StoreWire
from benchmarks.scale.row import catalogue_of
from models.files import file_sha256
from models.registry.bundle import hashes
from models.registry.name_record import NameRecord
from models.registry.popular import popular_items
from models.registry.storage.objects import open_store

NO_FAULT, AWAY, SLOW, LYING, FULL_DISK = "none", "away", "slow", "lying", "full disk"
FAULTS = (NO_FAULT, AWAY, SLOW, LYING, FULL_DISK)
NUM_ITEMS = 2_000
_NUM_WRITING = 8


def version_of(name: str) -> str:
    """Return the version that is live under a name."""
    return f"v-{name}"


def publish_many(url: str, names: Sequence[str], folder: Path) -> None:
    """Make a bundle live under each name, by writing the objects of a publication.

    Each has a catalogue of its own, which differs by the popularity of its items; the other files are the same.
    """
    catalogue = catalogue_of(NUM_ITEMS)

    def publish(seed: int, name: str) -> None:
        own = np.random.default_rng(seed).permutation(NUM_ITEMS).astype(np.float64)
        write_bundle(replace(catalogue, popularity=own), source := folder / "sources" / name)
        put_files(url, source)
        put_name(url, name, source, {})
        shutil.rmtree(source)

    (folder / "sources").mkdir()
    with ThreadPoolExecutor(_NUM_WRITING) as pool:
        list(pool.map(publish, range(len(names)), names))


def put_files(url: str, source: Path) -> None:
    """Upload the files of a bundle by their content."""
    for path in sorted(path for path in source.rglob("*") if path.is_file()):
        open_store(url).put(f"files/{file_sha256(path)}", path)


def put_name(url: str, name: str, source: Path, about: dict[str, Any]) -> None:
    """Write the manifest of a version with these files, and the record that makes it live under a name."""
    manifest = {"dataset": "made up", "popular": popular_items(source), "files": hashes(source), **about}
    store, version = open_store(url), version_of(name)
    store.put(f"versions/{version}.json", json.dumps({"version": version, **manifest}).encode())
    store.put(f"names/{name}.json", NameRecord(live=version).encode())


@dataclass(frozen=True, slots=True)
class StoreFaults:
    """The faults of one object store: by the wire to it, by its contents, by the disk of its cache."""

    url: str
    wire: StoreWire
    cache: Path

    @contextmanager
    def happening(self, fault: str, pids: Sequence[int] = (), *, is_cached: bool = False) -> Iterator[None]:
        """Let a fault happen. On a full disk these processes, or this one, can write files of one byte at most.

        Unless `is_cached`, cached files are deleted before a fault that only downloads would see.
        """
        modes = {AWAY: Wire.STOP, SLOW: Wire.SLOW}
        with ExitStack() as ending:
            if fault in (LYING, FULL_DISK) and not is_cached:
                self._forget_files()
            if fault == LYING:
                ending.enter_context(_damaged_file(self.url))
            if fault == FULL_DISK:
                for pid in pids or (psutil.Process().pid,):
                    ending.enter_context(full_disk(pid))
            if fault in modes:
                self.wire.become(modes[fault])
                ending.callback(self.wire.become, Wire.PASS)
            yield

    def _forget_files(self) -> None:
        """Delete the cached files, so that they are downloaded again."""
        for path in (*(self.cache / "files").glob("*"), *(self.cache / "versions").glob("*/**/*")):
            if path.is_file() and path.name != "manifest.json":
                path.unlink()


@contextmanager
def full_disk(pid: int) -> Iterator[None]:
    """Limit the files that a process writes to one byte."""
    _, most = psutil.Process().rlimit(psutil.RLIMIT_FSIZE)
    with suppress(psutil.NoSuchProcess):
        psutil.Process(pid).rlimit(psutil.RLIMIT_FSIZE, (1, most))
    try:
        yield
    finally:
        with suppress(psutil.NoSuchProcess):
            psutil.Process(pid).rlimit(psutil.RLIMIT_FSIZE, (most, most))


@contextmanager
def _damaged_file(url: str) -> Iterator[None]:
    """Flip a byte of a table of similar items, which all bundles share, for the time of this context."""
    store = open_store(url)
    paths = (file["path"] for chunk in store.list("files/") for file in chunk)
    path = next(path for path in paths if bytes(store.get_range(path, start=0, end=6)) == b"\x93NUMPY")
    content = bytes(store.get(path).bytes())
    store.put(path, content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    try:
        yield
    finally:
        store.put(path, content)
