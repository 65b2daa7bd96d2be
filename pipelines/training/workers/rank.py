"""The lifecycle of one rank: join the other ranks, work, and report how it ended.

Errors are classified here: an error that the user can fix ends the fit; a lost peer or an out-of-memory error restarts
it.
"""

import ctypes
import faulthandler
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from pipelines.training.parallel.mesh import Mesh
from services.errors import TailraceError

_PR_SET_PDEATHSIG = 1
_LONGEST_START = timedelta(minutes=5)
"""Timeout for ranks to find each other; a rank imports torch first."""
SHOW_STACK = signal.SIGUSR1
"""Signal that makes a rank print the stacks of all its threads, even while blocked."""


class ExitKind(StrEnum):
    """How a rank ended. The first of these, in this order, that any rank has is the fit's reason to end."""

    REFUSED = "refused"
    BROKEN = "broken"
    OUT_OF_MEMORY = "out of memory"
    LOST_PEER = "lost peer"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Shown:
    """Progress of rank 0."""

    done: int
    total: int
    words: str


@dataclass(frozen=True, slots=True)
class RankExit:
    """A rank's last message: its result, or its error."""

    how: ExitKind
    result: Any = None
    why: str = ""

    def error(self) -> TailraceError:
        """Return the error of a rank that was rejected."""
        kind, arguments, fields = self.result
        error: TailraceError = kind.__new__(kind)
        error.args = arguments
        vars(error).update(fields)
        return error


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStart:
    """The position of a rank in the mesh, and the resources of its process. `port` is that of the rendezvous."""

    mesh: Mesh
    num_threads: int
    has_gpu: bool
    port: int = 0


def run_local_rank(start: RankStart, work: Callable[..., Any], sending: Connection) -> None:
    """Run as this rank of one machine and send how it ended; the process exits with 0 if it is done.

    It dies with the process that started it.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started the ranks terminates them
    mesh = start.mesh

    def join() -> None:
        timeout = timedelta(seconds=mesh.timeout_s)
        patience = max(timeout, _LONGEST_START)
        store = dist.TCPStore("127.0.0.1", start.port, is_master=False, timeout=patience)  # type: ignore[attr-defined]
        kind = "cpu:gloo,cuda:nccl" if start.has_gpu else "gloo"
        dist.init_process_group(kind, store=store, rank=mesh.rank, world_size=mesh.world_size, timeout=timeout)

    if start.has_gpu:
        torch.cuda.set_device(mesh.local_rank)
    ended = run_rank(start, join, work, sending.send)
    if ended.how == ExitKind.DONE:
        dist.destroy_process_group()
    sys.exit(ended.how != ExitKind.DONE)


def run_rank(
    start: RankStart, join: Callable[[], None], work: Callable[..., Any], send: Callable[[Shown | RankExit], None]
) -> RankExit:
    """Run as this rank; send progress and how it ended, and return the latter.

    `join` returns once all ranks have joined torch's default process group.
    """
    faulthandler.register(SHOW_STACK, all_threads=True)
    torch.set_num_threads(start.num_threads)

    def show(done: int, total: int, words: str) -> None:
        send(Shown(done, total, words))

    def joined() -> Any:
        join()
        return work(progress=show, mesh=start.mesh)

    ended = _run(joined)
    send(ended if start.mesh.is_main or ended.how != ExitKind.DONE else RankExit(ExitKind.DONE))
    return ended


def _run(work: Callable[[], Any]) -> RankExit:
    """Do the work, and return its result or its error."""
    try:
        return RankExit(ExitKind.DONE, work())
    except TailraceError as error:
        return RankExit(ExitKind.REFUSED, (type(error), error.args, vars(error)), str(error))
    except Exception as error:  # noqa: BLE001 - the process that started this rank decides
        return RankExit(_kind_of(error), why=traceback.format_exc())


def _kind_of(error: Exception) -> ExitKind:
    words = str(error).lower()
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in words:
        return ExitKind.OUT_OF_MEMORY
    if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in words):
        return ExitKind.LOST_PEER
    return ExitKind.BROKEN
