"""Ambiguous paths are rejected at the door, before authentication, in the error format of the target operation."""

import json
import posixpath
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.routing import Match, Route
from starlette.types import Message

from services.errors import InvalidRequest
from services.gateway.call.http import HttpApp
from services.gateway.call.path import WITH_PARAMETER, check_path
from services.gateway.console.door import add_console
from services.gateway.console.editor import add_editor
from services.gateway.console.releases import add_releases
from services.gateway.rest.door import create_rest_app
from tests.unit.gateway.clients import RestClient
from tests.unit.gateway.world import MAX_BODY_BYTES, World, keyed_access

TAILRACE = [
    "/v1/r%65commendations",
    "/v1/%65vents",
    "/v1//events",
    "//v1/events",
    "/v1/./events",
    "/v1/%2e/events",
    "/v1/x/../events",
    "/v1/x/.%2E/events",
    "/v1/events/.",
    "/v1/events/..",
    "/v1/events%",
    "/v1/events%2",
    "/v1%2Fevents",
    "/v1/events%00",
    "/%2e%2e/v1/events",
    "/v1/%65xplanations/x",
    "/v1/explanations/x%zz",
    "/v1/explanations/x/../y",
    "/v1/explanations/%2e%2e/events",
    "/v1/explanations/%C0%AF",
    "/%68ealthz",
]
OPENAI = ["/v1/%63ompletions", "/v1//chat/completions", "/v1/chat%2fcompletions", "/v1/models/%FF", "/v1/./models"]
NOT_UTF8 = ("/v1/explanations/%C0%AF", "/v1/models/%FF")


@pytest.fixture
def app(world: World, tmp_path: Path) -> HttpApp:
    """The HTTP doors with an empty key file."""
    access = keyed_access(tmp_path)
    return create_rest_app(lambda: world.plane, lambda: b"", MAX_BODY_BYTES, access=access, echoes_request_id=True)


async def post(app: HttpApp, path: str, method: str = "POST") -> tuple[int, Any, dict[bytes, bytes]]:
    """Send to a raw path, which HTTP clients would normalise; return status, error and headers."""
    sent: list[Message] = []
    scope = {
        "type": "http",
        "method": method,
        "scheme": "http",
        "path": unquote(path),
        "raw_path": path.encode(),
        "query_string": b"a=%2F..//",
        "headers": [(b"host", b"door"), (b"x-request-id", b"mine")],
    }

    async def receive() -> Message:
        return {"type": "http.request"}

    async def send(message: Message) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return sent[0]["status"], json.loads(sent[1]["body"])["error"], dict(sent[0]["headers"])


@pytest.mark.parametrize("path", [*TAILRACE, *OPENAI])
async def test_an_ambiguous_path_is_a_400_at_the_door(app: HttpApp, path: str) -> None:
    """The door rejects an ambiguous path even without the edge; OpenAI paths use OpenAI's error format."""
    status, error, headers = await post(app, path)

    assert (status, headers[b"x-request-id"]) == (400, b"mine")
    if path in OPENAI:
        assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "invalid_value", "path")
    else:
        assert (error["code"], error["field"], error["request_id"]) == ("invalid_request", "path", "mine")
        assert "parameter" in error["fix"]


@pytest.mark.parametrize("path", ["/v1/events/", "/V1/events", "/v1/events;a=1", "/v1/...", "/v1\\events", "/v1/.x"])
async def test_another_path_is_a_404_and_no_redirect(app: HttpApp, path: str) -> None:
    """Paths that no server normalises to ours are not found; a redirect would bypass the edge's TLS."""
    status, error, _ = await post(app, path)

    assert status == 404
    assert error["code"] == "not_found"


