"""The OpenAI door on a fake text model: in process, and on a real port."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
import uvicorn
from starlette.types import ASGIApp
from structlog.testing import capture_logs

from services.gateway.rest.door import create_rest_app
from services.gateway.text.tier import TextLimits
from tests.support.clock import Clock
from tests.support.engine.parrot import Parrot
from tests.support.wait import until
from tests.unit.gateway.clients import in_process
from tests.unit.gateway.world import MAX_BODY_BYTES, World, let_write

LIMITS = TextLimits(max_tokens=32, max_choices=4, deadline_ms=20_000)


@pytest.fixture(autouse=True)
def quiet_logs() -> Iterator[None]:
    """Capture log lines without rendering them: rendering tracebacks takes seconds."""
    with capture_logs():
        yield


@pytest.fixture
def texts(world: World, parrot: Parrot) -> World:
    """The world with these text limits."""
    let_write(world, parrot, LIMITS, Clock())
    return world


@pytest.fixture
def app(texts: World) -> ASGIApp:
    return create_rest_app(lambda: texts.plane, lambda: b"", MAX_BODY_BYTES, echoes_request_id=True)


@pytest.fixture
async def http(app: ASGIApp) -> AsyncIterator[httpx.AsyncClient]:
    async with in_process(app) as client:
        yield client


@pytest.fixture
async def live_url(app: ASGIApp) -> AsyncIterator[str]:
    async for url in serve(app):
        yield url


async def serve(app: ASGIApp) -> AsyncIterator[str]:
    """Serve an ASGI app in this event loop and yield its URL."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off"))
    serving = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    await serving
