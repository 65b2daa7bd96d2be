"""The processes of one running stack that a fault may kill, found through the stack's record."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil

from infra.local.supervisor.keeper import children_of
from infra.local.supervisor.stackfile import StackFile
from services.errors import EnvironmentFault

_REPLICA = "ray::ServeReplica:tailrace:"


class StackProcesses:
    """The processes of the stack in one state folder. `rays` and `workers` name the parts that run Ray with replicas, and the stream workers."""

    def __init__(
        self, state_dir: Path, rays: tuple[str, ...] = ("serve",), workers: tuple[str, ...] = ("worker",)
    ) -> None:
        self._file = StackFile(state_dir)
        self._rays = rays
        self._workers = workers

    def kill_gateway(self) -> None:
        """Kill one gateway replica."""
        self._kill(self._replicas("Gateway")[:1])

    def kill_llm(self) -> None:
        """Kill every LLM replica."""
        self._kill(self._replicas("llm"))

    def kill_worker(self) -> None:
        """Kill a stream worker."""
        self._kill([self._part(self._workers[0])])

    def kill_edge(self) -> None:
        """Kill the edge's HAProxy."""
        self._kill(self._below("edge", _is_haproxy))

    def kill_ingress(self) -> None:
        """Kill the HAProxy of one of Ray's nodes: after a reload there is an older one beside the one that listens."""
        self._kill(self._below(self._rays[0], _is_haproxy))

    def kill_raylet(self) -> None:
        """Kill the node server of one of Ray's nodes, and with it every replica there."""
        self._kill(self._below(self._rays[0], lambda process: process.name() == "raylet"))

    def kill_store(self) -> None:
        """Kill the store's server."""
        self._kill([self._part("valkey")])

    def is_healthy(self) -> bool:
        """Whether the supervisor holds every part for healthy."""
        record = self._file.read()
        return record is not None and all(part.phase == "healthy" for part in record.parts.values())

    def num_restarts(self) -> dict[str, int]:
        """How often each part was started again."""
        record = self._file.read()
        return {name: part.num_restarts for name, part in record.parts.items()} if record else {}

    def _part(self, name: str) -> psutil.Process:
        record = self._file.read()
        keeper_pid = record.parts[name].keeper_pid if record else None
        pids = children_of(keeper_pid) if keeper_pid else []
        if not pids:
            raise EnvironmentFault(f"{name} does not run, so it cannot be killed")
        return psutil.Process(pids[0])

    def _replicas(self, deployment: str) -> list[psutil.Process]:
        return self._below(self._rays, lambda process: _title(process).startswith(_REPLICA + deployment))

    def _below(self, part: str | tuple[str, ...], is_wanted: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
        parts = (part,) if isinstance(part, str) else part
        below = [process for name in parts for process in self._part(name).children(recursive=True)]
        found = [process for process in below if _is(process, is_wanted)]
        if not found:
            raise EnvironmentFault(f"nothing of the kind runs below {part}")
        return found

    def _kill(self, processes: list[psutil.Process]) -> None:
        for process in processes:
            os.kill(process.pid, signal.SIGKILL)


def _is(process: psutil.Process, is_wanted: Callable[[psutil.Process], bool]) -> bool:
    try:
        return is_wanted(process)
    except psutil.Error:
        return False


def _is_haproxy(process: psutil.Process) -> bool:
    return bool(process.name() == "haproxy")


def _title(process: psutil.Process) -> str:
    return " ".join(process.cmdline())
