"""The results of a soak: rows by door, growth by part, and the promises with their verdicts. Pure.

Growth is a slope with its interval, compared with a bound. Each process has its own level, and one slope is fitted to
all processes of a kind, so that a restart does not count as growth. Samples are averaged over half a minute first:
neighbouring samples are not independent, and the interval would be too narrow.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from benchmarks.load.open_loop import Shot
from benchmarks.load.scoring import summarise
from benchmarks.soak.ledger import Account
from benchmarks.soak.samples import ProcessSample, Sample
from benchmarks.soak.traffic import Request

_BLOCK_S = 30.0
_HOUR_S = 3_600.0

Series = Sequence[tuple[float, float]]
"""Seconds and values of one process or of one folder."""

WARM_UP_S = 120.0
"""A process's first seconds, during which caches fill and libraries load."""
_OF_PROCESSES: Mapping[str, tuple[float, Callable[[ProcessSample], float]]] = {
    "memory MB": (60.0, lambda sample: sample.rss_mb),
    "descriptors": (30.0, lambda sample: sample.num_descriptors),
    "threads": (30.0, lambda sample: sample.num_threads),
}
"""Quantities of each process, and their bounds per hour."""
_FILE_BOUNDS = {"event log": 400.0, "event log, superseded": 14_400.0, "logs": 400.0, "ray": 1_500.0}
"""Superseded files stay for an hour: four partitions with one file a second each."""
_OTHER_FILES, _KEYS = 60.0, 60.0
_IN_ANSWERS = ("num_requests", "availability", "deadline_met", "p50_ms", "p99_ms", "max_ms", "reasons")
_SILENT = frozenset({"no_answer", "not_sent", "internal", "http_500"})


