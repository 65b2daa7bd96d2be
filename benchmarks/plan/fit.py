"""Fits the planner's constants to published runs, and an interval for each group of runs that contains most of them.

The fit is a robust least squares of the logarithm of throughput.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from benchmarks.plan.cited_runs import CITED_RUNS, CitedRun, predict_cited
from benchmarks.plan.runs import PublishedRun, predict
from pipelines.planner.step_time import Constants, Group

COVERAGE = 0.95
"""Fraction of the fitted runs in the interval of FSDP runs; about 89 % of runs unseen by a fit to one half."""
_FEW = 1.1
"""The intervals of cited runs exceed all errors by this factor: they come from few clusters with similar errors."""
_START = {"attention": 0.5, "passes": 10.0, "exposed": 1.0}
_BOUNDS = {"efficiency": (0.2, 1.2), "attention": (0.05, 2.0), "passes": (0.0, 100.0), "exposed": (0.0, 10.0)}
_EFFICIENCY = 0.7
_PARALLEL = {"data": (0.3, 1.5), "tensor": (0.5, 1.5), "async_tp": (0.3, 1.0), "pipeline": (0.3, 1.0)}
"""Bounds of the constants of other kinds of parallelism: overlapped collectives still have a cost."""
_QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9)
_OUTLIER = 0.05
"""Above this difference of logarithms, a run counts linearly instead of quadratically."""


def fit(runs: Sequence[PublishedRun], start: Constants | None = None) -> Constants:
    """Return the constants fitted to these runs, without intervals; the remaining constants are `start`'s."""
    chips = sorted({run.device.chip for run in runs})
    names = [*chips, *_START]
    bounds = np.array([_BOUNDS.get(name, _BOUNDS["efficiency"]) for name in names])
    first = [_EFFICIENCY] * len(chips) + list(_START.values())
    devices = tuple(sorted({run.device.name for run in runs}))
    kept: dict[str, Any] = {name: getattr(start, name) for name in _PARALLEL} if start else {}

    def constants(values: Sequence[float]) -> Constants:
        named: dict[str, Any] = dict(zip(names, map(float, values), strict=True))
        efficiency = {chip: named.pop(chip) for chip in chips}
        return Constants(efficiency=efficiency, devices=devices, **named, **kept)

    solution = least_squares(
        lambda values: log_errors(runs, constants(values)), first, bounds=bounds.T, loss="soft_l1", f_scale=_OUTLIER
    )
    return constants(solution.x)


def fit_parallel(constants: Constants, cited: Sequence[CitedRun]) -> Constants:
    """Return the constants, with the shares of other kinds of parallelism fitted to these runs."""
    rows = [run for run in cited if run.group(constants) == "parallel"]

    def changed(values: Sequence[float]) -> Constants:
        changes: dict[str, Any] = dict(zip(_PARALLEL, map(float, values), strict=True))
        return replace(constants, **changes)

    bounds = np.array(list(_PARALLEL.values()))
    solution = least_squares(
        lambda values: cited_errors(rows, changed(values)),
        bounds.mean(axis=1),
        bounds=bounds.T,
        loss="soft_l1",
        f_scale=2 * _OUTLIER,
    )
    return changed(solution.x)


def fit_with_intervals(runs: Sequence[PublishedRun], cited: Sequence[CitedRun] = CITED_RUNS) -> Constants:
    """Return the constants with an interval for each group: fitted runs, and cited runs by unseen sources and chips."""
    constants = fit_parallel(fit(runs), cited)
    data = shortest_interval(log_errors(runs, constants), COVERAGE)
    cross: dict[Group, list[float]] = {
        "parallel": [*chain(*errors_by_source(constants, cited).values())],
        "unseen": [*chain(*errors_by_chip(constants, runs, cited).values())],
    }
    intervals: dict[Group, tuple[float, float]] = {"data": data}
    intervals |= {group: whole_range(values) for group, values in cross.items() if values}
    return replace(constants, intervals=intervals)


def errors_by_source(constants: Constants, cited: Sequence[CitedRun]) -> dict[str, list[float]]:
    """Return the errors of the cited runs on known chips by source, each from a fit to the other sources' runs."""
    rows = [run for run in cited if run.group(constants) == "parallel"]
    errors = {}
    for source in sorted({run.source for run in rows}):
        own, others = ([run for run in rows if (run.source == source) is is_own] for is_own in (True, False))
        errors[source] = cited_errors(own, fit_parallel(constants, others)) if others else []
    return errors


def errors_by_chip(
    constants: Constants, runs: Sequence[PublishedRun], cited: Sequence[CitedRun]
) -> dict[str, list[float]]:
    """Return the errors on unseen chips and models: cited runs, and quantiles per fitted chip by a fit to the rest."""
    errors: dict[str, list[float]] = {}
    for run in cited:
        if run.group(constants) == "unseen":
            key = "experts" if run.shape.experts else run.device.chip
            errors.setdefault(key, []).extend(cited_errors([run], constants))
    chips = sorted({run.device.chip for run in runs})
    for chip in chips if len(chips) > 1 else ():
        own, others = ([run for run in runs if (run.device.chip == chip) is is_own] for is_own in (True, False))
        errors[chip] = [*map(float, np.quantile(log_errors(own, fit(others, constants)), _QUANTILES))]
    return errors


def share_left_out(errors: Mapping[str, Sequence[float]]) -> float:
    """Return the fraction of errors in the interval of the other sources' or chips' errors."""
    inside = []
    for key, own in errors.items():
        low, high = whole_range([*chain(*(errors[other] for other in errors if other != key))])
        inside += [low <= error <= high for error in own]
    return float(np.mean(inside))


def log_errors(runs: Sequence[PublishedRun], constants: Constants) -> list[float]:
    """Return the logarithm of measured over predicted MFU."""
    return [math.log(run.mfu / predict(run, constants).mfu) for run in runs]


def cited_errors(runs: Sequence[CitedRun], constants: Constants) -> list[float]:
    """Return the logarithm of measured over predicted throughput."""
    return [math.log(run.tokens_per_s / predict_cited(run, constants).mfu) for run in runs]


def whole_range(values: Sequence[float]) -> tuple[float, float]:
    """Return an interval that contains all of a few values, and zero, with a margin."""
    return _FEW * min(0.0, *values), _FEW * max(0.0, *values)


def shortest_interval(values: Sequence[float], share: float) -> tuple[float, float]:
    """Return the shortest interval that contains this fraction of the values; outliers do not stretch it."""
    ordered = sorted(map(float, values))
    number = math.ceil(share * len(ordered))
    starts = range(len(ordered) - number + 1)
    first = min(starts, key=lambda start: ordered[start + number - 1] - ordered[start])
    return ordered[first], ordered[first + number - 1]
