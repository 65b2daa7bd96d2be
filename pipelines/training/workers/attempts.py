"""Restarts all ranks from the last checkpoint while that helps, on one machine or many.

Errors that the user can fix are raised. After an out-of-memory error, all ranks restart with twice as many parts per
batch. Three consecutive starts from the same checkpoint are the limit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from pipelines.training.fit.checkpoints import Checkpoints
from pipelines.training.workers.rank import ExitKind, RankExit
from services.errors import StageFailed

log = structlog.get_logger()

_MAX_FRUITLESS = 3
_MAX_ACCUMULATION = 64


@dataclass(frozen=True, slots=True)
class Left:
    """How a rank ended: its last message, or None and the observed reason."""

    rank: int
    ended: RankExit | None
    seen: str = ""


Run = Callable[[int], Sequence[Left]]
"""Starts all ranks with this factor on the number of parts of a batch, and returns how each ended, by rank."""


Needs = Callable[[int], str]
"""Describes the predicted memory of a rank's steps with this factor."""


def fit_again(run: Run, checkpoints: Checkpoints, needs: Needs | None = None) -> Any:
    """Return the result of rank 0's work. Raises a rank's TailraceError, and StageFailed for a fit without progress."""
    num_fruitless, accumulation = 0, 1
    while True:
        before = checkpoints.newest_name()
        left = run(accumulation)
        how, why = verdict(left)
        if how == ExitKind.DONE:
            assert left[0].ended is not None, "rank 0 is done"
            return left[0].ended.result
        for worker in left:
            if worker.ended is not None and worker.ended.how == ExitKind.REFUSED:
                raise worker.ended.error()
        num_fruitless = num_fruitless + 1 if checkpoints.newest_name() == before else 1
        if how == ExitKind.OUT_OF_MEMORY and accumulation < _MAX_ACCUMULATION:
            if needs is not None:
                why = f"{why}: {needs(accumulation)}"
            accumulation, num_fruitless = accumulation * 2, 0
        elif how == ExitKind.BROKEN or num_fruitless == _MAX_FRUITLESS:
            raise StageFailed(checkpoints.stage, f"{why}; the next run resumes from its last checkpoint")
        used = checkpoints.newest_whole_name()
        log.warning(
            "workers_started_again", stage=checkpoints.stage, why=why, checkpoint=used, accumulation=accumulation
        )


def verdict(left: Sequence[Left]) -> tuple[ExitKind, str]:
    """Return how the fit ended, and why: a rank's own error takes precedence over a lost peer. Pure."""
    for how in (ExitKind.REFUSED, ExitKind.BROKEN):
        for worker in left:
            if worker.ended is not None and worker.ended.how == how:
                return how, f"rank {worker.rank}: {worker.ended.why}"
    if all(worker.ended is not None and worker.ended.how == ExitKind.DONE for worker in left):
        return ExitKind.DONE, ""
    for worker in left:
        if worker.ended is not None and worker.ended.how == ExitKind.OUT_OF_MEMORY:
            return ExitKind.OUT_OF_MEMORY, f"rank {worker.rank} is out of memory"
    silent = [f"rank {worker.rank} {worker.seen}" for worker in left if worker.ended is None]
    return ExitKind.LOST_PEER, ", ".join(silent) or "the ranks have lost each other"
