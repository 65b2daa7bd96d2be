"""REST and gRPC without TLS, on a plane of fakes, until killed.

`python -m tests.support.gateway.plain_doors HTTP_PORT GRPC_PORT HOST`. `/headers`, or a ranking call of this item,
returns the request's headers, so that tests see a proxy's changes. After `/limit/TEXT`, REST and gRPC announce TEXT to
the edge as their limit; while it is a number the language model is slow, so that recommendations stay in flight.
"""

import asyncio
import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse

from services.gateway.grpc.door import RpcDoor, add_recommender_to_server
from services.gateway.overload.monitor import EdgeWatch, LoadMonitor
from services.gateway.rest.door import create_rest_app
from tests.support.servers import HOST, accepts, free_port
from tests.support.wait import wait_for
from tests.unit.gateway.world import MAX_BODY_BYTES, VERSION, catalogue_of, make_world, publish


@contextmanager
def running_plain_doors() -> Iterator[tuple[int, int]]:
    """REST and gRPC in a separate process; yields their ports."""
    ports = free_port(), free_port()
    with doors_at(HOST, ports):
        yield ports


@contextmanager
def doors_at(host: str, ports: tuple[int, int]) -> Iterator[int]:
    """REST and gRPC on this loopback address; yields the process ID."""
    child = subprocess.Popen([sys.executable, "-m", "tests.support.gateway.plain_doors", *map(str, ports), host])
    try:
        wait_for(lambda: all(accepts(host, port) for port in ports), what="the doors")
        yield child.pid
    finally:
        child.kill()
        child.wait()


class FixedWatch(EdgeWatch):
    """Announces one text."""

    def __init__(self, load: LoadMonitor, text: str) -> None:
        super().__init__(load, time.monotonic, time.time)
        self._text = text

    @property
    def announcement(self) -> str:
        """The announced limit."""
        return " ".join(f"{limit} {limit}" for limit in self._text.split(","))


async def serve(http_port: int, grpc_port: int, host: str) -> None:
    """Serve both doors."""
    root = Path(tempfile.mkdtemp()) / "bundles"
    publish(root, VERSION, catalogue_of())
    world = make_world(root)
    await world.plane.start()
    server = grpc.aio.server()
    add_recommender_to_server(RpcDoor(lambda: world.plane, MAX_BODY_BYTES), server)
    server.add_insecure_port(f"{host}:{grpc_port}")
    await server.start()
    app = create_rest_app(lambda: world.plane, lambda: b"", MAX_BODY_BYTES)
    app.add_route("/headers", _headers)
    app.add_route("/v1/items/headers/similar", _headers)

    replicas = itertools.count()

    async def limit(http: Request) -> JSONResponse:
        """Announce this text from now on, behind a new replica without latency history, which would affect routing."""
        world.llm.names = (f"replica {next(replicas)}",)
        world.llm.delay_s = 3.0 if http.path_params["limit"].partition(",")[0].isdecimal() else 0.0
        world.plane.edge = FixedWatch(world.plane.load, http.path_params["limit"])
        return JSONResponse({})

    app.add_route("/limit/{limit}", limit)
    await uvicorn.Server(uvicorn.Config(app, host, http_port, log_level="warning")).serve()


async def _headers(http: Request) -> JSONResponse:
    return JSONResponse(dict(http.headers))


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
