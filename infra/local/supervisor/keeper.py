"""Run one command, and end every process that it leaves behind: `keeper.py PARENT_PID GRACE_S COMMAND...`.

    supervisor ── keeper ── command ── the command's processes

The keeper dies with its parent (the kernel sends it SIGTERM), and the command dies with the keeper (SIGKILL). When the
command ends, the keeper adopts and kills the processes that the command started. Only then does the keeper exit, with
the command's code, so that a restart finds ports and files free. Linux only, standard library only, one thread; it
does not import Tailrace and starts in milliseconds.
"""

import ctypes
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def keeper_command(parent_pid: int, grace_s: float, command: tuple[str, ...]) -> list[str]:
    """Return the arguments that run `command` under a keeper, with `grace_s` between SIGTERM and SIGKILL."""
    return [sys.executable, "-S", "-E", str(Path(__file__).absolute()), str(parent_pid), str(grace_s), *command]


def adopt_orphans() -> None:
    """Make this process the new parent of its descendants' orphans."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children_of(pid: int) -> list[int]:
    """Return the direct children of a process, or none if it has ended."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for thread in threads for child in (thread / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def sweep(spared: frozenset[int] = frozenset()) -> None:
    """SIGKILL and reap all descendants of this process, except the `spared` children and their descendants."""
    while victims := [child for child in children_of(os.getpid()) if child not in spared]:
        for victim in victims:
            _kill_tree(victim)
        for victim in victims:
            _reap(victim)


def main(arguments: list[str]) -> NoReturn:
    """Run the command to its end, kill its leftovers, and exit with its code."""
    parent_pid, grace_s, command = int(arguments[0]), float(arguments[1]), arguments[2:]
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    adopt_orphans()
    # before its handler is set, the signal would end only the keeper
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    child_pid = os.fork()
    if child_pid == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        _become(command)

    def kill_child(_number: int, _frame: FrameType | None) -> None:
        _send(child_pid, signal.SIGKILL)

    def stop_child(_number: int, _frame: FrameType | None) -> None:
        _send(child_pid, signal.SIGTERM)
        signal.setitimer(signal.ITIMER_REAL, max(grace_s, 0.001))

    signal.signal(signal.SIGALRM, kill_child)
    signal.signal(signal.SIGTERM, stop_child)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    if os.getppid() != parent_pid:  # the parent died before the signal was requested
        stop_child(signal.SIGTERM, None)
    status = _wait_for(child_pid)
    signal.setitimer(signal.ITIMER_REAL, 0)
    sweep()
    code = os.waitstatus_to_exitcode(status)
    sys.exit(code if code >= 0 else 128 - code)


def _become(command: list[str]) -> NoReturn:
    keeper_pid = os.getppid()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != keeper_pid:
        os._exit(1)
    try:
        os.execvp(command[0], command)  # noqa: S606 - the supervisor's own argument list, no shell
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error}\n")
        os._exit(127)


def _wait_for(child_pid: int) -> int:
    while True:  # adopted orphans end here too
        pid, status = os.wait()
        if pid == child_pid:
            return status


def _kill_tree(pid: int) -> None:
    for child in children_of(pid):
        _kill_tree(child)
    _send(pid, signal.SIGKILL)


def _reap(pid: int) -> None:
    try:
        os.waitpid(pid, 0)
    except ChildProcessError:
        return


def _send(pid: int, signal_number: int) -> None:
    try:
        os.kill(pid, signal_number)
    except ProcessLookupError:
        return


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    main(sys.argv[1:])
