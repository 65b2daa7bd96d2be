"""The metrics of one node: the sum over the files of all its processes.

Files of ended processes are merged into one per type. A process that ends leaves its files behind, and every restarted
process adds more: each scrape would read them all. The counts must stay, so they are added to `<type>_ended.db` and the
process's own file is removed; gauges of ended processes are dropped. One lock per folder, since several processes
scrape. A crash between the two steps counts one process twice.
"""

import fcntl
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

_SUMMED = ("counter", "histogram")


class NodeCollector(Collector):
    """Collects the metrics of all processes that share `folder`.

    Reads the folder each time; only for an endpoint that is scraped.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def collect(self) -> Iterable[Metric]:
        """Merge the files of ended processes, and return the sums."""
        with _locked(self._folder):
            _forget_gauges(self._folder)
            for kind in _SUMMED:
                _fold(self._folder, kind)
            files = [str(path) for path in self._folder.glob("*.db") if _is_begun(path)]
            metrics: Iterable[Metric] = MultiProcessCollector.merge(files)  # type: ignore[no-untyped-call]
            return list(metrics)


def node_registry(folder: Path) -> CollectorRegistry:
    """Return a registry over the metrics of all processes that share `folder`."""
    registry = CollectorRegistry()
    registry.register(NodeCollector(folder))
    return registry


def render_metrics(folder: Path) -> bytes:
    """Return the metrics of all processes that share `folder`, in Prometheus' text format."""
    return generate_latest(node_registry(folder))


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with (folder / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _forget_gauges(folder: Path) -> None:
    for path in folder.glob("gauge_live*_*.db"):
        if _has_ended(path):
            path.unlink(missing_ok=True)


def _fold(folder: Path, kind: str) -> None:
    """Add the files of ended processes to the file of all ended processes."""
    ended = [path for path in folder.glob(f"{kind}_*.db") if _has_ended(path)]
    if not ended:
        return
    whole, scratch = folder / f"{kind}_ended.db", folder / f"{kind}.scratch"
    sums: dict[str, float] = defaultdict(float)
    for path in [whole, *ended]:
        if path.exists() and _is_begun(path):
            for key, value, _, _ in MmapedDict.read_all_values_from_file(path):  # type: ignore[no-untyped-call]
                sums[key] += value
    scratch.unlink(missing_ok=True)
    written: Any = MmapedDict(scratch)  # type: ignore[no-untyped-call]
    for key, value in sums.items():
        written.write_value(key, value, 0.0)
    written.close()
    scratch.rename(whole)
    for path in ended:
        path.unlink(missing_ok=True)


def _is_begun(path: Path) -> bool:
    """Return whether a process has written to its file, which is empty when it is created."""
    return path.stat().st_size > 0


def _has_ended(path: Path) -> bool:
    pid = path.stem.rsplit("_", 1)[1]
    return pid.isdecimal() and not Path(f"/proc/{pid}").exists()
