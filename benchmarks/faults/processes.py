"""The processes of a running stack that a fault may kill or freeze, found through the stack's record."""

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from infra.local.supervisor.processes import REPLICA, name_of, process_tree
from infra.local.supervisor.stackfile import StackFile
from services.errors import EnvironmentFault

_RANK = "services.llm.engine.follower"
_NUM_STALLS, _STALL_S, _STALL_EVERY_S = 3, 0.6, 5.0


class StackProcesses:
    """The processes of the stack in one state folder.

    `rays` and `workers` name the parts that run Ray with replicas, and the stream workers.
    """

    def __init__(
        self, state_dir: Path, rays: tuple[str, ...] = ("serve",), workers: tuple[str, ...] = ("worker",)
    ) -> None:
        self._file = StackFile(state_dir)
        self._rays = rays
        self._workers = workers
        self._frozen: list[psutil.Process] = []

    def kill(self, name: str) -> None:
        """Kill processes at once: one gateway or stream worker, but every LLM replica.

        `edge` is the stack's HAProxy, `ingress` the HAProxy of one Ray node (after a reload an older one runs next to
        the listening one), `raylet` the node server of one node, and with it every replica there.
        """
        match name:
            case "gateway":
                processes = self._replicas("Gateway")[:1]
            case "llm":
                processes = self._replicas("llm")
            case "worker":
                processes = self._part(self._workers[0])[:1]
            case "edge":
                processes = self._below(["edge"], "haproxy")
            case "ingress" | "raylet":
                processes = self._below(self._rays[:1], "haproxy" if name == "ingress" else name)
            case _:
                processes = self._part({"store": "valkey"}.get(name, name))[:1]
        _signal(processes, signal.SIGKILL)

    def freeze_llm(self) -> None:
        """Freeze one LLM replica: its connections stay open, and it does not answer."""
        self._frozen = self._replicas("llm")[:1]
        _signal(self._frozen, signal.SIGSTOP)

    def thaw_llm(self) -> None:
        """Resume the frozen replica, unless Ray has replaced it."""
        _signal([process for process in self._frozen if process.is_running()], signal.SIGCONT)

    def stall_llm(self) -> None:
        """Freeze one LLM replica for 0.6 s, three times, 5 s apart, like a ranking with a slow step."""
        for number in range(_NUM_STALLS):
            time.sleep(_STALL_EVERY_S if number else 0.0)
            self.freeze_llm()
            time.sleep(_STALL_S)
            self.thaw_llm()

    def kill_rank(self) -> None:
        """Kill one of the processes that share an LLM replica's layers, beside the replica itself."""
        _signal(self._ranks()[:1], signal.SIGKILL)

    def freeze_rank(self) -> None:
        """Freeze one of these processes for good: its group ends it."""
        _signal(self._ranks()[:1], signal.SIGSTOP)

    def is_healthy(self) -> bool:
        """Whether the supervisor considers every part healthy."""
        record = self._file.read()
        return record is not None and all(part.phase == "healthy" for part in record.parts.values())

    def num_restarts(self) -> dict[str, int]:
        """Number of restarts of each part."""
        record = self._file.read()
        return {name: part.num_restarts for name, part in record.parts.items()} if record else {}

    def _part(self, name: str) -> list[psutil.Process]:
        """Return a part's processes, its own first. Raises EnvironmentFault if it does not run."""
        record = self._file.read()
        if not (tree := process_tree(record.parts[name] if record else None)):
            raise EnvironmentFault(f"{name} does not run, so it cannot be killed")
        return tree

    def _ranks(self) -> list[psutil.Process]:
        """Return the ranks of all LLM replicas but the first of each. Raises EnvironmentFault if there is none."""
        ranks = [child for replica in self._replicas("llm") for child in replica.children() if _RANK in child.cmdline()]
        if not ranks:
            raise EnvironmentFault("no LLM replica has a second rank")
        return ranks

    def _replicas(self, deployment: str) -> list[psutil.Process]:
        return self._below(self._rays, REPLICA + deployment)

    def _below(self, parts: Sequence[str], name: str) -> list[psutil.Process]:
        """Return the processes of these parts with this name prefix. Raises EnvironmentFault if there is none."""
        processes = [process for part in parts for process in self._part(part) if name_of(process).startswith(name)]
        if not processes:
            raise EnvironmentFault(f"no {name} runs below {', '.join(parts)}")
        return processes


def _signal(processes: list[psutil.Process], number: int) -> None:
    for process in processes:
        os.kill(process.pid, number)
