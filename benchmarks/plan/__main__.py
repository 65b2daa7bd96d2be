"""The planner's prediction of training throughput against published runs.

    python -m benchmarks.plan --runs CSV --json OUT [--cross]
    python -m benchmarks.plan --runs CSV --fit
    python -m benchmarks.plan capacity --json OUT       costs of the running stack, for `tailrace plan load`

Evaluates the constants of pipelines/planner/fitted.json on the file's runs, except fitted runs; unreadable rows are
named. The columns have the names of llm-foundry's benchmark page. `--cross` also fits to random halves, evaluates on
the rest, and counts by group how many runs lie in intervals from other runs. `--fit` fits the constants to all runs and
to the cited runs (cited_runs.py), and writes them.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.load.command import about_run, exit_on_errors, run_named, write_report
from benchmarks.plan.cited_runs import CITED_RUNS
from benchmarks.plan.fit import (
    COVERAGE,
    errors_by_chip,
    errors_by_source,
    fit,
    fit_with_intervals,
    log_errors,
    share_left_out,
    shortest_interval,
)
from benchmarks.plan.runs import PublishedRun, predict, read_runs
from pipelines.planner.step_time import FITTED, Constants, Group, fitted
from services.errors import ConfigError

_NUM_HALVES = 20
_SOURCE = (
    "training runs of MPT models on llm-foundry's benchmark page "
    "(mosaicml/llm-foundry, scripts/train/benchmarking, Apache-2.0)"
)


def main() -> None:
    """Evaluate or fit, print, write the JSON."""
    options = _parse()
    with exit_on_errors():
        runs, bad = read_runs(options.runs)
        for row in bad:
            print(f"line {row.line} is skipped: {row.problem}", file=sys.stderr)
        if not runs:
            raise ConfigError(f"--runs: {options.runs} has no usable row; give published runs")
        if options.fit:
            _write_constants(runs)
            return
        used = set(json.loads(FITTED.read_text())["runs"])
        judged = [run for run in runs if run.key not in used]
        if not judged and not options.cross:
            raise ConfigError(f"--runs: all rows of {options.runs} were fitted to; give other runs, or --cross")
        report = judge(judged, fitted()) if judged else {}
        report |= {"num_rows": len(runs) + len(bad), "num_fitted_rows": len(runs) - len(judged)}
        report["bad_rows"] = [{"line": row.line, "problem": row.problem} for row in bad]
        if options.cross:
            report["cross"] = {"halves": random_halves(runs)}
            report["groups"] = coverage_by_group(runs, report["cross"]["halves"]["share_within_interval"])
    print(report)
    write_report(options.json, about_run("plan") | report)


def judge(runs: Sequence[PublishedRun], constants: Constants) -> dict[str, Any]:
    """Return prediction errors on these runs, in points of MFU, and the interval's coverage of measured values."""
    predictions = [predict(run, constants) for run in runs]
    measured = np.array([run.mfu for run in runs])
    errors = np.abs(np.array([prediction.mfu for prediction in predictions]) - measured)
    lows, highs = (np.array([getattr(prediction, side) for prediction in predictions]) for side in ("low", "high"))
    return {
        "num_judged": len(runs),
        "median_error_points": _points(np.median(errors)),
        "p90_error_points": _points(np.quantile(errors, 0.9)),
        "bias_points": _points(np.median([prediction.mfu for prediction in predictions] - measured)),
        "share_within_interval": round(float(np.mean((lows <= measured) & (measured <= highs))), 3),
        "median_half_width_points": _points(np.median(highs - lows) / 2),
    }


def random_halves(runs: Sequence[PublishedRun]) -> dict[str, Any]:
    """Return errors and coverage on one half of the runs after a fit to the other half, over several random halves."""
    rng, halves = np.random.default_rng(0), []
    for _ in range(_NUM_HALVES):
        order = rng.permutation(len(runs))
        ours, others = ([runs[index] for index in part] for part in np.array_split(order, 2))
        constants = fit(ours, fitted())
        interval = shortest_interval(log_errors(ours, constants), COVERAGE)
        halves.append(judge(others, replace(constants, intervals=dict.fromkeys(("data", "parallel"), interval))))
    return {
        "number": _NUM_HALVES,
        "median_error_points": _points(np.mean([half["median_error_points"] for half in halves])),
        "share_within_interval": round(float(np.mean([half["share_within_interval"] for half in halves])), 3),
    }


def coverage_by_group(runs: Sequence[PublishedRun], share_of_halves: float) -> dict[str, dict[str, Any]]:
    """Return by group how many runs lie in an interval from other halves, sources or chips, and the stored interval.

    The stored interval is in percent of throughput.
    """
    stored = fitted()
    by_source, by_chip = errors_by_source(stored, CITED_RUNS), errors_by_chip(stored, runs, CITED_RUNS)
    shares: dict[Group, tuple[int, float]] = {
        "data": (len(runs), share_of_halves),
        "parallel": (sum(map(len, by_source.values())), share_left_out(by_source)),
        "unseen": (sum(map(len, by_chip.values())), share_left_out(by_chip)),
    }
    return {
        group: {
            "number": number,
            "share_within_interval": round(share, 3),
            "interval_percent": [round(100 * float(np.expm1(end)), 1) for end in stored.intervals[group]],
        }
        for group, (number, share) in shares.items()
    }


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, metavar="CSV", help="published runs")
    parser.add_argument("--json", type=Path, metavar="OUT", help="the results file")
    parser.add_argument("--cross", action="store_true", help="judge fits to other halves, too")
    parser.add_argument("--fit", action="store_true", help="fit the constants again and write them")
    options = parser.parse_args()
    if not options.fit and options.json is None:
        parser.error("argument --json: give the results file, or --fit")
    return options


def _write_constants(runs: Sequence[PublishedRun]) -> None:
    document = {
        "source": _SOURCE,
        "command": "python -m benchmarks.plan --runs CSV --fit",
        "constants": _fields(fit_with_intervals(runs)),
        "runs": sorted(run.key for run in runs),
    }
    FITTED.write_text(json.dumps(document, indent=1) + "\n")
    print(f"{FITTED}: {document['constants']}")


def _fields(constants: Constants) -> dict[str, Any]:
    return {name: getattr(constants, name) for name in Constants.__dataclass_fields__}


def _points(value: Any) -> float:
    return round(float(value), 2)


if __name__ == "__main__":
    run_named({"capacity": "benchmarks.plan.capacity"}, main)
