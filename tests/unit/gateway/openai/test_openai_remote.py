"""A text writer that asks another server: our own door, over a real port, in another process where it is killed."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from services.contracts.access import ANYONE
from services.contracts.text import (
    ChatMessage,
    FinishReason,
    SamplingOptions,
    TextDone,
    TextEvent,
    TextModel,
    TextPiece,
    TextRequest,
    TextWriter,
)
from services.errors import (
    ContextTooLong,
    DependencyAway,
    InvalidRequest,
    NotFound,
    Overloaded,
    TailraceError,
    Unauthenticated,
)
from services.gateway.openai.parse import CallContext, parse_completion
from services.gateway.openai.remote.body import body_of
from services.gateway.openai.remote.client import RemoteWriter
from services.gateway.openai.remote.errors import error_of_event, error_of_response
from services.gateway.rest.door import create_rest_app
from tests.support.clock import Clock
from tests.support.parrot import MODEL, Parrot
from tests.support.servers import wait_for
from tests.support.until import until
from tests.unit.gateway.openai.conftest import LIMITS, let_write, serve
from tests.unit.gateway.world import MAX_BODY_BYTES, World

ROOT = Path(__file__).resolve().parents[4]


def request(**fields: object) -> TextRequest:
    """A request for three words."""
    wanted = {"request_id": "r", "model": MODEL, "prompt": "a b c", "max_tokens": 3, **fields}
    return TextRequest(**wanted)  # type: ignore[arg-type]


async def events_of(writer: TextWriter, asked: TextRequest) -> list[TextEvent]:
    """All events of one text."""
    return [event async for event in writer.write(asked)]


def said(events: list[TextEvent]) -> list[str]:
    """The texts by choice."""
    pieces = [event for event in events if isinstance(event, TextPiece)]
    num_choices = max(piece.index for piece in pieces) + 1
    return ["".join(piece.text for piece in pieces if piece.index == index) for index in range(num_choices)]


@pytest.fixture
async def remote(live_url: str) -> AsyncIterator[RemoteWriter]:
    """A writer that asks the door on the parrot."""
    writer = RemoteWriter(f"{live_url}/v1", lambda: "")
    yield writer
    await writer.close()


async def test_its_models_are_the_servers(remote: RemoteWriter) -> None:
    """With the longest context, where the server tells it."""
    listed = {model.name: model.max_context_tokens for model in await remote.models()}

    assert listed[MODEL] == 256


async def test_one_of_its_models_can_be_offered_alone(live_url: str) -> None:
    """A hosted server has many, and some are dear: the others are not there."""
    writer = RemoteWriter(f"{live_url}/v1", lambda: "", only_model=MODEL)

    assert [model.name for model in await writer.models()] == [MODEL]
    with pytest.raises(NotFound):
        await events_of(writer, request(model="tailrace-recommender"))
    await writer.close()


@pytest.mark.parametrize("chat", [True, False])
async def test_what_it_writes_is_what_the_server_wrote(remote: RemoteWriter, parrot: Parrot, chat: bool) -> None:
    """Text, choices, logprobs, finish reasons and counts survive the way over the wire and back."""
    options = SamplingOptions(num_logprobs=2, temperature=0.5, seed=7, top_k=3, logit_bias={5: 1.5})
    turns = {"prompt": None, "messages": (ChatMessage(role="user", content="a b c"),)} if chat else {}
    asked = request(n=2, sampling=options, stop=("zz",), json_schema='{"type": "object"}', **turns)

    over_there = await events_of(remote, asked)
    right_here = await events_of(Parrot(), asked)

    assert over_there[1:] == right_here[1:]
    assert parrot.asked[0].sampling == options
    assert (parrot.asked[0].stop, parrot.asked[0].json_schema) == (("zz",), '{"type": "object"}')


async def test_settings_at_their_default_are_not_sent() -> None:
    """A server that knows OpenAI's fields alone is asked for nothing else."""
    assert set(body_of(request(max_tokens=None))) == {"model", "prompt", "stream", "stream_options"}


@pytest.mark.parametrize("is_strict", [True, False])
def test_a_strict_schema_stays_strict(is_strict: bool) -> None:
    """OpenAI's own service keeps to a schema only where that is asked for."""
    body = body_of(request(json_schema='{"type": "array"}', is_schema_strict=is_strict))

    assert body["response_format"]["json_schema"].get("strict", False) == is_strict


