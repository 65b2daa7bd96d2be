"""The interface of `tests.support.stacks.stack` for a container stack, controlled through docker compose."""

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
from prometheus_client.parser import text_string_to_metric_families

from infra.local.supervisor.processes import REPLICA
from services.settings.settings import Settings, inherited_environment
from tests.support.servers import HOST, free_port
from tests.support.stacks.stack import AGAIN_WHEN_REFUSED, ROOT, START_TIMEOUT_S, Stack
from tests.support.wait import wait_for

SERVICES = {
    "valkey": "redis",
    "broker": "kafka",
    "worker": "worker",
    "serve": "serve",
    "standby": "standby",
    "edge": "edge",
}
"""The service of each part of the embedded stack."""
CALLS_A_DOOR = {"explain"}
METERED = ("serve", "standby", "edge", "worker")
LABEL = "com.docker.compose.project"
_SERVICE = "com.docker.compose.service"
_READ_METRICS = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:9100/metrics').read().decode())"
_LIST_REPLICAS = "import psutil, json; print(json.dumps({p.pid: ' '.join(p.cmdline()) for p in psutil.process_iter()}))"


class ComposeStack(Stack):
    """A compose project on its own ports. With `keep` its volumes, and so bundle and features, survive it."""

    def __init__(
        self, project: str, overrides: list[Path], surfaces: Path, *, keep: bool = False, build: bool = True
    ) -> None:
        """`surfaces` is a folder with both files, which every user may read."""
        self.project = project
        self._processes = ComposeProcesses(project)
        self._files = [ROOT / "docker-compose.yml", *overrides]
        self._surfaces = surfaces
        self._keep = keep
        self._build = build
        self._channel: grpc.Channel | None = None
        self.api_key = ""
        self._given: dict[str, str] = {}
        self._grafana_and_prometheus = {name: str(free_port()) for name in ("GRAFANA_PORT", "PROMETHEUS_PORT")}
        self.settings = Settings(http_port=free_port(), grpc_port=free_port(), gateway_replicas=2)
        self.rest = httpx.Client(base_url=f"http://{HOST}:{self.settings.http_port}", timeout=20.0)

    def start(self, *training: str) -> None:
        """Build missing images, start everything, and wait until a bundle answers and all is healthy.

        Trains with these options while all else runs; a kept project trains by its own job, and only if no bundle is
        live.
        """
        if self._build:
            self.compose("build", timeout_s=START_TIMEOUT_S)
        if self._keep:
            self.compose("up", "--detach", timeout_s=START_TIMEOUT_S)
        else:
            self.compose("up", "--detach", "--scale", "pipeline=0", timeout_s=START_TIMEOUT_S)
            command = ("run", "--rm", "-T", "pipeline", "tailrace", "pipeline", *training)
            self.compose(*command, timeout_s=START_TIMEOUT_S)
        wait_for(lambda: self._is_ready(), START_TIMEOUT_S, f"an answer; see `docker compose -p {self.project} logs`")
        wait_for(self.is_healthy, 180.0, "healthy containers")
        self.api_key = self.compose("run", "--rm", "-T", "keys", "show-key").strip()
        self.rest.headers["authorization"] = f"Bearer {self.api_key}"
        self._channel = grpc.intercept_channel(
            grpc.insecure_channel(self.settings.grpc_address, options=[AGAIN_WHEN_REFUSED]), _WithKey(self.api_key)
        )

    def command(self, *arguments: str, timeout_s: float = 120.0) -> "subprocess.CompletedProcess[str]":
        """Run `tailrace ...` in the serving container, or with the operator's key in the edge's if it calls the API."""
        service, key = ("edge", ("--key", self.api_key)) if arguments[0] in CALLS_A_DOOR else ("serve", ())
        command = ["docker", "exec", self.container(service), "tailrace", *arguments, *key]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s)

    def standby(self) -> httpx.Client:
        """Return a client of the standby's REST port, which is not published, at the address of its container."""
        read = f'{{{{(index .NetworkSettings.Networks "{self.project}_front").IPAddress}}}}'
        address = docker("inspect", "--format", read, self.container("standby")).strip()
        headers = {"authorization": f"Bearer {self.api_key}"}
        return httpx.Client(base_url=f"http://{address}:18001", headers=headers, timeout=20.0)

    def stop(self) -> None:
        """Take it down. Raises AssertionError if a container, a network or an unkept volume remains."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self.compose("down", "--remove-orphans", *(() if self._keep else ("--volumes",)), timeout_s=300.0)
        left = self.leftovers()
        assert not left, f"left behind: {left}"

    def leftovers(self) -> list[str]:
        """Return the project's remaining containers, networks and (unless kept) volumes."""
        kinds = {"container": ("ls", "--all"), "network": ("ls",), "volume": ("ls",)}
        if self._keep:
            del kinds["volume"]
        return [
            f"{kind} {name}"
            for kind, words in kinds.items()
            for name in docker(kind, *words, "--quiet", "--filter", f"label={LABEL}={self.project}").split()
        ]

    def metric(self, name: str, /, **labels: str) -> float:
        """Sum a metric over all containers that export it and all its series with these labels; 0 without any."""
        texts = [docker("exec", self.container(service), "python", "-c", _READ_METRICS) for service in METERED]
        return sum(
            sample.value
            for text in texts
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def _log(self) -> str:
        return "".join(docker("logs", self.container(service)) for service in ("serve", "standby"))

    @contextmanager
    def given(self, **variables: str) -> Iterator[None]:
        """Run with these compose variables; affected containers are recreated at the beginning and the end."""
        self._given = variables
        self._up()
        try:
            yield
        finally:
            self._given = {}
            self._up()

    @contextmanager
    def overridden(self, file: Path) -> Iterator[None]:
        """Run with one more compose file; affected containers are recreated at the beginning and the end."""
        self._files.append(file)
        self._up()
        try:
            yield
        finally:
            self._files.remove(file)
            self._up()

    def write_surfaces(self, name: str, text: str) -> None:
        """Replace a file of the mounted folder as an editor does: by another file."""
        scratch = self._surfaces / f".{name}"
        scratch.write_text(text)
        scratch.chmod(0o644)
        scratch.replace(self._surfaces / name)

    def put(self, folder: Path, volume_place: str) -> None:
        """Copy a folder of this machine into a volume that the worker writes."""
        done = subprocess.run(["tar", "-C", str(folder.parent), "-c", folder.name], capture_output=True, check=True)
        command = ["docker", "exec", "-i", self.container("worker"), "tar", "-C", volume_place, "-x", "--no-same-owner"]
        subprocess.run(command, input=done.stdout, check=True, timeout=60)

    # faults

    def num_restarts(self, part: str) -> int:
        """Return how often the engine has restarted the part's container."""
        return self._processes.num_restarts()[SERVICES[part]]

    def kill(self, part: str) -> None:
        """SIGKILL every process of the part except its init, and wait until the engine has restarted it."""
        before = self.num_restarts(part)
        self._processes.kill(SERVICES[part])
        wait_for(lambda: self.num_restarts(part) > before, 30.0, f"a restart of {part}")

    @contextmanager
    def frozen(self, part: str) -> Iterator[None]:
        """Pause a part's container."""
        container = self.container(SERVICES[part])
        docker("pause", container)
        try:
            yield
        finally:
            docker("unpause", container)

    def replica_pids(self, is_wanted: Callable[[str], bool]) -> list[int]:
        """Return the pids, inside the container, of replicas of matching deployments."""
        titles: dict[str, str] = json.loads(docker("exec", self.container("serve"), "python", "-c", _LIST_REPLICAS))
        return [
            int(pid)
            for pid, title in titles.items()
            if title.startswith(REPLICA) and is_wanted(title.removeprefix(REPLICA))
        ]

    def kill_processes(self, pids: list[int]) -> None:
        """SIGKILL processes of the serving container."""
        docker("exec", self.container("serve"), "sh", "-c", f"kill -9 {' '.join(map(str, pids))}")

    def restart(self, *services: str) -> None:
        """Restart these services and wait until all are healthy."""
        self.compose("restart", *services, timeout_s=300.0)
        self._until_back()

    def _up(self) -> None:
        self.compose("up", "--detach", timeout_s=600.0)
        self._until_back()

    def _until_back(self) -> None:
        wait_for(self.is_healthy, 240.0, "healthy containers")
        wait_for(self._is_ready, 120.0, "an answer")

    def is_healthy(self) -> bool:
        return self._processes.is_healthy()

    def keeps_events(self) -> bool:
        """Return whether the broker is Apache Kafka, which keeps events on disk; a replacement may not."""
        look = ["docker", "exec", self.container("kafka"), "ls", "/opt/kafka/libs"]
        return subprocess.run(look, capture_output=True, check=False).returncode == 0

    def container(self, service: str) -> str:
        return self._processes.container(service)

    def compose(self, *words: str, timeout_s: float = 120.0) -> str:
        """Run docker compose on this project; return its output. Raises AssertionError with it on failure."""
        files = [word for file in self._files for word in ("--file", str(file))]
        done = subprocess.run(
            [*compose_command(), "--project-name", self.project, *files, *words],
            env={**inherited_environment(), **self._variables()},
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )
        assert done.returncode == 0, f"docker compose {' '.join(words)}:\n{done.stdout[-2_000:]}{done.stderr[-2_000:]}"
        return done.stdout

    def _variables(self) -> dict[str, str]:
        settings = self.settings
        return {
            "HTTP_PORT": str(settings.http_port),
            "GRPC_PORT": str(settings.grpc_port),
            "GATEWAY_REPLICAS": str(settings.gateway_replicas),
            "SURFACES_DIR": str(self._surfaces),
            **self._grafana_and_prometheus,
            **self._given,
        }

    def _is_ready(self) -> bool:
        try:
            return self.rest.get("/readyz").status_code == 200
        except httpx.TransportError:
            return False


class _WithKey(grpc.UnaryUnaryClientInterceptor, grpc.StreamStreamClientInterceptor):
    """Adds the API key to every call."""

    def __init__(self, key: str) -> None:
        self._metadata = [("authorization", f"Bearer {key}")]

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        return continuation(self._with_key(details), request)

    def intercept_stream_stream(self, continuation: Any, details: Any, requests: Any) -> Any:
        return continuation(self._with_key(details), requests)

    def _with_key(self, details: Any) -> Any:
        return details._replace(metadata=[*(details.metadata or ()), *self._metadata])


def compose_command() -> list[str]:
    """Return the command of Compose v2, else of v1; empty if neither is installed."""
    plugin = ["docker", "compose"]
    if (
        shutil.which("docker")
        and subprocess.run([*plugin, "version"], capture_output=True, check=False).returncode == 0
    ):
        return plugin
    return ["docker-compose"] if shutil.which("docker-compose") else []


def why_not() -> str | None:
    """Return why compose cannot be used here, with the fix; None if it can."""
    if not compose_command():
        return "docker compose is not installed; install Docker with the compose plugin"
    if subprocess.run(["docker", "info"], capture_output=True, check=False).returncode:
        return "no Docker engine answers; start it, and see that you may use its socket"
    return None


def docker(*words: str) -> str:
    """Run docker and return its output. Raises AssertionError with its errors."""
    done = subprocess.run(["docker", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"docker {words[0]}: {done.stderr.strip()}"
    return done.stdout


class ComposeProcesses:
    """The containers of one project."""

    def __init__(self, project: str) -> None:
        self._project = project

    def kill(self, service: str) -> None:
        """Kill everything in the container except its init, which then ends.

        Docker does not restart containers ended by `docker kill`.
        """
        docker("exec", "--detach", self.container(service), "sh", "-c", "kill -9 -1")

    def container(self, service: str) -> str:
        return str(self._services()[service]["Id"])

    def is_healthy(self) -> bool:
        """Whether every container that handles a request or an event runs and is healthy."""
        states = [service["State"] for service in self._services().values()]
        return all(state["Running"] and state["Health"]["Status"] == "healthy" for state in states)

    def num_restarts(self) -> dict[str, int]:
        """How often Docker has restarted each service's container."""
        return {name: service["RestartCount"] for name, service in self._services().items()}

    def _services(self) -> dict[str, Any]:
        """Return the containers by service, as `docker inspect` has them. Raises AssertionError if one is absent."""
        ids = docker("ps", "--all", "--quiet", "--filter", f"label={LABEL}={self._project}").split()
        containers = json.loads(docker("inspect", *ids)) if ids else []
        services = {container["Config"]["Labels"][_SERVICE]: container for container in containers}
        assert services.keys() >= {*SERVICES.values()}, f"the project {self._project} has only {', '.join(services)}"
        return {name: services[name] for name in SERVICES.values()}
