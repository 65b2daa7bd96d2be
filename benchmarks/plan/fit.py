"""Fits the planner's constants to published runs: a robust least squares of the logarithm of MFU, and the interval in which most of the runs lie."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from scipy.optimize import least_squares

from benchmarks.plan.runs import Run, predict
from pipelines.planner.step_time import Constants

COVERAGE = 0.92
"""Share of the runs for which the interval is made."""
MARGIN = 1.08
"""How much wider the interval is made than these runs ask for: its ends are the second or third of some fifty."""
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
    """Return the constants with an interval from runs that the fit had not seen: each is left out once, then each GPU type."""
    left_out = [log_errors([run], fit([*runs[:index], *runs[index + 1 :]]))[0] for index, run in enumerate(runs)]
    low, high = (MARGIN * _quantile(left_out, share) for share in ((1 - COVERAGE) / 2, (1 + COVERAGE) / 2))
    constants = replace(fit(runs), low=low, high=high)
    return replace(constants, unseen=_widening(runs, low, high))


def without_device(runs: Sequence[Run], name: str) -> Constants:
    """Return the constants from the runs on all other devices."""
    return fit([run for run in runs if run.device.name != name])


def log_errors(runs: Sequence[Run], constants: Constants) -> list[float]:
    """Return the logarithm of measured by predicted MFU."""
    return [math.log(run.mfu / predict(run, constants).mfu) for run in runs]


def _widening(runs: Sequence[Run], low: float, high: float) -> float:
    """Return how much wider the interval must be for as many runs on a device that the fit has not seen, to a tenth."""
    devices = sorted({run.device.name for run in runs})
    if len(devices) < 2:
        return 1.0
    needed = []
    for name in devices:
        own = [run for run in runs if run.device.name == name]
        needed += [error / (low if error < 0 else high) for error in log_errors(own, without_device(runs, name))]
    return max(1.0, math.ceil(10 * _quantile(needed, COVERAGE)) / 10)


def _quantile(values: Sequence[float], share: float) -> float:
    """Return the value beyond which another one lies with at most this probability: the order statistic of conformal prediction (Vovk et al. 2005)."""
    ordered, number = sorted(values), len(values) + 1
    rank = math.ceil(share * number) if share > 0.5 else math.floor(share * number)
    return ordered[min(max(rank, 1), len(values)) - 1]
