"""A proxy before an object store, in a process of its own: its work takes no time from the measured process.

`python -m benchmarks.many.wire PORT SERVER_PORT` reads a mode per line (see TcpProxy), and repeats it when it holds.
"""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from benchmarks.faults.tcp_proxy import Slowness, TcpProxy, Wire
from infra.local.supervisor.ports import free_window
from services.settings.settings import environment_set, inherited_environment

_HOST, _READ_S = "127.0.0.1", 1.0


class StoreWire:
    """The proxy's process."""

    def __init__(self, port: int, server_port: int) -> None:
        command = [sys.executable, "-m", "benchmarks.many.wire", str(port), str(server_port)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.become(Wire.PASS)

    def become(self, mode: Wire) -> None:
        """Switch to this mode."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{mode}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline().strip() == mode, "the proxy has ended"

    def stop(self) -> None:
        self._process.communicate()


@contextmanager
def wire_to_store() -> Iterator[StoreWire]:
    """Put a wire before the object store of this process's environment; stores opened meanwhile use it."""
    target = inherited_environment()["AWS_ENDPOINT_URL"]
    port = free_window(1, seed=target)
    wire = StoreWire(port, urlsplit(target).port or 80)
    try:
        with environment_set(AWS_ENDPOINT_URL=f"http://{_HOST}:{port}"):
            yield wire
    finally:
        wire.stop()


async def _serve(port: int, server_port: int) -> None:
    async with TcpProxy(_HOST, port, server_port, Slowness(_READ_S, is_one_way=True)) as proxy:
        while line := await asyncio.to_thread(sys.stdin.readline):
            await proxy.become(Wire(line.strip()))
            sys.stdout.write(line)
            sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(_serve(*map(int, sys.argv[1:])))
