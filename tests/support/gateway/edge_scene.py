"""A real edge on free ports, and the processes behind it."""

import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from infra.local.edge.admin import ray_is_up
from infra.local.edge.config import edge_folder
from services.settings.settings import Settings, inherited_environment
from tests.support.gateway.named_doors import RAY
from tests.support.servers import HOST, accepts, free_port
from tests.support.wait import wait_for

STANDBY = "standby"
_PORTS = ("http_port", "grpc_port", "inner_http_port", "inner_grpc_port", "standby_http_port", "standby_grpc_port")


@dataclass
class EdgeScene:
    """The processes by name; nothing runs at first. `given` are settings of the edge. `close` ends all processes."""

    folder: Path
    given: dict[str, Any] = field(default_factory=dict)
    children: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    doors: dict[str, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ports = {name: free_port() for name in ("metrics_port", *_PORTS)}
        self.settings = Settings(state_dir=self.folder, **(ports | self.given))
        self.settings.metrics_dir.mkdir(parents=True)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.settings.http_port}"

    @property
    def is_ray_up(self) -> bool | None:
        """Whether Ray's ingress passes the edge's checks; None while HAProxy does not answer."""
        return ray_is_up(edge_folder(self.folder))

    def start(self, name: str, *command: str, **variables: str) -> None:
        """Start a program; its output goes to a file of its name."""
        metrics = {"PROMETHEUS_MULTIPROC_DIR": str(self.settings.metrics_dir)}
        with (self.folder / f"{name}.log").open("ab") as log:
            self.children[name] = subprocess.Popen(
                command,
                env={**inherited_environment(), **self.settings.as_environment(), **metrics, **variables},
                stdout=log,
                stderr=log,
            )

    def start_edge(self, *options: str) -> None:
        self.start("edge", sys.executable, "-m", "infra.local.edge", *options)

    def start_doors(self, name: str, ports: tuple[int, int] | None = None) -> None:
        """Start a server's REST and gRPC, by default on the ports of the standby or of Ray's ingress."""
        settings = self.settings
        usual = {
            RAY: (settings.inner_http_port, settings.inner_grpc_port),
            STANDBY: (settings.standby_http_port, settings.standby_grpc_port),
        }
        self.doors[name] = ports or usual[name]
        self.start(name, sys.executable, "-m", "tests.support.gateway.named_doors", name, *map(str, self.doors[name]))

    def until_open(self) -> None:
        """Wait until all ports accept connections."""
        ports = [port for both in self.doors.values() for port in both]
        wait_for(lambda: all(accepts(HOST, port) for port in ports), what="the doors")

    def kill(self, name: str) -> None:
        """SIGKILL it."""
        self.children[name].kill()
        self.children[name].wait()

    def kill_haproxy(self) -> None:
        for process in psutil.Process(self.children["edge"].pid).children():
            process.kill()

    def close(self) -> None:
        for name, child in self.children.items():
            if child.poll() is None:
                below = psutil.Process(child.pid).children(recursive=True)
                self.kill(name)
                for process in below:
                    with suppress(psutil.NoSuchProcess):
                        process.kill()
