"""Published figures from timed runs: medians, ratios to the best peer, roofline, agreement; and all as Markdown tables. Pure.

A run is a worker's reply: `seconds`, `outputs`, and for our engine `steps` by kind with their minimum cost, and the machine's
`limits` measured next to it, since memory bandwidth on shared hardware varies.
"""

from collections.abc import Iterable, Sequence
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
    """Return one row for each engine and case; `ratio_to_best_peer` is above 1 where the engine is faster."""
    medians = {(one.case.name, one.engine): median(one.values) for one in measured if one.runs}
    rows = []
    for one in measured:
        value = medians.get((one.case.name, one.engine))
        theirs = [medians[key] for peer in peers if (key := (one.case.name, peer)) in medians]
        rows.append(
            {
                "name": one.case.name,
                "engine": one.engine,
                "value": _rounded(value),
                "unit": one.case.unit,
                "ratio_to_best_peer": _rounded(_ratio(one.case, value, theirs)),
                "runs": [_rounded(run) for run in one.values],
                **({"graphs": one.runs[-1]["graphs"]} if one.runs and "graphs" in one.runs[-1] else {}),
                **({"error": one.error} if one.error else {}),
            }
        )
    return rows


def best_limits(measured: Sequence[Measured]) -> dict[str, float]:
    """Return the highest limits measured next to any run."""
    found = [run["limits"] for one in measured for run in one.runs if "limits" in run]
    return {name: max(limits[name] for limits in found) for name in (found[0] if found else ())}


def roofline_rows(measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """Compare each kind of step of our engine with the limits of its run: the run with the median share of the nearer limit."""
    rows = []
    for one in measured:
        kinds = sorted({kind for run in one.runs for kind in run.get("steps", {})})
        for kind in kinds:
            runs = [run for run in one.runs if kind in run["steps"]]
            run = sorted(runs, key=lambda run: max(_shares(run, kind)))[(len(runs) - 1) // 2]
            step, (memory, compute) = run["steps"][kind], _shares(run, kind)
            rows.append(
                {
                    "case": one.case.name,
                    "engine": one.engine,
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
    """Compare each engine's first outputs with transformers': the share of positions with the same token or item.

    Greedy texts diverge at the first tie that is broken differently, so a low share alone is no fault: see the gaps. Items are
    compared as sets.
    """
    theirs = {one.case.name: one.runs[0] for one in measured if one.engine == _REFERENCE and one.runs}
    return [
        {
            "case": one.case.name,
            "engine": one.engine,
            "against": _REFERENCE,
            "share": _agreement(one.runs[0], theirs[one.case.name]),
        }
        for one in measured
        if one.runs and one.engine != _REFERENCE and one.case.name in theirs
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


def tables(report: Report) -> str:
    """Return the comparison, the roofline and the outputs' quality, with device and date."""
    engines = list(dict.fromkeys(row["engine"] for row in report["cases"]))
    parts = [_heading(report), comparison(report["cases"], engines), *_notes(report)]
    if report["limits"]:
        parts.append(roofline(report))
    if report["quality"]:
        parts.append(quality(report["quality"]))
    return "\n\n".join(parts)


def has_failed(report: Report) -> bool:
    """Return whether an engine or a case failed; a peer that is not installed is no failure."""
    return bool(report["failed"] or _failed_rows(report))


def _failed_rows(report: Report) -> list[dict[str, Any]]:
    return [row for row in report["cases"] if "error" in row]


def comparison(cases: Sequence[dict[str, Any]], engines: Sequence[str]) -> str:
    """Return one line for each case, a column for each engine, and the ratios of ours to the best peer."""
    ours = [engine for engine in engines if engine.startswith("tailrace")]
    lines = []
    for name, unit in dict.fromkeys((row["name"], row["unit"]) for row in cases):
        by_engine = {row["engine"]: row for row in cases if row["name"] == name}
        values = (_value(by_engine.get(engine)) for engine in engines)
        ratios = (_shown_ratio(by_engine.get(engine)) for engine in ours)
        lines.append([name, unit, *values, *ratios])
    return _table(["case", "unit", *engines, *(f"{engine} / best peer" for engine in ours)], lines)


def roofline(report: Report) -> str:
    """Return one line for each kind of step: time, minimum bytes and operations, and the shares of the limits."""
    limits = report["limits"]
    head = ["step", "ms", "MB", "GFLOP", "limit GB/s", "limit TFLOP/s", "of memory limit", "of compute limit"]
    lines = [
        [
            f"{row['engine']} {row['case']}: {row['step']}",
            f"{row['step_ms']:g}",
            f"{row['step_mbytes']:g}",
            f"{row['step_gflops']:g}",
            f"{row['limit_gbytes_per_s']:.1f}",
            f"{row['limit_tflops_per_s']:.2f}",
            f"{row['memory_share']:.0%}",
            f"{row['compute_share']:.0%}",
        ]
        for row in report["roofline"]
    ]
    limits_note = (
        f"Limits are measured before and after each run; the higher counts. The highest seen:"
        f" {limits['bytes_per_s'] / 1e9:.1f} GB/s read, {limits['flops_per_s'] / 1e12:.2f} TFLOP/s in {report['dtype']}."
    )
    return f"{limits_note}\n\n{_table(head, lines)}"


def quality(found: dict[str, dict[str, float]]) -> str:
    """Return one line for each engine: its greedy tokens compared with transformers in fp32."""
    head = [
        "engine",
        "tokens that are the fp32 reference's best",
        "largest gap to it (logits)",
        "our fp32 logits' error",
    ]
    lines = [
        [name, f"{one['best_share']:.1%}", f"{one['largest_gap']:.3f}", f"{one['logits_max_error']:.1e}"]
        for name, one in found.items()
    ]
    return _table(head, lines)


def _heading(report: Report) -> str:
    return f"{report['device']}, {report['threads']} threads, {report['date']}, {report['model'] or 'random weights'} in {report['dtype']}"


def _notes(report: Report) -> list[str]:
    notes = [f"{name}: {why.splitlines()[-1]}" for name, why in (report["absent_peers"] | report["failed"]).items()]
    notes += [f"{row['name']} on {row['engine']}: {row['error'].splitlines()[-1]}" for row in _failed_rows(report)]
    notes += [f"Beams of {name} are {one['constraint']}." for name, one in report["engines"].items()]
    return ["\n".join(f"- {note}" for note in notes)] if notes else []


def _value(row: dict[str, Any] | None) -> str:
    return "-" if row is None or row["value"] is None else f"{row['value']:,.4g}"


def _shown_ratio(row: dict[str, Any] | None) -> str:
    return "-" if row is None or row["ratio_to_best_peer"] is None else f"{row['ratio_to_best_peer']:.2f}x"


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