@pytest.mark.parametrize(("json_schema", "kind"), [('{"type": "object"}', "json_object"), ("{}", "json_schema")])
def test_any_object_is_asked_for_as_such(json_schema: str, kind: str) -> None:
    """Servers that know no schemas know that much; any JSON is not the same."""
    assert body_of(request(json_schema=json_schema))["response_format"]["type"] == kind


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_the_token_limit_keeps_the_callers_name(name: str) -> None:
    """OpenAI's reasoning models refuse the older name, other servers may not know the newer one."""
    limits = {key: value for key, value in body_of(request(settings_sent=frozenset({name}))).items() if "tokens" in key}

    assert limits == {name: 3}


def test_a_templates_variables_go_along() -> None:
    """As they are, to a server that has the template."""
    turns, variables = (ChatMessage(role="user", content="x"),), {"enable_thinking": False, "effort": None}

    assert body_of(request(messages=turns, chat_template_kwargs=variables))["chat_template_kwargs"] == variables
    assert "chat_template_kwargs" not in body_of(request(messages=turns))


class FarModels(RemoteWriter):
    """Lists what another Tailrace and a hosted service list."""

    async def models(self) -> tuple[TextModel, ...]:
        """Two of them, one by a name that means something here."""
        named = ("tailrace-recommender", "hosted")
        return tuple(TextModel(name=name, max_context_tokens=None, created_unix_s=0) for name in named)


async def test_far_models_are_listed_as_they_can_be_asked(texts: World, http: httpx.AsyncClient) -> None:
    """By the recommender's name callers get the bundle here; a context that nobody tells is not one of no tokens."""
    let_write(texts, FarModels("http://far/v1", lambda: ""))

    listed = (await http.get("/v1/models")).json()["data"]

    assert [model["id"] for model in listed] == ["hosted", "tailrace-recommender"]
    assert listed[0]["max_model_len"] is None


def test_a_default_that_was_sent_is_sent_on() -> None:
    """vLLM's own defaults are the checkpoint's: whoever says temperature 1 does not mean 0.6."""
    asking = CallContext(request_id="r", caller=ANYONE, deadline_unix_s=0.0, limits=LIMITS)
    body = b'{"model": "m", "prompt": "x", "temperature": 1.0, "repetition_penalty": 1, "top_p": null}'

    (asked,) = parse_completion(body, asking).requests

    assert body_of(asked).items() >= {"temperature": 1.0, "repetition_penalty": 1.0}.items()
    assert "top_p" not in body_of(asked)


async def test_closing_it_cancels_the_work_over_there(remote: RemoteWriter, parrot: Parrot) -> None:
    """The connection is closed, and the server's writer ends within a step."""
    parrot.delay_s = 0.005
    writing = remote.write(request(max_tokens=32))
    await anext(writing)
    await writing.aclose()

    await until(lambda: parrot.num_open == 0)
    assert parrot.num_steps < 32


async def test_the_deadline_goes_along(remote: RemoteWriter, parrot: Parrot) -> None:
    """What the server's own writer is given is no later than what was asked here."""
    deadline_unix_s = asyncio.get_running_loop().time() + 2e9
    await events_of(remote, request(deadline_unix_s=deadline_unix_s))

    given = parrot.asked[0].deadline_unix_s
    assert given is not None
    assert given < deadline_unix_s


async def test_nothing_at_the_address_is_a_server_that_is_away() -> None:
    """A connection that is refused counts for the breaker, and its caller is told to come back."""
    writer = RemoteWriter("http://127.0.0.1:9/v1", lambda: "")

    with pytest.raises(DependencyAway):
        await writer.models()
    with pytest.raises(DependencyAway):
        await events_of(writer, request())
    await writer.close()


REFUSALS: list[tuple[int, bytes, type[TailraceError]]] = [
    (400, b'{"error": {"message": "n: too many", "param": "n"}}', InvalidRequest),
    (401, b'{"error": {"message": "bad key"}}', DependencyAway),
    (404, b'{"error": {"message": "no such model"}}', NotFound),
    (429, b"", Overloaded),
    (500, b"<html>", DependencyAway),
    (302, b"", DependencyAway),
    (400, b'{"error": "words"}', InvalidRequest),
]


@pytest.mark.parametrize(("status", "body", "kind"), REFUSALS)
def test_refusals_keep_their_meaning(status: int, body: bytes, kind: type[TailraceError]) -> None:
    """Our caller's mistake stays our caller's; a refused key of ours is no fault of theirs."""
    error = error_of_response(status, {"retry-after": "7"}, body)

    assert isinstance(error, kind)
    assert not isinstance(error, Unauthenticated)
    assert error.retry_after_s in {None, 7, 1.0}


