"""Starts the ranks of one machine and watches them. One that dies or does not answer ends all, and all begin again at the last checkpoint.

A rank that is killed is noticed by its end, one that hangs by the timeout of those that wait for it. What hangs, or was paused, prints its stack
before it is ended. What the user can mend (a full disk, bad data) is raised, and a fit that cannot go beyond a checkpoint is given up.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

import structlog
import torch
import torch.distributed as dist

from pipelines.runner.stage import Progress
from pipelines.training.fit.checkpoints import Checkpoints
from pipelines.training.workers.rank import SHOW_STACK, Ended, Ending, Seat, Shown, sit_down
from pipelines.training.workers.team import Team
from services.errors import StageFailed

log = structlog.get_logger()

_MAX_FRUITLESS = 3
"""Starts in a row from one and the same checkpoint."""
_MAX_ACCUMULATION = 64
_GRACE_S = 10.0
"""For the others to notice that a rank has left: gloo does within 0.1 s, NCCL within its watchdog's interval."""
_DUMP_S = 1.0


@dataclass(slots=True)
class _Rank:
    number: int
    process: SpawnProcess
    receiving: Connection
    ended: Ended | None = None
    is_hung: bool = False


def fit_locally(work: Callable[..., Any], team: Team, checkpoints: Checkpoints, progress: Progress) -> Any:
    """Return what rank 0's work returned. Raises what a rank raised of TailraceError, and StageFailed for a fit that does not get on."""
    num_fruitless, accumulation = 0, 1
    while True:
        before = checkpoints.newest_name()
        ranks = _run(work, team, accumulation, progress)
        how, why = _verdict(ranks)
        if how == Ending.DONE:
            return ranks[0].ended.result if ranks[0].ended else None
        for rank in ranks:
            if rank.ended is not None and rank.ended.how == Ending.REFUSED:
                raise rank.ended.error()
        num_fruitless = num_fruitless + 1 if checkpoints.newest_name() == before else 1
        if how == Ending.OUT_OF_MEMORY and accumulation < _MAX_ACCUMULATION:
            accumulation, num_fruitless = accumulation * 2, 0
        elif how == Ending.BROKEN or num_fruitless == _MAX_FRUITLESS:
            raise StageFailed(checkpoints.stage, f"{why}; the next run goes on from its last checkpoint")
        log.warning(
            "workers_started_again", stage=checkpoints.stage, why=why, checkpoint=before, accumulation=accumulation
        )


def _run(work: Callable[..., Any], team: Team, accumulation: int, progress: Progress) -> list[_Rank]:
    """Start all ranks and return them when all have ended."""
    meeting = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    has_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= team.workers
    seats = [
        Seat(
            rank=rank,
            size=team.workers,
            port=meeting.port,
            timeout_s=team.timeout_s,
            num_threads=torch.get_num_threads(),
            accumulation=accumulation,
            has_gpu=has_gpu,
            layout=team.layout,
            method=team.method,
        )
        for rank in range(team.workers)
    ]
    with _started(seats, work) as ranks:
        _watch(ranks, progress)
    return ranks


@contextmanager
def _started(seats: list[Seat], work: Callable[..., Any]) -> Iterator[list[_Rank]]:
    context, ranks = multiprocessing.get_context("spawn"), list[_Rank]()
    try:
        for seat in seats:
            receiving, sending = context.Pipe(duplex=False)
            process = context.Process(target=sit_down, args=(seat, work, sending), name=f"rank {seat.rank}")
            process.start()
            sending.close()
            ranks.append(_Rank(seat.rank, process, receiving))
            log.info("worker_started", rank=seat.rank, pid=process.pid)
        yield ranks
    finally:
        for rank in ranks:
            rank.process.kill()
        for rank in ranks:
            rank.process.join()
            rank.receiving.close()


def _watch(ranks: list[_Rank], progress: Progress) -> None:
    """Return when all have ended. After the first that did not end well the others have a few seconds."""
    ends_at_s: float | None = None
    open_ranks = {rank.receiving: rank for rank in ranks}
    while open_ranks:
        left_s = None if ends_at_s is None else ends_at_s - time.monotonic()
        if left_s is not None and left_s <= 0:
            _end(list(open_ranks.values()))
            return
        for receiving in wait(list(open_ranks), left_s):
            rank = open_ranks[receiving]  # type: ignore[index]
            message = _received(rank.receiving)
            if isinstance(message, Shown):
                progress(message.done, message.total, message.words)
            elif isinstance(message, Ended):
                rank.ended = message
            else:
                del open_ranks[rank.receiving]
                rank.process.join()
            if ends_at_s is None and (message is None or isinstance(message, Ended)) and not _is_done(rank):
                ends_at_s = time.monotonic() + _GRACE_S


def _received(receiving: Connection) -> Shown | Ended | None:
    """Return the next message, None at the end of a process."""
    try:
        message: Shown | Ended = receiving.recv()
    except (EOFError, OSError):
        return None
    return message


def _is_done(rank: _Rank) -> bool:
    return rank.ended is not None and rank.ended.how == Ending.DONE


def _end(ranks: list[_Rank]) -> None:
    """Let what hangs print its stack, paused or not, and end it."""
    for rank in ranks:
        rank.is_hung = True
        log.warning("worker_hung", rank=rank.number, pid=rank.process.pid)
        for sent in (SHOW_STACK, signal.SIGCONT):
            with suppress(ProcessLookupError):
                os.kill(rank.process.pid or 0, sent)
    time.sleep(_DUMP_S)


def _verdict(ranks: list[_Rank]) -> tuple[Ending, str]:
    """Return how the fit ended, and why. Pure, but for the ranks' exit codes."""
    for how in (Ending.REFUSED, Ending.BROKEN):
        for rank in ranks:
            if rank.ended is not None and rank.ended.how == how:
                return how, f"rank {rank.number}: {rank.ended.why}"
    if all(_is_done(rank) for rank in ranks):
        return Ending.DONE, ""
    for rank in ranks:
        if rank.ended is not None and rank.ended.how == Ending.OUT_OF_MEMORY:
            return Ending.OUT_OF_MEMORY, f"rank {rank.number} is out of memory"
    silent = [f"rank {rank.number} {_exit_of(rank)}" for rank in ranks if rank.ended is None]
    return Ending.LOST_PEER, ", ".join(silent) or "the ranks have lost each other"


def _exit_of(rank: _Rank) -> str:
    if rank.is_hung:
        return "did not answer the others"
    code = rank.process.exitcode or 0
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
