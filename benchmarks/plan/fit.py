"""Fits the planner's constants to published runs: a robust least squares of the logarithm of MFU, and the interval in which most runs lie that the fit has not seen."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from scipy.optimize import least_squares

from benchmarks.plan.runs import Run, predict
from pipelines.planner.step_time import Constants

COVERAGE = 0.89
"""Share of the left-out runs that the interval holds. Those are judged by fits to half as many runs as the stored one, which is better: of new runs it holds some 92 %."""
_NUM_HALVES = 10
_START = {"attention": 0.5, "passes": 10.0, "exposed": 1.0}
_BOUNDS = {"efficiency": (0.2, 1.2), "attention": (0.05, 2.0), "passes": (0.0, 100.0), "exposed": (0.0, 10.0)}
_EFFICIENCY = 0.7
_OUTLIER = 0.05
"""Beyond this difference of logarithms a run counts linearly and no longer by its square."""


def fit(runs: Sequence[Run]) -> Constants:
    """Return the constants that fit these runs, without an interval."""
    chips = sorted({run.device.chip for run in runs})
    names = [*chips, *_START]
    bounds = np.array([_BOUNDS.get(name, _BOUNDS["efficiency"]) for name in names])
    start = [_EFFICIENCY] * len(chips) + list(_START.values())
    devices = tuple(sorted({run.device.name for run in runs}))

    def constants(values: Sequence[float]) -> Constants:
        named = dict(zip(names, map(float, values), strict=True))
        efficiency = {chip: named.pop(chip) for chip in chips}
        return Constants(efficiency=efficiency, devices=devices, **named)

    found = least_squares(
        lambda values: log_errors(runs, constants(values)), start, bounds=bounds.T, loss="soft_l1", f_scale=_OUTLIER
    )
    return constants(found.x)


def fit_with_interval(runs: Sequence[Run]) -> Constants:
    """Return the constants with an interval from runs that a fit had not seen: random halves judge each other, and GPU types all others."""
    rng, left_out = np.random.default_rng(0), []
    for _ in range(_NUM_HALVES):
        halves = [[runs[index] for index in part] for part in np.array_split(rng.permutation(len(runs)), 2)]
        for ours, others in (halves, halves[::-1]):
            left_out += log_errors(others, fit(ours))
    low, high = _shortest_interval(left_out, COVERAGE)
    constants = replace(fit(runs), low=low, high=high)
    return replace(constants, unseen=_widening(runs, low, high))


def without_device(runs: Sequence[Run], name: str) -> Constants:
    """Return the constants from the runs on all other devices."""
    return fit([run for run in runs if run.device.name != name])


def log_errors(runs: Sequence[Run], constants: Constants) -> list[float]:
    """Return the logarithm of measured by predicted MFU."""
    return [math.log(run.mfu / predict(run, constants).mfu) for run in runs]


def _widening(runs: Sequence[Run], low: float, high: float) -> float:
    """Return how much wider the interval must be for as many runs on a chip that the fit has not seen, to a tenth."""
    needed = []
    for chip in sorted({run.device.chip for run in runs}):
        own, others = ([run for run in runs if (run.device.chip == chip) is is_own] for is_own in (True, False))
        if others:
            needed += [error / (low if error < 0 else high) for error in log_errors(own, fit(others))]
    return max(1.0, math.ceil(10 * float(np.quantile(needed, COVERAGE))) / 10) if needed else 1.0


def _shortest_interval(values: Sequence[float], share: float) -> tuple[float, float]:
    """Return the shortest interval that holds this share of the values: a few far off on one side do not stretch it, as they would by quantiles."""
    ordered = sorted(values)
    number = math.ceil(share * len(ordered))
    starts = range(len(ordered) - number + 1)
    first = min(starts, key=lambda start: ordered[start + number - 1] - ordered[start])
    return ordered[first], ordered[first + number - 1]
