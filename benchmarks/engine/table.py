"""The engine's benchmark as Markdown tables: `python -m benchmarks.engine.table ENGINE.json`. Printed, for a page."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.load.command import results_file

Report = dict[str, Any]


def tables(report: Report) -> str:
    """Return the comparison, the roofline and the outputs' quality, with device and date."""
    engines = list(dict.fromkeys(row["engine"] for row in report["cases"]))
    parts = [_heading(report), comparison(report["cases"], engines), *_notes(report)]
    if report["limits"]:
        parts.append(roofline(report))
    if report["quality"]:
        parts.append(quality(report["quality"]))
    return "\n\n".join(parts)


def comparison(cases: Sequence[dict[str, Any]], engines: Sequence[str]) -> str:
    """Return one line for each case, a column for each engine, and the ratios of ours to the best peer."""
    ours = [engine for engine in engines if engine.startswith("tailrace")]
    lines = []
    for name, unit in dict.fromkeys((row["name"], row["unit"]) for row in cases):
        by_engine = {row["engine"]: row for row in cases if row["name"] == name}
        values = (_value(by_engine.get(engine)) for engine in engines)
        ratios = (_ratio(by_engine.get(engine)) for engine in ours)
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


def main() -> None:
    """Print the tables of a file."""
    print(tables(json.loads(results_file(__doc__).read_text())))


def _heading(report: Report) -> str:
    return f"{report['device']}, {report['threads']} threads, {report['date']}, {report['model'] or 'random weights'} in {report['dtype']}"


def _notes(report: Report) -> list[str]:
    notes = [f"{name}: {why.splitlines()[-1]}" for name, why in report["absent_peers"].items()]
    failed = [row for row in report["cases"] if "error" in row]
    notes += [f"{row['name']} on {row['engine']}: {row['error'].splitlines()[0]}" for row in failed]
    notes += [f"Beams of {name} are {one['constraint']}." for name, one in report["engines"].items()]
    return ["\n".join(f"- {note}" for note in notes)] if notes else []


def _value(row: dict[str, Any] | None) -> str:
    return "-" if row is None or row["value"] is None else f"{row['value']:,.4g}"


def _ratio(row: dict[str, Any] | None) -> str:
    return "-" if row is None or row["ratio_to_best_peer"] is None else f"{row['ratio_to_best_peer']:.2f}x"


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    main()
