"""Published figures from timed runs: medians, ratios to the best peer, roofline, agreement. Pure.

A run is a worker's reply: `seconds`, `outputs`, and for our engine `steps` by kind with their minimum cost, and the
machine's `limits` measured next to it, since memory bandwidth on shared hardware varies.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from benchmarks.engine.cases import Case

Run = dict[str, Any]
Report = dict[str, Any]

_REFERENCE = "transformers"


@dataclass(slots=True)
class Measured:
    """One engine in one case: its runs, or its error."""

    case: Case
    engine: str
    runs: list[Run] = field(default_factory=list)
    error: str | None = None

    @property
    def values(self) -> list[float]:
        """The figure of each run."""
        return [self.case.value(run["seconds"]) for run in self.runs]


def case_rows(measured: Sequence[Measured], peers: Sequence[str]) -> list[dict[str, Any]]:
    """Return one row for each engine and case; `ratio_to_best_peer` is above 1 if the engine is faster."""
    medians = {
        (measurement.case.name, measurement.engine): median(measurement.values)
        for measurement in measured
        if measurement.runs
    }
    rows = []
    for measurement in measured:
        value = medians.get((measurement.case.name, measurement.engine))
        theirs = [medians[key] for peer in peers if (key := (measurement.case.name, peer)) in medians]
        rows.append(
            {
                "name": measurement.case.name,
                "engine": measurement.engine,
                "value": _rounded(value),
                "unit": measurement.case.unit,
                "ratio_to_best_peer": _rounded(_ratio(measurement.case, value, theirs)),
                "runs": [_rounded(run) for run in measurement.values],
                **(
                    {"graphs": measurement.runs[-1]["graphs"]}
                    if measurement.runs and "graphs" in measurement.runs[-1]
                    else {}
                ),
                **({"error": measurement.error} if measurement.error else {}),
            }
        )
    return rows


def roofline_rows(measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """Compare each kind of engine step with the limits in the run with the median share of the nearer limit."""
    rows = []
    for measurement in measured:
        kinds = sorted({kind for run in measurement.runs for kind in run.get("steps", {})})
        for kind in kinds:
            runs = [run for run in measurement.runs if kind in run["steps"]]
            run = sorted(runs, key=lambda run: max(_shares(run, kind)))[(len(runs) - 1) // 2]
            step, (memory, compute) = run["steps"][kind], _shares(run, kind)
            rows.append(
                {
                    "case": measurement.case.name,
                    "engine": measurement.engine,
                    "step": kind,
                    "step_ms": _rounded(1_000 * step["seconds"] / step["steps"]),
                    "step_mbytes": _rounded(step["num_bytes"] / step["steps"] / 1e6),
                    "step_gflops": _rounded(step["flops"] / step["steps"] / 1e9),
                    "limit_gbytes_per_s": _rounded(run["limits"]["bytes_per_s"] / 1e9),
                    "limit_tflops_per_s": _rounded(run["limits"]["flops_per_s"] / 1e12),
                    "memory_share": _rounded(memory),
                    "compute_share": _rounded(compute),
                    "bound_by": "memory" if memory >= compute else "compute",
                    "share_of_limit": _rounded(max(memory, compute)),
                }
            )
    return rows


def _shares(run: Run, kind: str) -> tuple[float, float]:
    """Return the shares of the memory and compute limits that steps of this kind reach."""
    step, limits = run["steps"][kind], run["limits"]
    return (
        step["num_bytes"] / step["seconds"] / limits["bytes_per_s"],
        step["flops"] / step["seconds"] / limits["flops_per_s"],
    )


def agreements(measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """Return the fraction of positions at which each engine's first outputs equal the outputs of transformers.

    Greedy texts diverge at the first tie that is broken differently, so check the gaps before calling a low fraction a
    fault. Items are compared as sets.
    """
    theirs = {
        measurement.case.name: measurement.runs[0]
        for measurement in measured
        if measurement.engine == _REFERENCE and measurement.runs
    }
    return [
        {
            "case": measurement.case.name,
            "engine": measurement.engine,
            "against": _REFERENCE,
            "share": _agreement(measurement.runs[0], theirs[measurement.case.name]),
        }
        for measurement in measured
        if measurement.runs and measurement.engine != _REFERENCE and measurement.case.name in theirs
    ]


def _agreement(mine: Run, theirs: Run) -> float:
    same = total = 0
    for left, right in zip(mine["outputs"], theirs["outputs"], strict=True):
        if left and isinstance(left[0], list):
            same += len({tuple(code) for code in left} & {tuple(code) for code in right})
        else:
            same += sum(a == b for a, b in zip(left, right, strict=True))
        total += len(left)
    return round(same / total, 4) if total else 0.0


def _ratio(case: Case, value: float | None, theirs: Sequence[float]) -> float | None:
    if value is None or not theirs:
        return None
    return min(theirs) / value if case.unit == "ms" else value / max(theirs)


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def lines(report: Report) -> list[str]:
    """Return a line for each case and engine, and for each missing or failed engine; the JSON has the rest."""
    texts = [
        f"{row['name']:44} {row['engine']:14} {row['value']:>10,.4g} {row['unit']}{_beside_peer(row)}"
        for row in report["cases"]
        if row["value"] is not None
    ]
    texts += [f"{name}: {why.splitlines()[-1]}" for name, why in (report["absent_peers"] | report["failed"]).items()]
    return texts + [
        f"{row['name']} on {row['engine']}: {row['error'].splitlines()[-1]}" for row in _failed_rows(report)
    ]


def has_failed(report: Report) -> bool:
    """Return whether an engine or a case failed; a peer that is not installed does not count."""
    return bool(report["failed"] or _failed_rows(report))


def _failed_rows(report: Report) -> list[dict[str, Any]]:
    return [row for row in report["cases"] if "error" in row]


def _beside_peer(row: dict[str, Any]) -> str:
    ratio = row["ratio_to_best_peer"]
    return f"  {ratio:.2f}x the best peer" if ratio is not None and row["engine"].startswith("tailrace") else ""
