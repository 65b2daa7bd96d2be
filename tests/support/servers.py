"""Real servers on free ports: a Valkey, a broker and an object store that can be stopped, frozen and restarted."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Self

import httpx

from infra.local.binaries import tansu_command, valkey_command
from infra.local.supervisor.probes import answers_redis
from tests.support.wait import wait_for

HOST = "127.0.0.1"
_GIVEN_PORTS = set[int]()
_PROCESS = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_NUM_PROCESSES = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))


def free_port() -> int:
    """Return a free port that this process did not return before.

    Nobody takes it between this probe and the server's start: it lies below the ports of stacks and the kernel's
    ephemeral ports, and each of several test processes has every n-th port.
    """
    draw = random.SystemRandom()
    while (port := draw.randrange(10_000 + _PROCESS, 18_000, _NUM_PROCESSES)) in _GIVEN_PORTS or not _is_free(port):
        pass
    _GIVEN_PORTS.add(port)
    return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


@contextmanager
def holding(ports: Iterable[int]) -> Iterator[None]:
    """Keep these ports occupied, by sockets of this process unless they are in use already."""
    with ExitStack() as held:
        for port in ports:
            with suppress(OSError):
                held.enter_context(socket.create_server((HOST, port)))
        yield


class Server:
    """A server process on its own port, the same after each start, and its readiness check; runs during a `with`."""

    def __init__(
        self,
        command: Callable[[int], list[str]],
        log: Path,
        port: int | None = None,
        answers: Callable[[str, int], bool] | None = None,
    ) -> None:
        self.port = port or free_port()
        self._answers = answers or accepts
        self._command = command(self.port)
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    def start(self) -> None:
        """Start it and wait until it answers."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        wait_for(lambda: self._answers(HOST, self.port), what=self._command[0])

    def ensure_running(self) -> None:
        """Resume it, or start it if it has ended."""
        if self._process is None or self._process.poll() is not None:
            self.start()
        self.thaw()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """Freeze the process: it accepts connections and does not answer."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Continue a frozen process."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)


def accepts(host: str, port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) == 0


def valkey_server(folder: Path) -> Server:
    """Create a Valkey that keeps its data in `folder`; not started."""
    folder.mkdir(parents=True, exist_ok=True)
    return Server(lambda port: valkey_command(port, folder), folder / "valkey.log", answers=answers_redis)


def broker_server(folder: Path, advertised: str = "") -> Server:
    """Create a broker without persistence; not started.

    `advertised` is the address that clients connect to, if not its own.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return Server(partial(tansu_command, advertised=advertised), folder / "broker.log")


S3_KEYS = ("a-key", "a-secret")
"""Key and secret that the object store accepts."""


def object_environment(server: Server) -> dict[str, str]:
    """Return the environment variables that a process needs to reach this object store."""
    key, secret = S3_KEYS
    reach = {"AWS_ENDPOINT_URL": f"http://{server.address}", "AWS_REGION": "us-east-1"}
    return reach | {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret}


def object_server(folder: Path) -> Server:
    """Create an S3 server (SeaweedFS) with credentials, data in `folder` and the bucket `bundles`; not started."""
    folder.mkdir(parents=True, exist_ok=True)
    key, secret = S3_KEYS
    credentials = [{"accessKey": key, "secretKey": secret}]
    identity = {"name": "tests", "credentials": credentials, "actions": ["Admin", "Read", "Write", "List"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    others = {name: free_port() for name in ("master", "volume", "filer")}
    inner = [f"-{name}.port.grpc={free_port()}" for name in ("master", "volume", "filer", "s3")]
    filer = f"http://{HOST}:{others['filer']}"

    def command(port: int) -> list[str]:
        return [
            *(str(Path(sys.executable).with_name("weed")), "server", f"-dir={folder}", f"-ip={HOST}", "-volume.max=8"),
            *("-s3.port.iceberg=0", "-s3.port.lance=0"),  # fixed ports, which a second server could not open
            *("-master.volumeSizeLimitMB=64", "-s3", f"-s3.port={port}", f"-s3.config={folder / 's3.json'}"),
            *(f"-{name}.port={number}" for name, number in others.items()),
            *inner,
        ]

    def answers(host: str, port: int) -> bool:
        """Whether a file of the bucket can be written, some time after the port is open."""
        with suppress(httpx.HTTPError):
            httpx.post(f"{filer}/buckets/bundles/", timeout=2.0)
            return accepts(host, port) and httpx.put(f"{filer}/ready", content=b"x", timeout=2.0).is_success
        return False

    return Server(command, folder / "s3.log", answers=answers)
