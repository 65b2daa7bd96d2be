"""The remote text writer against our own door over a real port: text, settings, deadline and errors."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from services.app import text_writer
from services.contracts.access import ANYONE
from services.contracts.text import (
    ChatMessage,
    SamplingOptions,
    TextEvent,
    TextRequest,
    TextWriter,
)
from services.errors import (
    ContextTooLong,
    DeadlineExceeded,
    DependencyUnavailable,
    InvalidRequest,
    NotFound,
    Overloaded,
    TailraceError,
)
from services.gateway.openai.parse import CallContext, parse_completion
from services.gateway.openai.remote.client import RemoteWriter, body_of
from services.gateway.openai.remote.errors import error_of_event, error_of_response
from services.settings.settings import Settings
from tests.support.engine.parrot import MODEL, Parrot
from tests.support.wait import until
from tests.unit.gateway.openai.conftest import LIMITS


def request(**fields: object) -> TextRequest:
    """Build a request for three words."""
    given = {"request_id": "r", "model": MODEL, "prompt": "a b c", "max_tokens": 3, "key_id": ANYONE.key_id, **fields}
    return TextRequest(**given)  # type: ignore[arg-type]


async def events_of(writer: TextWriter, text_request: TextRequest) -> list[TextEvent]:
    return [event async for event in writer.write(text_request)]


@pytest.fixture
async def remote(live_url: str) -> AsyncIterator[RemoteWriter]:
    """A writer that calls the door on the fake text model."""
    writer = RemoteWriter(f"{live_url}/v1", lambda: "")
    yield writer
    await writer.close()


async def test_one_model_can_be_offered_alone(live_url: str) -> None:
    """With `only_model`, other models of the server are neither listed nor called."""
    writer = RemoteWriter(f"{live_url}/v1", lambda: "", only_model=MODEL)

    assert [model.name for model in await writer.models()] == [MODEL]
    with pytest.raises(NotFound):
        await events_of(writer, request(model="hosted"))
    await writer.close()


@pytest.mark.parametrize("is_chat", [True, False])
async def test_events_and_settings_survive_the_wire(remote: RemoteWriter, parrot: Parrot, is_chat: bool) -> None:
    """The remote writer's events equal the local writer's, and all settings reach the server."""
    options = SamplingOptions(num_logprobs=2, temperature=0.5, seed=7, top_k=3, logit_bias={5: 1.5})
    chat = {"prompt": None, "messages": (ChatMessage(role="user", content="a b c"),)} if is_chat else {}
    stop = ("zz",) if is_chat else ("c",)
    sent = request(n=2, sampling=options, stop=stop, json_schema='{"type": "object"}', **chat)

    from_server = await events_of(remote, sent)
    local = await events_of(Parrot(), sent)

    assert from_server[1:] == local[1:]
    assert parrot.requests[0].sampling == options
    assert (parrot.requests[0].stop, parrot.requests[0].json_schema) == (stop, '{"type": "object"}')


def test_defaults_are_not_sent() -> None:
    """A server that supports only OpenAI's fields receives no other fields."""
    assert set(body_of(request(max_tokens=None))) == {"model", "prompt", "stream", "stream_options"}


def test_a_default_that_the_caller_sent_is_sent_on() -> None:
    """Settings sent by the caller are forwarded even at our defaults: vLLM's defaults are the checkpoint's."""
    context = CallContext(request_id="r", caller=ANYONE, deadline_unix_s=0.0, limits=LIMITS)
    body = b'{"model": "m", "prompt": "x", "temperature": 1.0, "repetition_penalty": 1, "top_p": null}'

    (parsed,) = parse_completion(body, context).requests

    assert body_of(parsed).items() >= {"temperature": 1.0, "repetition_penalty": 1.0}.items()
    assert "top_p" not in body_of(parsed)


def test_a_salt_is_sent_as_the_keys_own() -> None:
    """Salts are forwarded per key: equal salts of two keys differ on the server, and the caller's salt is not sent."""
    salts = {
        body_of(request(key_id=key_id, cache_salt=salt))["cache_salt"]
        for key_id in ("a", "b")
        for salt in ("s", "s", "t")
    }

    assert len(salts) == 4
    assert not salts & {"s", "t"}


SCHEMA = {"name": "answer", "schema": {}}
MESSAGES = (ChatMessage(role="user", content="x"),)
VARIABLES = {"enable_thinking": False, "effort": None}
NEWER_NAME = {"settings_sent": frozenset({"max_completion_tokens"})}


