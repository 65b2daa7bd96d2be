"""The remote writer's stream, byte by byte, with prepared responses of other servers."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send
from structlog.testing import capture_logs

from services.contracts.access import ANYONE
from services.contracts.text import TextDone, TextEvent, TextPiece, TextRequest
from services.errors import DependencyUnavailable
from services.gateway.openai.remote.client import RemoteWriter
from services.gateway.openai.remote.stream import ChunkReader, data_of
from tests.unit.gateway.openai.conftest import LIMITS, serve
from tests.unit.gateway.world import BREAKER_FAILURES, World, let_write

END = b"data: [DONE]\n\n"
REQUEST = TextRequest(request_id="r", model="m", prompt="x")


def chunk(text: str, reason: str | None = None, **more: Any) -> bytes:
    """Build one chunk of a completion with unescaped text."""
    choice = {"index": 0, "text": text, "finish_reason": reason}
    return event({"choices": [choice], **more})


def event(data: object) -> bytes:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


async def events_of(*parts: bytes, request: TextRequest = REQUEST) -> list[TextEvent]:
    """Read a stream that arrives in these parts."""

    async def body() -> AsyncIterator[bytes]:
        for part in parts:
            yield part

    reader = ChunkReader(request)
    events = [event async for data in data_of(body()) for event in reader.events_of(data)]
    return [*events, reader.done()]


def text_of(events: list[TextEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextPiece))


@pytest.mark.parametrize("text", ["a\u2028b", "a\u2029b", "a\x85b", "日本語 🎉", 'a\nb\r\x0b\x0c\x1c "c"'])
@pytest.mark.parametrize("size", [1, 7, 1_000])
async def test_any_text_survives_any_split(text: str, size: int) -> None:
    """Only LF, CR and the response's end terminate a line; JSON may contain Unicode's other separators unescaped."""
    sent = chunk(text) + b": keep-alive\r\n\r\n" + chunk("", "stop").replace(b"\n", b"\r\n") + END.rstrip()
    parts: Iterator[bytes] = (sent[start : start + size] for start in range(0, len(sent), size))

    assert text_of(await events_of(*parts)) == text


@pytest.mark.parametrize("reason", [None, "", "null"])
async def test_a_choice_ends_at_its_last_chunk_only(reason: str | None) -> None:
    """Some servers send an empty text, or the word null, as the finish reason of a choice that continues."""
    events = await events_of(chunk("a", reason), chunk("b", reason), chunk("", "length"), END)

    assert [event.finish_reason for event in events if isinstance(event, TextPiece)] == [None, None, "length"]
    with pytest.raises(DependencyUnavailable):
        await events_of(chunk("a", reason), END)


@pytest.mark.parametrize("parts", [[chunk("a")], [chunk("a"), END], [chunk("a"), chunk("", "abort"), END]])
async def test_a_text_that_was_cut_off_is_an_error(parts: list[bytes]) -> None:
    """A stream without `[DONE]`, without a finish reason, or with finish reason `abort` is an error."""
    with pytest.raises(DependencyUnavailable):
        await events_of(*parts)


@pytest.mark.parametrize(
    ("key_id", "num_prompt", "num_cached"), [(ANYONE.key_id, 7, 5), ("shop", 7, 0), (ANYONE.key_id, None, 0)]
)
async def test_usage_is_what_the_caller_may_know(key_id: str, num_prompt: int | None, num_cached: int) -> None:
    """Cached tokens are reported only without keys, since they would reveal other keys' prompts; nulls become zero."""
    details = {"prompt_tokens_details": {"cached_tokens": num_prompt and 5}}
    usage = {"prompt_tokens": num_prompt, "completion_tokens": 1, **details}

    events = await events_of(chunk("a", "stop", usage=usage), END, request=replace(REQUEST, key_id=key_id))

    assert events[-1] == TextDone(
        num_prompt_tokens=num_prompt or 0, num_cached_tokens=num_cached, num_completion_tokens=1
    )