TOO_LONG: list[tuple[dict[str, object], type[TailraceError]]] = [
    ({"message": "words", "code": "context_length_exceeded", "param": "messages"}, ContextTooLong),
    ({"message": "This model's maximum context length is 8 tokens. However, ...", "code": 400}, ContextTooLong),
    ({"message": "The prompt is longer than the maximum model length of 8.", "code": 400}, ContextTooLong),
    ({"message": "n: too many", "code": "invalid_value"}, InvalidRequest),
]


@pytest.mark.parametrize(("error", "kind"), TOO_LONG)
def test_a_prompt_too_long_over_there_is_one_here(error: dict[str, object], kind: type[TailraceError]) -> None:
    """By OpenAI's code, or by OpenAI's and vLLM's words, before a stream and in it."""
    before = error_of_response(400, {}, json.dumps({"error": error}).encode())
    within = error_of_event({"type": "invalid_request_error", **error})

    assert (type(before), type(within)) == (kind, kind)


PEER = """
import sys
import uvicorn
from pathlib import Path
from services.gateway.rest.door import create_rest_app
from services.gateway.text.tier import TextLimits, TextTier
from services.router.breaker import Breaker
from tests.support.clock import Clock
from tests.support.parrot import Parrot
from tests.unit.gateway.world import make_world

world, parrot = make_world(Path(sys.argv[2])), Parrot()
parrot.delay_s = 0.02
world.plane.text = TextTier(
    writer=parrot, breaker=Breaker(5, 1.0), load=world.load, report=world.plane.text_report, limits=TextLimits()
)
uvicorn.run(create_rest_app(lambda: world.plane, lambda: b"", 100_000), port=int(sys.argv[1]), log_level="error")
"""


class Peer:
    """Another process with a door on one port, which can be killed and started again."""

    def __init__(self, port: int, folder: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._command = [sys.executable, "-c", PEER, str(port), str(folder)]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it answers."""
        self._process = subprocess.Popen(self._command, cwd=ROOT)
        wait_for(self._answers, 60, "the peer")

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/healthz").status_code == 200
        except httpx.HTTPError:
            return False

    def kill(self) -> None:
        """Kill it."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()


@pytest.fixture
def peer(tmp_path: Path, unused_tcp_port: int) -> Iterator[Peer]:
    """A peer, not started."""
    made = Peer(unused_tcp_port, tmp_path / "peer")
    yield made
    made.kill()


async def test_a_server_killed_midway_is_an_error_event_and_then_a_breaker(
    texts: World, peer: Peer, breaker_clock: Clock
) -> None:
    """Door, remote writer, door: killed midway the stream says so; then the breaker spares callers; then all is well again."""
    await asyncio.to_thread(peer.start)
    writer = RemoteWriter(f"{peer.url}/v1", lambda: "")
    let_write(texts, writer, breaker_clock)
    app = create_rest_app(lambda: texts.plane, lambda: b"", MAX_BODY_BYTES)
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
            breaker_open = texts.metric("tailrace_text_breaker_open")
            num_asked_when_open = await http.post("/v1/completions", json=body)
            await asyncio.to_thread(peer.start)
            breaker_clock.now_s += 11
            recovered = await http.post("/v1/completions", json={**body, "stream": False})

    assert broken.status_code == 200
    assert '"code":"unavailable"' in "".join(lines)
    assert "[DONE]" not in "".join(lines)
    assert (refused.json()["error"]["type"], "retry-after" in refused.headers) == ("server_error", True)
    assert (breaker_open, num_asked_when_open.status_code) == (1, 503)
    assert recovered.json()["usage"]["completion_tokens"] == 32
    assert texts.metric("tailrace_text_breaker_open") == 0
    await writer.close()


async def test_the_last_word_on_usage_is_the_servers(remote: RemoteWriter) -> None:
    """Cached tokens included."""
    done = (await events_of(remote, request()))[-1]

    assert done == TextDone(num_prompt_tokens=3, num_cached_tokens=1, num_completion_tokens=3)


async def test_a_stop_is_told(remote: RemoteWriter) -> None:
    """The finish reason of a stop string is stop."""
    last = [event for event in await events_of(remote, request(stop=("b",))) if isinstance(event, TextPiece)][-1]

    assert (last.finish_reason, last.text) == (FinishReason.STOP, "")
