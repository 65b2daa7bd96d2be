"""The remote text writer and a server in another process that is killed while it generates."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from services.gateway.openai.remote.client import RemoteWriter
from services.gateway.rest.door import create_rest_app
from tests.support.clock import Clock
from tests.support.parrot import MODEL
from tests.support.wait import wait_for
from tests.unit.gateway.openai.conftest import let_write, serve
from tests.unit.gateway.world import MAX_BODY_BYTES, VERSION, World, catalogue_of, make_world, publish

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
PEER = """
import sys
import uvicorn
from pathlib import Path
from services.gateway.rest.door import create_rest_app
from tests.support.parrot import Parrot
from tests.unit.gateway.openai.conftest import let_write
from tests.unit.gateway.world import make_world

world, parrot = make_world(Path(sys.argv[2])), Parrot()
parrot.delay_s = 0.02
let_write(world, parrot)
uvicorn.run(create_rest_app(lambda: world.plane, lambda: b"", 100_000), port=int(sys.argv[1]), log_level="error")
"""


class Peer:
    """A door in another process on one port, which can be killed and started again."""

    def __init__(self, port: int, folder: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._command = [sys.executable, "-c", PEER, str(port), str(folder)]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it answers."""
        self._process = subprocess.Popen(self._command, cwd=ROOT)
        wait_for(self._answers, 60, "the peer")

    def kill(self) -> None:
        """Kill it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/healthz").status_code == 200
        except httpx.HTTPError:
            return False


@pytest.fixture
def peer(tmp_path: Path, unused_tcp_port: int) -> Iterator[Peer]:
    """A peer, not started."""
    made = Peer(unused_tcp_port, tmp_path / "peer")
    yield made
    made.kill()


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """A started plane on fakes."""
    root = tmp_path / "bundles"
    publish(root, VERSION, catalogue_of())
    made = make_world(root)
    await made.plane.start()
    yield made
    await made.plane.stop()


async def test_a_server_killed_while_generating(world: World, peer: Peer) -> None:
    """The stream ends with an error event; then the breaker opens and callers get 503; after a restart all works again."""
    await asyncio.to_thread(peer.start)
    writer, clock = RemoteWriter(f"{peer.url}/v1", lambda: ""), Clock()
    let_write(world, writer, clock)
    app = create_rest_app(lambda: world.plane, lambda: b"", MAX_BODY_BYTES)
    body = {"model": MODEL, "prompt": "a b c", "max_tokens": 32, "stream": True}
    async for url in serve(app):
        async with httpx.AsyncClient(base_url=url, timeout=30) as http:
            async with http.stream("POST", "/v1/completions", json=body) as broken:
                lines = []
                async for line in broken.aiter_lines():
                    lines.append(line)
                    if len(lines) == 4:
                        peer.kill()
            while (refused := await http.post("/v1/completions", json=body)).status_code != 503:
                pass
            is_open = world.metric("tailrace_text_breaker_open")
            while_open = await http.post("/v1/completions", json=body)
            await asyncio.to_thread(peer.start)
            clock.now_s += 11
            recovered = await http.post("/v1/completions", json={**body, "stream": False})
    await writer.close()

    assert broken.status_code == 200
    assert '"code":"unavailable"' in "".join(lines)
    assert "[DONE]" not in "".join(lines)
    assert (refused.json()["error"]["type"], "retry-after" in refused.headers) == ("server_error", True)
    assert (is_open, while_open.status_code) == (1, 503)
    assert recovered.json()["usage"]["completion_tokens"] == 32
    assert world.metric("tailrace_text_breaker_open") == 0
