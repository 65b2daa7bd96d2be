"""What other servers really send, byte for byte: a peer that says what it was told to, on a port of its own."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from services.contracts.text import TextDone, TextEvent, TextPiece, TextRequest
from services.errors import DeadlineExceeded, DependencyAway, InvalidRequest, NotFound, Overloaded, TailraceError
from services.gateway.openai.remote.client import RemoteWriter
from tests.support.until import until
from tests.unit.gateway.openai.conftest import BREAKER_FAILURES, let_write
from tests.unit.gateway.world import World

END = b"data: [DONE]\n\n"


def chunk(text: str, reason: str | None = None, **more: Any) -> bytes:
    """One chunk of a completion as servers write it, its text as it is."""
    choice = {"index": 0, "text": text, "finish_reason": reason}
    return f"data: {json.dumps({'choices': [choice], **more}, ensure_ascii=False)}\n\n".encode()


class Peer:
    """A server that answers every request with `parts`, each sent by itself; an answer that `hangs` is never closed."""

    def __init__(self) -> None:
        self.url = ""
        self.status = 200
        self.parts: list[bytes] = []
        self.hangs = False
        self.connections: set[object] = set()
        self.num_open = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer on one connection until it is closed."""
        self.num_open += 1
        try:
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    await self._take(reader)
                    self.connections.add(writer)
                    await self._answer(writer)
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
            self.num_open -= 1

    async def _take(self, reader: asyncio.StreamReader) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        await reader.readexactly(sum(int(line.partition(b":")[2]) for line in lengths))

    async def _answer(self, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 %d x\r\ntransfer-encoding: chunked\r\n\r\n" % self.status)
        for part in self.parts:
            writer.write(b"%x\r\n%b\r\n" % (len(part), part))
            await writer.drain()
            await asyncio.sleep(0)
        if not self.hangs:
            writer.write(b"0\r\n\r\n")


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    """The peer, on a free port."""
    made = Peer()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    yield made
    server.close()
    await until(lambda: made.num_open == 0)


@pytest.fixture
async def remote(peer: Peer) -> AsyncIterator[RemoteWriter]:
    """A writer that asks the peer."""
    writer = RemoteWriter(peer.url, lambda: "")
    yield writer
    await writer.close()


async def events_of(remote: RemoteWriter) -> list[TextEvent]:
    """All events of one text."""
    return [event async for event in remote.write(TextRequest(request_id="r", model="m", prompt="x"))]


def text_of(events: list[TextEvent]) -> str:
    """What was said."""
    return "".join(event.text for event in events if isinstance(event, TextPiece))


@pytest.mark.parametrize("text", ["a\u2028b", "a\u2029b", "a\x85b", "日本語 🎉", 'a\nb\r\x0b\x0c\x1c "c"'])
@pytest.mark.parametrize("size", [1, 7, 1_000])
async def test_any_text_survives_any_cut(peer: Peer, remote: RemoteWriter, text: str, size: int) -> None:
    """Only a line feed or a carriage return ends a line: what else is a line's end to Python may stand in the JSON as it is."""
    sent = chunk(text) + b": keep-alive\r\n\r\n" + chunk("", "stop").replace(b"\n", b"\r\n") + END
    peer.parts = [sent[start : start + size] for start in range(0, len(sent), size)]

    assert text_of(await events_of(remote)) == text


async def test_the_end_needs_no_line_of_its_own(peer: Peer, remote: RemoteWriter) -> None:
    """What stands before the close of the connection is a line as well."""
    peer.parts = [chunk("a", "stop") + b"data: [DONE]"]

    assert text_of(await events_of(remote)) == "a"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ({"message": "no such grammar", "type": "BadRequestError", "param": None, "code": 400}, InvalidRequest),
        (
            {"message": "n: too many", "type": "invalid_request_error", "param": "n", "code": "invalid_value"},
            InvalidRequest,
        ),
        ({"message": "no such model", "type": "NotFoundError", "code": 404}, NotFound),
        ({"message": "slow down", "type": "rate_limit_error", "code": "overloaded"}, Overloaded),
        ({"message": "late", "type": "timeout_error", "code": "deadline_exceeded"}, DeadlineExceeded),
        ({"message": "inside", "type": "InternalServerError", "code": 500}, DependencyAway),
        ("words", DependencyAway),
    ],
)
async def test_an_error_event_keeps_its_meaning(
    peer: Peer, remote: RemoteWriter, error: Any, kind: type[TailraceError]
) -> None:
    """vLLM finds a caller's mistake behind its 200: it is the caller's, and not a server that is away."""
    peer.parts = [f"data: {json.dumps({'error': error})}\n\n".encode(), END]

    with pytest.raises(kind):
        await events_of(remote)