@pytest.mark.parametrize("path", ["/v1/items/{item_id}", "/v1/explanations/{request_id}"])
async def test_a_template_sent_as_a_path_is_a_parameter(world: World, path: str) -> None:
    """Braces that a caller sends are part of an id, as any other characters."""
    app = create_rest_app(lambda: world.plane, lambda: b"", MAX_BODY_BYTES)
    status, error, _ = await post(app, path, "GET")

    assert (status, error["code"]) == (404, "not_found")


segments = st.sampled_from(["", ".", "..", "%2e", "a", "%61", "%2F", "%25", "v1", "events", ".a", "%", "é"])


@given(st.lists(segments, max_size=5).map(lambda parts: f"/{'/'.join(parts)}"), st.sampled_from(["", *WITH_PARAMETER]))
def test_whoever_reads_a_path_that_passes_reads_the_same(path: str, prefix: str) -> None:
    """Decoding and normalising leave an accepted path unchanged; within a parameter, normalising does."""
    whole = prefix + path.removeprefix("/") if prefix else path
    try:
        check_path(quote(whole, safe="/%").encode())
    except InvalidRequest:
        return

    has_parameter = any(whole.startswith(prefix) for prefix in WITH_PARAMETER)
    assert unquote(whole) == whole or has_parameter
    assert posixpath.normpath(whole.replace("%2e", ".")).rstrip("/") == whole.rstrip("/")


def routes_of(app: HttpApp) -> list[Route]:
    """Return the routes with parameters, including the console's."""
    add_console(app, service=None)  # type: ignore[arg-type] - only routes are read
    add_editor(app, plane=None)  # type: ignore[arg-type]
    add_releases(app, None, 0.0, lambda: 0.0)  # type: ignore[arg-type]
    return [route for route in app.router.routes if isinstance(route, Route) and "{" in route.path]


async def test_what_stands_before_a_parameter_is_known(app: HttpApp) -> None:
    """The edge knows the prefix of every route with a parameter."""
    assert {route.path.partition("{")[0] for route in routes_of(app)} == set(WITH_PARAMETER)


async def test_a_slash_in_a_parameter_is_sent_encoded(app: HttpApp) -> None:
    """For every operation, `a%2Fb` is one parameter; `a/b`, `a/` and "" do not match, except for a model's `a/b`."""
    for route in routes_of(app):
        (method,) = route.methods or ()
        for sent, read in (
            ("a%2Fb", "a/b"),
            ("a%252F%20%C3%BC:x", "a%2F ü:x"),
            ("a/b", "a/b" if route.path == "/v1/models/{model_id}" else None),
            ("a/", "a/" if route.path == "/v1/models/{model_id}" else None),
            ("", None),
        ):
            raw_path = re.sub("{.*?}", sent, route.path)
            match, more = route.matches(
                {"type": "http", "method": method, "path": unquote(raw_path), "raw_path": raw_path.encode()}
            )
            assert match is (Match.NONE if read is None else Match.FULL), raw_path
            assert set(more.get("path_params", {}).values()) == set() if read is None else {read}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("DELETE", "/v1/users/U/", 404),
        ("DELETE", "/v1/users/U/items/98", 404),
        ("DELETE", "/v1/users/U/data", 405),
        ("DELETE", "/v1/users/", 404),
        ("DELETE", "/v1/items/i01/", 404),
        ("PUT", "/v1/items/i01/similar", 405),
        ("GET", "/v1/items/i01/x/%73imilar", 404),
        ("GET", "/v1/models/parrot/", 404),
        ("DELETE", "/v1/users/a%2Fb", 202),
        ("GET", "/v1/users/a%2Fb/data", 200),
    ],
)
async def test_only_an_encoded_slash_is_of_the_parameter(
    rest: RestClient, world: World, method: str, path: str, status: int
) -> None:
    """A path without a route changes nothing; an encoded slash is part of the user id."""
    answer = await rest.http.request(method, path, json={})

    assert answer.status_code == status
    assert [key for key, _ in world.events.records] == ([b"a/b"] if status == 202 else [])
    assert not world.items.records
