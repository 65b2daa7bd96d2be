"""Text behind `TAILRACE_TEXT_URL` by vLLM's CPU build: one server, its layers on two processes (pipeline size 2).

The caller's door, text tier, remote writer and vLLM are real. vLLM is in an environment of its own.
"""

import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from benchmarks.engine.process import VLLM_HOME
from services.gateway.openai.remote.client import RemoteWriter
from services.gateway.rest.door import create_rest_app
from services.gateway.text.tier import TextLimits
from tests.support.engine.checkpoints import write_checkpoint
from tests.support.servers import HOST, free_port
from tests.support.wait import until, until_answer, wait_for
from tests.unit.gateway.openai.conftest import serve
from tests.unit.gateway.world import BREAKER_FAILURES, MAX_BODY_BYTES, World, let_write, started_world

pytestmark = [
    pytest.mark.skipif(not (VLLM_HOME / ".installed").exists(), reason="vLLM is not installed: run `make bench-peers`"),
    pytest.mark.grid,
    pytest.mark.timeout(900),  # its start takes minutes on a busy machine
]
PYTHON = VLLM_HOME / "bin/python"
COMPLETIONS, CHATS, MODEL = "/v1/completions", "/v1/chat/completions", "text"
START_S = 600.0
LONG = {"max_tokens": 1_500, "ignore_eos": True}
LIMITS = TextLimits(max_tokens=2_000, max_choices=4, deadline_ms=60_000)
ASK = {"user_id": "long", "k": 3, "rationale": True, "deadline_ms": 5_000}


class Vllm:
    """The server, in a process group of its own."""

    def __init__(self, folder: Path) -> None:
        self.url = f"http://{HOST}:{free_port()}"
        self._log = folder / "vllm.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._command = [
            *(str(PYTHON), "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(folder / "model"), "--served-model-name", MODEL, "--max-model-len", "2048"),
            *("--host", HOST, "--port", self.url.rpartition(":")[2], "--pipeline-parallel-size", "2"),
            *("--compilation-config", '{"mode": 2, "backend": "eager"}', "--dtype", "float32"),
        ]

    def start(self) -> None:
        """Start it and wait until it answers."""
        environment = {
            "PATH": os.defpath,
            "HOME": str(self._log.parent),
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CACHE_ROOT": str(VLLM_HOME.parent / "vllm-cache"),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, env=environment, stdout=log, stderr=log, cwd=self._log.parent, start_new_session=True
            )
        wait_for(self._is_healthy, START_S, "vLLM")

    def _is_healthy(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self._log.read_text()[-3_000:]
        try:
            return httpx.get(f"{self.url}/health", timeout=5).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def kill(self) -> None:
        """Kill all its processes."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    async def num_running(self) -> float:
        """Return the number of requests in its engine."""
        async with httpx.AsyncClient(timeout=30) as http:
            text = (await http.get(f"{self.url}/metrics")).text
        lines = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running")]
        return sum(float(line.rpartition(" ")[2]) for line in lines)


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    """vLLM over a random model of two layers, one for each process."""
    folder = tmp_path_factory.mktemp("vllm")
    write_checkpoint(folder / "model", max_positions=2_048, scale=0.1, head_dim=32)
    server = Vllm(folder)
    server.start()
    yield server
    server.kill()


@pytest.fixture
async def caller(vllm: Vllm, tmp_path: Path) -> AsyncIterator[tuple[World, httpx.AsyncClient]]:
    """A gateway whose text comes from vLLM, on a port of its own."""
    writer = RemoteWriter(f"{vllm.url}/v1", lambda: "", only_model=MODEL)
    async with started_world(tmp_path, writer) as world:
        let_write(world, writer, LIMITS)
        app = create_rest_app(lambda: world.plane, lambda: b"", MAX_BODY_BYTES, echoes_request_id=True)
        with capture_logs():
            async for url in serve(app):
                async with httpx.AsyncClient(base_url=url, timeout=60) as http:
                    yield world, http
    await writer.close()


Caller = tuple[World, httpx.AsyncClient]


def body(**fields: Any) -> dict[str, Any]:
    """Build a greedy request."""
    return {"model": MODEL, "prompt": "the river runs", "temperature": 0, "max_tokens": 8, "ignore_eos": True, **fields}


async def test_the_text_is_vllms_and_its_tokens_are_counted(caller: Caller, vllm: Vllm) -> None:
    """Through the gateway, a greedy text equals the text of a direct call, streamed or not, with its usage."""
    world, http = caller
    async with httpx.AsyncClient(base_url=vllm.url, timeout=60) as direct:
        expected = (await direct.post(COMPLETIONS, json=body())).json()
    whole = (await http.post(COMPLETIONS, json=body())).json()
    streamed = (await http.post(COMPLETIONS, json=body(stream=True))).text

    assert whole["choices"][0]["text"] == expected["choices"][0]["text"]
    assert whole["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"] == 8
    assert streamed.rstrip().endswith("data: [DONE]")
    assert world.metric("tailrace_text_requests_total", route="completions", code="ok") == 2
    assert world.metric("tailrace_text_tokens_total", kind="completion") == 16


async def test_the_deadline_ends_vllms_work(caller: Caller, vllm: Vllm) -> None:
    """At the deadline the text so far is the answer, or a 504 without any, and vLLM generates no more."""
    _, http = caller

    answer = await http.post(COMPLETIONS, json=body(**LONG), headers={"x-deadline-ms": "700"})

    if answer.status_code == httpx.codes.OK:
        choice = answer.json()["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "deadline")
    else:
        assert answer.status_code == httpx.codes.GATEWAY_TIMEOUT
    await until_answer(vllm.num_running, lambda running: running == 0)


async def test_a_disconnect_ends_vllms_work(caller: Caller, vllm: Vllm) -> None:
    """A caller that leaves during a stream frees its place, and vLLM's engine is idle soon after."""
    world, http = caller
    async with http.stream("POST", COMPLETIONS, json=body(**LONG, stream=True)) as stream:
        await anext(stream.aiter_lines())

    await until(lambda: world.metric("tailrace_text_in_flight") == 0)
    await until_answer(vllm.num_running, lambda running: running == 0)


async def test_a_chat_is_vllms(caller: Caller, vllm: Vllm) -> None:
    """Through the gateway, a greedy chat, which rationales are, equals the chat of a direct call."""
    _, http = caller
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "a river"}], "temperature": 0, "max_tokens": 4}
    async with httpx.AsyncClient(base_url=vllm.url, timeout=60) as direct:
        expected = (await direct.post(CHATS, json=chat)).json()

    answer = (await http.post(CHATS, json=chat)).json()

    assert answer["choices"][0]["message"]["content"] == expected["choices"][0]["message"]["content"]


async def test_recommendations_survive_vllms_death(caller: Caller, vllm: Vllm) -> None:
    """Killed, vLLM costs the sentence only, and its breaker opens."""
    world, http = caller
    vllm.kill()

    answers = [(await http.post("/v1/recommendations", json=ASK)).json() for _ in range(4)]
    texts = [(await http.post(COMPLETIONS, json=body())).status_code for _ in range(BREAKER_FAILURES)]

    assert [(len(answer["items"]), answer["rationale_reason"]) for answer in answers] == [(3, "failed")] * 4
    assert texts == [httpx.codes.SERVICE_UNAVAILABLE] * BREAKER_FAILURES
    assert world.metric("tailrace_text_breaker_open") == 1
