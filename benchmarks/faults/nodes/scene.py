"""A cluster of several nodes with its callers, and node faults: kill it, cut its network, replace it.

Callers and the edge are in the cluster's front, so this process enters its namespace before it opens a connection.
"""

import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp

from benchmarks.faults.nodes.layout import HEAD, Layout, why_not
from benchmarks.faults.nodes.parts import cluster_settings
from benchmarks.faults.processes import StackProcesses
from benchmarks.faults.scene import Scene, scratch_folder, started_scene
from infra.local.edge.admin import num_ray_up, use_ray_host
from infra.local.edge.config import edge_folder
from services.errors import EnvironmentFault
from services.observability.node_metrics import node_registry

_EMPTY_WITHIN_S = 1.0
"""Time for requests in progress after a node is taken out of service: longer than their deadline."""
_BACK_WITHIN_S = 240.0
_HEALTHY_WITHIN_S = 240.0
_POLL_S = 0.2


@contextmanager
def layout_of(num_nodes: int) -> Iterator[Layout]:
    """Make the machines, enter their front, and remove them at the end. Raises EnvironmentFault if that fails."""
    if reason := why_not():
        raise EnvironmentFault(f"--nodes: {reason}")
    folder = Path(mkdtemp(prefix="tailrace-nodes-"))
    layout = Layout(f"tr-{os.getpid()}", folder, num_nodes)
    try:
        layout.make()
        layout.enter()
        yield layout
    finally:
        layout.remove()
        shutil.rmtree(folder, ignore_errors=True)


@asynccontextmanager
async def cluster_scene(layout: Layout, state_dir: Path, logs_to: Path | None) -> AsyncIterator[Scene]:
    """Start a cluster on these machines with a copy of this state, and stop it at the end. Raises EnvironmentFault."""
    async with scratch_folder(state_dir, logs_to) as scratch:
        settings = cluster_settings(layout, scratch)
        command = ("benchmarks.faults.nodes.stack", layout.name, str(layout.folder), str(layout.num_nodes))
        try:
            async with AsyncExitStack() as closing:
                scene = await started_scene(closing, settings, command, ClusterProcesses(scratch, layout), {})
                yield replace(scene, healthy_within_s=_HEALTHY_WITHIN_S)
        finally:
            if logs_to is not None:
                _keep_logs(layout, logs_to)


class ClusterProcesses(StackProcesses):
    """The processes of one cluster, by part and by machine."""

    def __init__(self, state_dir: Path, layout: Layout) -> None:
        workers = tuple(f"worker-{index}" for index in range(len(layout.workers)))
        super().__init__(state_dir, rays=layout.workers, workers=workers)
        self._layout = layout
        self._edge = edge_folder(state_dir)

    def kill(self, name: str) -> None:
        """Kill every process on a machine, or processes of the cluster."""
        machines = {"head": HEAD, "first-node": self._layout.workers[0], "last-node": self._layout.workers[-1]}
        if name not in machines:
            super().kill(name)
            return
        for pid in self._layout.pids(machines[name]):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def cut_first_node(self) -> None:
        """Cut the network of the first worker node."""
        self._layout.cut(self._layout.workers[0])

    def mend_first_node(self) -> None:
        self._layout.mend(self._layout.workers[0])

    def replace_all(self) -> None:
        """Replace every node, one after another: first the worker nodes, taken out of service before, then the head.

        Each is stopped in good order, restarted, and in service again before the next one is touched. Raises
        EnvironmentFault if a node does not recover.
        """
        for node in self._layout.workers:
            use_ray_host(self._edge, self._layout.address(node), is_used=False)
            time.sleep(_EMPTY_WITHIN_S)
            self._stop_ray(node)
            use_ray_host(self._edge, self._layout.address(node), is_used=True)
            _wait(self.is_healthy, f"{node} is not back")
        self._stop_ray(HEAD)
        _wait(self.is_healthy, "the head is not back")

    def is_healthy(self) -> bool:
        """Whether every part is healthy, every node's ingress is in service, and every LLM replica runs."""
        if not super().is_healthy() or num_ray_up(self._edge) < len(self._layout.workers):
            return False
        with suppress(EnvironmentFault):
            return all(len(self._replicas(name)) == len(self._layout.workers) for name in ("Gateway", "llm"))
        return False

    def answered_by_node(self) -> dict[str, int]:
        """Return how many recommendations the gateways of each worker node answered since their last start."""
        return {node: _num_answered(self._layout.folder_of(node) / "run/metrics") for node in self._layout.workers}

    def _stop_ray(self, node: str) -> None:
        """Stop Ray on the node in good order, and wait until its supervisor has restarted it."""
        before = self.num_restarts()[node]
        os.kill(self._part(node)[0].pid, signal.SIGTERM)
        _wait(lambda: self.num_restarts().get(node, 0) > before, f"{node} does not start again")


def _num_answered(metrics_dir: Path) -> int:
    samples = (sample for family in node_registry(metrics_dir).collect() for sample in family.samples)
    return int(sum(sample.value for sample in samples if sample.name == "tailrace_requests_total"))


def _wait(is_done: Callable[[], bool], what: str) -> None:
    give_up_s = time.monotonic() + _BACK_WITHIN_S
    while not is_done():
        if time.monotonic() > give_up_s:
            raise EnvironmentFault(what)
        time.sleep(_POLL_S)


def _keep_logs(layout: Layout, logs_to: Path) -> None:
    for machine in layout.machines:
        for session in (layout.folder_of(machine) / "r").glob("session_2*"):
            shutil.copytree(session / "logs", logs_to / machine, dirs_exist_ok=True, ignore_dangling_symlinks=True)