def door_rows(shots: Sequence[Shot], weights: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return a row for each kind of request, door and priority."""
    groups: dict[str, list[Shot]] = defaultdict(list)
    for shot in shots:
        groups[Request(shot.number).row].append(shot)
    rows = []
    for name, some in sorted(groups.items()):
        request = Request(some[0].number)
        numbers = summarise(some, request.deadline_ms, weights)
        kept = _IN_ANSWERS + (("tiers",) if request.kind == "recommend" else ())
        rows.append({"row": name, "deadline_ms": request.deadline_ms, **{key: numbers[key] for key in kept}})
    return rows


def growth_rows(samples: Sequence[Sample], warm_up_s: float = WARM_UP_S) -> list[dict[str, Any]]:
    """Return a row for each quantity of each part: processes after their warm-up, files and keys after the run's."""
    rows = []
    for role, processes in _by_role(samples, warm_up_s).items():
        for quantity, (bound, value_of) in _OF_PROCESSES.items():
            series = [[(at_s, value_of(sample)) for at_s, sample in own] for own in processes]
            rows.append(growth_row(role, quantity, series, bound))
    settled = [sample for sample in samples if sample.at_s >= samples[0].at_s + warm_up_s]
    for name, counts in _by_name([(sample.at_s, sample.files) for sample in settled]).items():
        rows.append(growth_row(name, "files", [counts], _FILE_BOUNDS.get(name, _OTHER_FILES)))
    for name, counts in _by_name([(sample.at_s, sample.keys) for sample in settled if sample.keys]).items():
        rows.append(growth_row(name, "Redis keys", [counts], _KEYS))
    return rows


def promises(
    account: Account,
    explained: Mapping[str, Any],
    growth: Sequence[Mapping[str, Any]],
    faults: Sequence[Mapping[str, Any]],
    doors: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Return each promise, whether it held, and the evidence."""
    broken = [f"{row['part']}, {row['quantity']}" for row in growth if row["verdict"] == "broken"]
    silent = {row["row"]: count for row in doors if (count := sum(row["reasons"].get(reason, 0) for reason in _SILENT))}
    unhealed = [fault["fault"] for fault in faults if fault["healthy_after_s"] is None]
    unexplained = explained["missing"] + len(explained["different"])
    checks: list[tuple[str, bool, Any]] = [
        ("no acknowledged event is lost", account.num_lost == 0, account.num_lost),
        ("no event is doubled", account.num_doubled == 0, account.num_doubled),
        ("rows are the log's replay", not account.different_rows, list(account.different_rows)),
        ("every answer is explained", unexplained == 0 and explained["agreeing"] > 0, unexplained),
        ("every request has an answer or a named error", not silent, silent),
        ("every part is healthy again", not unhealed, unhealed),
        ("nothing grows beyond its bound", not broken, broken),
    ]
    return [{"promise": name, "is_kept": is_kept, "found": what} for name, is_kept, what in checks]


def _by_role(samples: Sequence[Sample], warm_up_s: float) -> dict[str, list[list[tuple[float, ProcessSample]]]]:
    """Group the samples by role, then by process, without each process's first seconds."""
    by_role: dict[str, dict[tuple[int, float], list[tuple[float, ProcessSample]]]] = {}
    for sample in samples:
        for process in sample.processes:
            if sample.at_s - max(process.started_s, samples[0].at_s) >= warm_up_s:
                own = by_role.setdefault(process.role, {}).setdefault((process.pid, process.started_s), [])
                own.append((sample.at_s, process))
    return {role: list(processes.values()) for role, processes in sorted(by_role.items())}


def _by_name(counts: Sequence[tuple[float, Mapping[str, int]]]) -> dict[str, Series]:
    names = sorted({name for _, count in counts for name in count})
    return {name: [(at_s, float(count.get(name, 0))) for at_s, count in counts] for name in names}


@dataclass(frozen=True, slots=True)
class Slope:
    """Growth per hour, with a 95 % interval."""

    per_hour: float
    low: float
    high: float

    def verdict(self, bound_per_hour: float) -> str:
        """Return "holds" or "broken" if the interval is on one side of the bound, else "open": the run is too short."""
        if self.high <= bound_per_hour:
            return "holds"
        return "broken" if self.low > bound_per_hour else "open"


def slope_of(series: Iterable[Series]) -> Slope | None:
    """Fit one slope by least squares to half-minute means, with a level per series; None with too few of them."""
    blocks = [block for points in series if len(block := _blocks(points)) > 1]
    freedom = sum(map(len, blocks)) - len(blocks) - 1
    if freedom < 1:
        return None
    at, value = np.concatenate([block - block.mean(axis=0) for block in blocks]).T
    spread = at @ at
    slope = at @ value / spread
    error = np.sqrt(((value - slope * at) ** 2).sum() / freedom / spread)
    reach = stats.t.ppf(0.975, freedom) * error
    return Slope(*(float(_HOUR_S * per_s) for per_s in (slope, slope - reach, slope + reach)))


def growth_row(part: str, quantity: str, series: Sequence[Series], bound_per_hour: float) -> dict[str, Any]:
    """Return one row of the report: the last level, the slope with its interval, the bound, the verdict."""
    slope = slope_of(series)
    last = max((points[-1] for points in series if points), default=(0.0, 0.0))
    row = {"part": part, "quantity": quantity, "last": round(last[1], 1), "bound_per_hour": bound_per_hour}
    if slope is None:
        return {**row, "per_hour": None, "interval": None, "verdict": "open"}
    interval = [round(slope.low, 1), round(slope.high, 1)]
    verdict = slope.verdict(bound_per_hour)
    return {**row, "per_hour": round(slope.per_hour, 1), "interval": interval, "verdict": verdict}


def _blocks(series: Series) -> np.ndarray:
    """Return the mean time and value of each block, (blocks, 2)."""
    blocks: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for at_s, value in series:
        blocks[int(at_s // _BLOCK_S)].append((at_s, value))
    return np.array([np.mean(some, axis=0) for _, some in sorted(blocks.items())])