class PreparedServer:
    """An ASGI server that answers every request with `parts`; with `hangs` the response never ends."""

    def __init__(self) -> None:
        self.url = ""
        self.status = 200
        self.parts: list[bytes] = []
        self.hangs = False
        self.clients: set[object] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        self.clients.add(scope["client"])
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        for part in self.parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        while self.hangs and (await receive())["type"] != "http.disconnect":
            pass
        await send({"type": "http.response.body"})


@pytest.fixture
async def server() -> AsyncIterator[PreparedServer]:
    """The server, on a free port."""
    made = PreparedServer()
    async for url in serve(made):
        made.url = f"{url}/v1"
        yield made


@pytest.fixture
async def remote(server: PreparedServer) -> AsyncIterator[RemoteWriter]:
    """A writer that calls the server."""
    writer = RemoteWriter(server.url, lambda: "")
    yield writer
    await writer.close()


async def written(remote: RemoteWriter) -> list[TextEvent]:
    return [event async for event in remote.write(REQUEST)]


async def test_an_error_before_any_text_has_its_status(
    texts: World, http: httpx.AsyncClient, server: PreparedServer, remote: RemoteWriter
) -> None:
    """An error event before any text becomes the response's status; caller errors never open the breaker."""
    let_write(texts, remote, LIMITS)
    server.parts = [event({"error": {"message": "no such grammar", "type": "BadRequestError", "code": 400}}), END]
    body = {"model": "m", "prompt": "x", "stream": True}

    answers = [await http.post("/v1/completions", json=body) for _ in range(BREAKER_FAILURES + 1)]

    assert [answer.status_code for answer in answers] == [400] * len(answers)
    assert "no such grammar" in answers[-1].json()["error"]["message"]


@pytest.mark.parametrize(
    ("status", "parts", "cause"),
    [
        *((200, [event(chunk), END], "") for chunk in (7, None, {"choices": [7]}, {"choices": [], "usage": [1]})),
        (200, [event({"choices": [{"index": 1, "text": "a"}]}), END], ""),
        (200, [chunk("a")], "before the end"),
        (200, [event({"error": {"message": "inside", "code": 500}})], "500: inside"),
        (401, [b'{"error": {"message": "Incorrect API key"}}'], "401: Incorrect API key"),
        (500, [b'{"object": "error", "message": "CUDA", "code": 500}'], "500: CUDA"),
        (403, [b'{"error": "not for you"}'], "403: not for you"),
    ],
)
async def test_a_malformed_chunk_makes_the_server_unavailable(
    server: PreparedServer, remote: RemoteWriter, status: int, parts: list[bytes], cause: str
) -> None:
    """Callers see only `unavailable`; the log has the cause, including a rejected key."""
    server.status, server.parts = status, parts

    with capture_logs() as logs, pytest.raises(DependencyUnavailable):
        await written(remote)

    (line,) = logs
    assert line["event"] == "text_server_failed"
    assert cause in line["error"]


async def test_a_connection_is_reused(server: PreparedServer, remote: RemoteWriter) -> None:
    """A stream that was read to its end returns its connection to the pool."""
    server.parts = [chunk("a", "stop"), END]

    for _ in range(3):
        await written(remote)

    assert len(server.clients) == 1


async def test_a_response_that_never_ends_holds_nobody(server: PreparedServer, remote: RemoteWriter) -> None:
    """The text ends at `[DONE]`, even if the response stays open."""
    server.parts, server.hangs = [chunk("a", "stop"), END], True

    async with asyncio.timeout(10):
        assert text_of(await written(remote)) == "a"


@pytest.mark.parametrize("status", [404, 500])
async def test_an_error_of_the_model_list_makes_the_server_unavailable(
    server: PreparedServer, remote: RemoteWriter, status: int
) -> None:
    """Any error status, including a 404 for a URL without /v1, is `unavailable`; the log has the status."""
    server.status = status

    with capture_logs() as logs, pytest.raises(DependencyUnavailable):
        await remote.models()

    assert f"/v1/models returned {status}" in logs[0]["error"]
