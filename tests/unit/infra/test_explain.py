"""`tailrace explain`: the request that it sends, the drawing, and the errors."""

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from rich.console import Console

from infra.local.commands.explain import Door, ask, show
from services.errors import EnvironmentFault, NotFound
from tests.support.servers import free_port

CELLS = 40
EXPLANATION: dict[str, Any] = {
    "outcome": "ok",
    "elapsed_ms": 10.0,
    "deadline_ms": 200,
    "trace_id": "ab" * 16,
    "sentences": ["Answered by student (short_history).", "It [was] quick."],
    "stages": [
        {"name": "features", "offset_ms": 1.0, "duration_ms": 5.0},
        {"name": "student", "offset_ms": 6.0, "duration_ms": 0.01},
    ],
}


class Canned(ThreadingHTTPServer):
    """A door that sends one answer and records its requests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status, self.body = 200, json.dumps(EXPLANATION)
        self.requests: list[tuple[str, str | None]] = []

    @property
    def url(self) -> str:
        """Its URL."""
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Canned

    def do_GET(self) -> None:
        """Send the answer."""
        self.server.requests.append((self.path, self.headers.get("authorization")))
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(self.server.body.encode())

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def door() -> Iterator[Canned]:
    """A listening door."""
    server = Canned()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_request_has_the_whole_id_and_the_key(door: Canned) -> None:
    """The id is one part of the path, whatever its characters."""
    explanation = ask(Door(url=door.url, key="secret"), "a/b ü?x=1")

    assert explanation == EXPLANATION
    assert door.requests == [("/v1/explanations/a%2Fb%20%C3%BC%3Fx%3D1", "Bearer secret")]


@pytest.mark.parametrize(
    ("status", "body", "error", "words"),
    [
        (404, "not_found", NotFound, "no such record; ask sooner"),
        (401, "unauthenticated", EnvironmentFault, "scope admin by --key-file"),
        (403, "not_allowed", EnvironmentFault, "--key-file"),
        (503, "unavailable", EnvironmentFault, "no such record"),
        (200, "<html>", EnvironmentFault, "no Tailrace gateway"),
        (404, "<html>", EnvironmentFault, "no Tailrace gateway"),
        (500, '{"error": "text"}', EnvironmentFault, "no Tailrace gateway"),
    ],
)
def test_a_refusal_is_one_line_with_the_fix(
    door: Canned, status: int, body: str, error: type[Exception], words: str
) -> None:
    """Every error of the door, and an answer of another server, becomes an error for the operator."""
    error_body = {"code": body, "message": "no such record", "field": None, "fix": "ask sooner", "request_id": "x"}
    door.status, door.body = status, body if body[0] in "<{" else json.dumps({"error": error_body})

    with pytest.raises(error, match=words):
        ask(Door(url=door.url), "r")
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(EnvironmentFault, match=f"no gateway answers at {url} .*`tailrace status`"):
        ask(Door(url=url, local_url=url), "r")
    with pytest.raises(EnvironmentFault, match=f"this machine's stack has its REST door at {door.url}"):
        ask(Door(url=url, local_url=door.url), "r")


def test_the_sentences_come_first_then_the_stages() -> None:
    """Sentences keep their order and brackets; the trace's id is last."""
    text = io.StringIO()
    show(EXPLANATION, Console(file=text, width=120, highlight=False))
    lines = [line.rstrip() for line in text.getvalue().splitlines() if line.strip()]

    assert lines[:2] == EXPLANATION["sentences"]
    assert [line.split()[0] for line in lines[2:]] == ["stage", "features", "student", "whole", "trace"]
    assert lines[3].count("█") == CELLS // 2
    assert lines[4].count("█") == 1
