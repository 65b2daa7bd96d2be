"""The OpenAI door in process: statuses and error format, access, models, metrics."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.contracts.access import Priority, Scope
from services.errors import DependencyUnavailable
from services.gateway.rest.door import create_rest_app
from tests.support.engine.parrot import MODEL, Parrot
from tests.support.gateway.keys import bearer, stored_key
from tests.unit.gateway.clients import in_process
from tests.unit.gateway.world import MAX_BODY_BYTES, World, keyed_access

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEXT = {"model": MODEL, "prompt": "a b"}


@pytest.fixture
async def keyed(texts: World, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the door with API keys."""
    access = keyed_access(
        tmp_path,
        stored_key("writer", Scope.TEXT, priority=Priority.LOW),
        stored_key("shop", Scope.RECOMMEND),
        stored_key("daily", Scope.TEXT, daily_quota=1),
        stored_key("batches", Scope.TEXT, daily_quota=6),
    )
    app = create_rest_app(lambda: texts.plane, lambda: b"", MAX_BODY_BYTES, access=access)
    async with in_process(app) as client:
        yield client


@pytest.mark.parametrize(
    ("path", "body", "deadline", "param"),
    [
        (CHAT, {"model": MODEL, "messages": [], "n": 1}, None, "messages"),
        (COMPLETIONS, {**TEXT, "prompt": ["x"] * 7}, None, "prompt"),
        (COMPLETIONS, {**TEXT, "prompt": ["x"] * 2, "n": 4}, None, "prompt"),
        *((COMPLETIONS, TEXT, deadline, "x-deadline-ms") for deadline in ("0", "600001", "soon", "-5")),
    ],
)
async def test_a_wrong_field_is_a_400_that_names_it(
    http: httpx.AsyncClient, parrot: Parrot, path: str, body: dict[str, Any], deadline: str | None, param: str
) -> None:
    """A wrong field is an error in OpenAI's format with the fix in the message; no text is generated."""
    answer = await http.post(path, json=body, headers={"x-deadline-ms": deadline} if deadline else {})

    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"].startswith(f"{param}: ")
    assert ";" in error["message"]
    assert parrot.requests == []


@pytest.mark.parametrize(
    ("key", "status", "kind"),
    [
        (None, 401, "authentication_error"),
        ("nonsense", 401, "authentication_error"),
        ("shop", 403, "permission_error"),
        ("writer", 200, None),
    ],
)
async def test_text_needs_its_scope(
    keyed: httpx.AsyncClient, parrot: Parrot, key: str | None, status: int, kind: str | None
) -> None:
    """The key's priority and id reach the writer: the engine schedules by priority and shares prefixes by key."""
    answer = await keyed.post(COMPLETIONS, json=TEXT, headers=bearer(key))

    written = [(request.priority, request.key_id) for request in parrot.requests]
    assert (answer.status_code, answer.json().get("error", {}).get("type")) == (status, kind)
    assert written == ([(Priority.LOW, "writer")] if status == 200 else [])


async def test_a_call_costs_as_much_as_it_has_choices(keyed: httpx.AsyncClient) -> None:
    """Each prompt counts as one call; a call that exceeds the quota is rejected whole and spends nothing."""
    four, two = {**TEXT, "prompt": ["x"] * 4}, {**TEXT, "prompt": ["x"] * 2}
    answers = [await keyed.post(COMPLETIONS, json=body, headers=bearer("batches")) for body in (four, four, two, two)]
    never = await keyed.post(COMPLETIONS, json=two, headers=bearer("daily"))

    assert [answer.status_code for answer in answers] == [200, 429, 200, 429]
    assert [answer.headers["ratelimit-remaining"] for answer in answers[:3]] == ["2", "2", "0"]
    assert int(answers[1].headers["retry-after"]) > 0
    assert answers[1].json()["error"]["code"] == "rate_limit_exceeded"
    assert never.status_code in (400, 403)


async def test_metrics_of_tokens_and_their_times(http: httpx.AsyncClient, texts: World) -> None:
    """A stream observes one time to first token, and a gap per further token of a choice; other calls do not."""
    body = {"model": MODEL, "prompt": "a b c"}
    await http.post(COMPLETIONS, json={**body, "max_tokens": 4, "n": 2, "stream": True})
    await http.post(COMPLETIONS, json={**body, "max_tokens": 1})

    route = {"route": "completions"}
    assert texts.metric("tailrace_text_first_token_seconds_count", **route) == 1
    assert texts.metric("tailrace_text_token_gap_seconds_count", **route) == 6
    assert texts.metric("tailrace_text_tokens_total", kind="completion") == 9
    assert texts.metric("tailrace_text_tokens_total", kind="prompt") == 6
    assert texts.metric("tailrace_text_tokens_total", kind="cached") == 2
    assert texts.metric("tailrace_text_requests_total", code="ok", **route) == 2


async def test_models_are_a_503_while_the_text_writer_is_unavailable(http: httpx.AsyncClient, parrot: Parrot) -> None:
    """The list is an error, since an empty list would mean that the models do not exist."""
    parrot.error = DependencyUnavailable("text", 1)

    answer = await http.get("/v1/models")

    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


@pytest.mark.parametrize("sent", ["org/name", "org%2Fname"])
async def test_a_model_is_described_by_a_name_with_a_slash(http: httpx.AsyncClient, parrot: Parrot, sent: str) -> None:
    """Clients send the slash of `org/name` as it is, or encoded."""
    parrot.name = "org/name"

    found = await http.get(f"/v1/models/{sent}")
    unknown = await http.get(f"/v1/models/{sent}/x")

    assert (found.status_code, found.json()["id"]) == (200, "org/name")
    assert (unknown.status_code, "'org/name/x'" in unknown.json()["error"]["message"]) == (404, True)


async def test_without_text_no_model_is_listed(texts: World, http: httpx.AsyncClient) -> None:
    """No model is listed, and the error names the option that enables text."""
    texts.plane.text = None

    listed = (await http.get("/v1/models")).json()["data"]
    answer = await http.post(COMPLETIONS, json=TEXT)

    assert listed == []
    assert answer.status_code == 404
    assert "--text" in answer.json()["error"]["message"]