async def test_an_error_before_any_text_has_its_status(
    texts: World, http: httpx.AsyncClient, peer: Peer, remote: RemoteWriter
) -> None:
    """A stream over there has begun with its 200, one over here has not; and no number of such mistakes opens the breaker."""
    let_write(texts, remote)
    peer.parts = [b'data: {"error": {"message": "no such grammar", "type": "BadRequestError", "code": 400}}\n\n', END]
    body = {"model": "m", "prompt": "x", "stream": True}

    answers = [await http.post("/v1/completions", json=body) for _ in range(BREAKER_FAILURES + 1)]

    assert [answer.status_code for answer in answers] == [400] * len(answers)
    assert "no such grammar" in answers[-1].json()["error"]["message"]


@pytest.mark.parametrize("reason", ["abort", "error"])
async def test_a_text_that_was_given_up_is_not_whole(peer: Peer, remote: RemoteWriter, reason: str) -> None:
    """Servers that break off say so in the finish reason."""
    peer.parts = [chunk("a"), chunk("", reason), END]

    with pytest.raises(DependencyAway):
        await events_of(remote)


@pytest.mark.parametrize(
    "nonsense",
    [
        [1],
        7,
        None,
        {"choices": [7]},
        {"choices": [], "usage": [1]},
        {"choices": [{"index": 1, "text": "a"}]},
        {"choices": {}},
    ],
)
async def test_nonsense_is_a_server_that_is_away(peer: Peer, remote: RemoteWriter, nonsense: object) -> None:
    """Whatever is wrong with it, it is no fault of ours."""
    peer.parts = [f"data: {json.dumps(nonsense)}\n\n".encode(), END]

    with pytest.raises(DependencyAway):
        await events_of(remote)


async def test_usage_without_numbers_is_no_usage(peer: Peer, remote: RemoteWriter) -> None:
    """Some servers send the field and leave it empty; a text is not lost for that."""
    peer.parts = [chunk("a", "stop", usage={"prompt_tokens": None, "completion_tokens": 1}), END]

    assert (await events_of(remote))[-1] == TextDone(num_prompt_tokens=0, num_cached_tokens=0, num_completion_tokens=1)


@pytest.mark.parametrize(
    ("status", "parts", "said"),
    [
        (401, [b'{"error": {"message": "Incorrect API key"}}'], "401: Incorrect API key"),
        (500, [b'{"object": "error", "message": "CUDA", "code": 500}'], "500: CUDA"),
        (403, [b'{"error": "not for you"}'], "403: not for you"),
        (200, [chunk("a")], "before the end"),
        (200, [chunk("a"), chunk("", "abort"), END], "abort"),
        (200, [b'data: {"error": {"message": "inside", "code": 500}}\n\n'], "500: inside"),
    ],
)
async def test_the_operator_is_told_what_a_server_said(
    peer: Peer, remote: RemoteWriter, status: int, parts: list[bytes], said: str
) -> None:
    """Callers hear that it is away; a key that it refuses is found in the log."""
    peer.status, peer.parts = status, parts

    with capture_logs() as logs, pytest.raises(DependencyAway):
        await events_of(remote)

    (line,) = logs
    assert line["event"] == "text_server_failed"
    assert said in line["error"]


async def test_a_connection_serves_again(peer: Peer, remote: RemoteWriter) -> None:
    """A text that was read to its end leaves its connection for the next: a hosted server's costs round trips."""
    peer.parts = [chunk("a", "stop"), END]

    for _ in range(3):
        await events_of(remote)

    assert len(peer.connections) == 1


async def test_a_server_that_does_not_close_its_answer_holds_nobody(peer: Peer, remote: RemoteWriter) -> None:
    """`[DONE]` is the end."""
    peer.parts, peer.hangs = [chunk("a", "stop"), END], True

    assert text_of(await events_of(remote)) == "a"


@pytest.mark.parametrize("status", [404, 401, 429, 500])
async def test_a_list_that_cannot_be_had_is_no_callers_fault(peer: Peer, remote: RemoteWriter, status: int) -> None:
    """An address without its /v1 is found in the log; to callers the server is away, and not their model."""
    peer.status = status

    with capture_logs() as logs, pytest.raises(DependencyAway):
        await remote.models()

    assert f"/v1/models returned {status}" in logs[0]["error"]


async def test_a_context_that_is_not_told_is_not_known(peer: Peer, remote: RemoteWriter) -> None:
    """Hosted services list names alone, and zero tokens would be a lie."""
    peer.parts = [b'{"data": [{"id": "far"}]}']

    (model,) = await remote.models()

    assert (model.name, model.max_context_tokens) == ("far", None)