@pytest.mark.parametrize(
    ("fields", "name", "sent"),
    [
        ({"json_schema": '{"type": "object"}'}, "response_format", {"type": "json_object"}),
        ({"json_schema": "{}"}, "response_format", {"type": "json_schema", "json_schema": SCHEMA}),
        (
            {"json_schema": "{}", "is_schema_strict": True},
            "response_format",
            {"type": "json_schema", "json_schema": {**SCHEMA, "strict": True}},
        ),
        ({}, "max_tokens", 3),
        (NEWER_NAME, "max_tokens", None),
        (NEWER_NAME, "max_completion_tokens", 3),
        ({"messages": MESSAGES, "chat_template_kwargs": VARIABLES}, "chat_template_kwargs", VARIABLES),
        ({"messages": MESSAGES}, "chat_template_kwargs", None),
    ],
)
def test_a_field_is_sent_as_the_caller_meant_it(fields: dict[str, Any], name: str, sent: object) -> None:
    """Schemas, the name of the token limit, and template variables are sent in the form that the server supports."""
    assert body_of(request(**fields)).get(name) == sent


async def test_closing_the_iterator_cancels_the_servers_work(remote: RemoteWriter, parrot: Parrot) -> None:
    """Closing the iterator closes the connection, and the server's writer stops within a step."""
    parrot.delay_s = 0.005
    writing = remote.write(request(max_tokens=32))
    await anext(writing)
    await writing.aclose()

    await until(lambda: parrot.num_open == 0)
    assert parrot.num_steps < 32


async def test_the_deadline_is_sent_on(remote: RemoteWriter, parrot: Parrot) -> None:
    """The server's deadline is not later than the caller's."""
    deadline_unix_s = asyncio.get_running_loop().time() + 2e9
    await events_of(remote, request(deadline_unix_s=deadline_unix_s))

    received = parrot.requests[0].deadline_unix_s
    assert received is not None
    assert received < deadline_unix_s


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe", "schlüssel\n".encode(), b"sk-one\nsk-two\n"])
async def test_a_bad_key_file_makes_the_server_unavailable(
    live_url: str, tmp_path: Path, content: bytes | None
) -> None:
    """The caller sees `unavailable`; the operator's log names setting and file, and quotes no part of the key."""
    key_file = tmp_path / "key"
    if content is not None:
        key_file.write_bytes(content)
    writer = text_writer(Settings(text_url=f"{live_url}/v1", text_url_key_file=key_file), None)
    assert writer is not None

    with capture_logs() as logged:
        with pytest.raises(DependencyUnavailable):
            await events_of(writer, request())
        with pytest.raises(DependencyUnavailable):
            await writer.models()

    assert [entry["event"] for entry in logged] == ["text_server_failed"] * 2
    assert all(f"TAILRACE_TEXT_URL_KEY_FILE: secret file {key_file}: " in entry["error"] for entry in logged)
    assert not any(secret in str(logged) for secret in ("sk-", "schl"))


@pytest.mark.parametrize(
    ("status", "error", "kind"),
    [
        (400, {"message": "n: too many", "param": "n", "type": "invalid_request_error"}, InvalidRequest),
        (400, {"message": "no such grammar", "type": "BadRequestError", "param": None, "code": 400}, InvalidRequest),
        (400, {"message": "words", "code": "context_length_exceeded", "type": "invalid_request_error"}, ContextTooLong),
        (
            400,
            {"message": "This model's maximum context length is 8 tokens. However, ...", "code": 400},
            ContextTooLong,
        ),
        (400, {"message": "The prompt is longer than the maximum model length of 8.", "code": 400}, ContextTooLong),
        (404, {"message": "no such model", "type": "NotFoundError", "code": 404}, NotFound),
        (429, {"message": "slow down", "type": "rate_limit_error", "code": "overloaded"}, Overloaded),
        (504, {"message": "late", "type": "timeout_error", "code": "deadline_exceeded"}, DeadlineExceeded),
        (500, {"message": "inside", "type": "InternalServerError", "code": 500}, DependencyUnavailable),
        (302, "words", DependencyUnavailable),
    ],
)
def test_errors_keep_their_meaning(status: int, error: Any, kind: type[TailraceError]) -> None:
    """A caller's error keeps its meaning; a too long prompt is recognised by OpenAI's code, or by message."""
    response = error_of_response(status, {"retry-after": "7"}, json.dumps({"error": error}).encode())

    assert (type(response), type(error_of_event(error))) == (kind, kind)
    assert response.retry_after_s in {None, 7}


def test_a_response_without_words_has_the_meaning_of_its_status() -> None:
    """The status determines the error if the body or the retry time cannot be parsed."""
    assert isinstance(error_of_response(429, {"retry-after": "soon"}, b""), Overloaded)
    assert isinstance(error_of_response(400, {}, b'{"error": "words"}'), InvalidRequest)
