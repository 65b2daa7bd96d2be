"""Starts and watches the ranks of one machine. If a rank dies or hangs, all are terminated.

A killed rank is detected by its exit, a hung rank by the timeout of the ranks that wait for it. A hung or paused rank
prints its stack before it is terminated.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

import structlog
import torch
import torch.distributed as dist

from pipelines.runner.stage import Progress
from pipelines.training.fit.checkpoints import Checkpoints
from pipelines.training.parallel.mesh import Mesh
from pipelines.training.workers.attempts import Left, Needs, fit_again
from pipelines.training.workers.rank import SHOW_STACK, ExitKind, RankExit, RankStart, Shown, run_local_rank

log = structlog.get_logger()

_GRACE_S = 10.0
"""Seconds for other ranks to notice a lost rank: gloo takes 0.1 s, NCCL its watchdog's interval."""
_DUMP_S = 1.0


@dataclass(slots=True)
class _Rank:
    number: int
    process: SpawnProcess
    receiving: Connection
    ended: RankExit | None = None
    is_hung: bool = False


def fit_locally(
    work: Callable[..., Any], mesh: Mesh, checkpoints: Checkpoints, progress: Progress, needs: Needs | None = None
) -> Any:
    """Return the result of rank 0's work. Raises as `fit_again`."""
    return fit_again(lambda accumulation: _run(work, mesh.accumulating(accumulation), progress), checkpoints, needs)


def _run(work: Callable[..., Any], mesh: Mesh, progress: Progress) -> list[Left]:
    meeting = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    has_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= mesh.world_size
    starts = [
        RankStart(
            mesh=replace(mesh, rank=rank, local_rank=rank),
            num_threads=torch.get_num_threads(),
            has_gpu=has_gpu,
            port=meeting.port,
        )
        for rank in range(mesh.world_size)
    ]
    with _started(starts, work) as ranks:
        _watch(ranks, progress)
    return [Left(rank.number, rank.ended, _seen(rank)) for rank in ranks]


@contextmanager
def _started(starts: list[RankStart], work: Callable[..., Any]) -> Iterator[list[_Rank]]:
    context, ranks = multiprocessing.get_context("spawn"), list[_Rank]()
    try:
        for start in starts:
            receiving, sending = context.Pipe(duplex=False)
            process = context.Process(
                target=run_local_rank, args=(start, work, sending), name=f"rank {start.mesh.rank}"
            )
            process.start()
            sending.close()
            ranks.append(_Rank(start.mesh.rank, process, receiving))
            log.info("worker_started", rank=start.mesh.rank, pid=process.pid)
        yield ranks
    finally:
        for rank in ranks:
            rank.process.kill()
        for rank in ranks:
            rank.process.join()
            rank.receiving.close()


def _watch(ranks: list[_Rank], progress: Progress) -> None:
    """Wait until all ranks have ended. After the first failure, the remaining ranks have a few seconds."""
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
            elif isinstance(message, RankExit):
                rank.ended = message
            else:
                del open_ranks[rank.receiving]
                rank.process.join()
            if ends_at_s is None and (message is None or isinstance(message, RankExit)) and not _is_done(rank):
                ends_at_s = time.monotonic() + _GRACE_S


def _received(receiving: Connection) -> Shown | RankExit | None:
    """Return the next message, None at the end of a process."""
    try:
        message: Shown | RankExit = receiving.recv()
    except (EOFError, OSError):
        return None
    return message


def _is_done(rank: _Rank) -> bool:
    return rank.ended is not None and rank.ended.how == ExitKind.DONE


def _end(ranks: list[_Rank]) -> None:
    """Make hung ranks print their stacks, paused or not, and terminate them."""
    for rank in ranks:
        rank.is_hung = True
        log.warning("worker_hung", rank=rank.number, pid=rank.process.pid)
        for sent in (SHOW_STACK, signal.SIGCONT):
            with suppress(ProcessLookupError):
                os.kill(rank.process.pid or 0, sent)
    time.sleep(_DUMP_S)


def _seen(rank: _Rank) -> str:
    if rank.is_hung:
        return "did not answer the others"
    code = rank.process.exitcode or 0
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
