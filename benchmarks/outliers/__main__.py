"""What outliers cost the other requests: the share of light rankings that the LLM answers in time, in virtual time.

    python -m benchmarks.outliers --json OUT [--seeds 3]

The gate, predictors, breakers, policy and engine scheduler are those of the stack; see `benchmarks.outliers.simulation`.
"""

import argparse
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.load.command import about_run, at_least_one, write_report
from benchmarks.outliers.simulation import SCENARIOS, Counts, Simulation


def main() -> None:
    """Run every scenario, print a table and write the results file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.outliers", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="results file to write")
    parser.add_argument("--seeds", type=at_least_one, default=3, help="runs of each row")
    options = parser.parse_args()
    console, rows = Console(), []
    for name in track(SCENARIOS, "simulating", console=console):
        runs = [Simulation(SCENARIOS[name], seed).run() for seed in range(1, options.seeds + 1)]
        rows.append(_row(name, runs))
    console.print(_table(rows))
    write_report(options.json, {**about_run("outliers"), "rows": rows})


def _row(name: str, runs: list[Counts]) -> dict[str, object]:
    return {
        "row": name,
        "num_light": sum(run.num_light for run in runs),
        "num_sent": sum(run.num_sent for run in runs),
        "num_in_time": sum(run.num_in_time for run in runs),
        "num_late": sum(run.num_late for run in runs),
        "least_share": round(min(run.share for run in runs), 4),
    }


def _table(rows: list[dict[str, object]]) -> Table:
    table = Table("row", "light", "sent to the LLM", "in time", "late", "least share")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    return table


if __name__ == "__main__":
    main()
