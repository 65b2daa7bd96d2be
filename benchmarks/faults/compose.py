"""A compose stack that runs already: its faults kill all processes of one container, and Docker starts it again.

Everything is read through its doors and Docker, since its store is on a network of its own. The API key needs every scope.
"""

import json
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any
from urllib.parse import quote

from benchmarks.faults.kinds import Fault, kill, nothing
from benchmarks.faults.scene import HOST, Scene, called_scene
from benchmarks.load.clients import RestClient
from benchmarks.load.keys import CallerKeys
from benchmarks.load.scoring import tier_weights
from services.contracts.access import Priority
from services.errors import EnvironmentFault
from services.settings.settings import Settings

COMPOSE_FAULTS = {"none": Fault(nothing, nothing)} | {
    f"{service}-killed": kill(service) for service in ("edge", "serve", "standby")
}
_SERVICES = ("redis", "kafka", "worker", "serve", "standby", "edge")
_LABEL = "com.docker.compose"
_HEALTHY_WITHIN_S = 240.0


def docker(*words: str) -> str:
    """Run docker and return its output. Raises EnvironmentFault with its errors."""
    if (program := shutil.which("docker")) is None:
        raise EnvironmentFault("docker is not installed")
    done = subprocess.run([program, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise EnvironmentFault(f"docker {words[0]}: {done.stderr.strip()}")
    return done.stdout


class ComposeProcesses:
    """The containers of one project."""

    def __init__(self, project: str, run_docker: Callable[..., str] = docker) -> None:
        self._project = project
        self._docker = run_docker

    def kill(self, service: str) -> None:
        """Kill everything in the container but its init, which then ends: Docker does not start again what `docker kill` ended."""
        self._docker("exec", "--detach", self.container(service), "sh", "-c", "kill -9 -1")

    def container(self, service: str) -> str:
        """Return the id of a service's container, running or not."""
        return str(self._services()[service]["Id"])

    def is_healthy(self) -> bool:
        """Whether every container on the way of a request or an event runs and is healthy."""
        states = [one["State"] for one in self._services().values()]
        return all(state["Running"] and state["Health"]["Status"] == "healthy" for state in states)

    def num_restarts(self) -> dict[str, int]:
        """How often Docker has started each service's container again."""
        return {name: one["RestartCount"] for name, one in self._services().items()}

    def port(self, number: int) -> int:
        """Return the port of this machine that leads to this port of the edge."""
        return int(self._services()["edge"]["NetworkSettings"]["Ports"][f"{number}/tcp"][0]["HostPort"])

    def _services(self) -> dict[str, Any]:
        """Return the containers by service, as `docker inspect` describes them. Raises EnvironmentFault when one is absent."""
        ids = self._docker("ps", "--all", "--quiet", "--filter", f"label={_LABEL}.project={self._project}").split()
        found = json.loads(self._docker("inspect", *ids)) if ids else []
        services = {one["Config"]["Labels"][f"{_LABEL}.service"]: one for one in found}
        if absent := [name for name in _SERVICES if name not in services]:
            raise EnvironmentFault(f"the project {self._project!r} has no container of {', '.join(absent)}")
        return {name: services[name] for name in _SERVICES}


@asynccontextmanager
async def compose_scene(project: str, key: str) -> AsyncIterator[Scene]:
    """Return a running project with its callers; all of them have this key. Raises EnvironmentFault."""
    processes = ComposeProcesses(project)
    settings = Settings(http_host=HOST, http_port=processes.port(8000), grpc_port=processes.port(9000))
    async with AsyncExitStack() as closing:
        rest = await closing.enter_async_context(RestClient(HOST, settings.http_port, key))

        async def num_events(user_id: str) -> int:
            found = await _console(rest, f"history?user_id={quote(user_id)}")
            return int(found["num_events"])

        rows = (await _console(rest, "bundle"))["quality"]["rows"]
        weights = tier_weights({"metrics": {row["model"]: {"ndcg@10": row["ndcg_at_10"]} for row in rows}})
        keys = CallerKeys(dict.fromkeys(Priority, key), operator=key)
        scene = await called_scene(closing, settings, processes, {}, keys, weights, num_events)
        yield replace(scene, healthy_within_s=_HEALTHY_WITHIN_S)


async def _console(rest: RestClient, path: str) -> dict[str, Any]:
    status, body = await rest.call(b"GET", f"/console/{path}".encode(), b"")
    if status != 200:
        raise EnvironmentFault(f"{rest.address}/console/{path.partition('?')[0]}: status {status}")
    answer: dict[str, Any] = json.loads(body)
    return answer
