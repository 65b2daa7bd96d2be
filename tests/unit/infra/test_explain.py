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
from tests.support.servers import HOST, free_port

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

    status, body = 200, json.dumps(EXPLANATION)

    def __init__(self) -> None:
        super().__init__((HOST, 0), _Handler)
        self.url = f"http://{HOST}:{self.server_address[1]}"
        self.requests: list[tuple[str, str | None]] = []


class _Handler(BaseHTTPRequestHandler):
    server: Canned

    def do_GET(self) -> None:
        self.server.requests.append((self.path, self.headers.get("authorization")))
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(self.server.body.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def door() -> Iterator[Canned]:
    """A listening door."""
    with Canned() as server:
        threading.Thread(target=server.serve_forever).start()
        yield server
        server.shutdown()


def test_the_request_has_the_whole_id_and_the_key(door: Canned) -> None:
    """The id is one part of the path, whatever its characters."""
    assert ask(Door(url=door.url, key="secret"), "a/b ü?x=1") == EXPLANATION
    assert door.requests == [("/v1/explanations/a%2Fb%20%C3%BC%3Fx%3D1", "Bearer secret")]


@pytest.mark.parametrize(
    ("status", "body", "error", "words"),
    [
        (404, "not_found", NotFound, "no such record; ask sooner"),
        (401, "unauthenticated", EnvironmentFault, "scope admin by --key-file"),
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


def test_where_nobody_answers_the_stack_of_this_machine_is_named() -> None:
    """With its REST door's address if that is another, otherwise with the command that shows its state."""
    url = f"http://{HOST}:{free_port()}"

    with pytest.raises(EnvironmentFault, match=f"no gateway answers at {url} .*`tailrace status`"):
        ask(Door(url=url, local_url=url), "r")
    with pytest.raises(EnvironmentFault, match="this machine's stack has its REST door at http://other"):
        ask(Door(url=url, local_url="http://other"), "r")


def test_the_sentences_come_first_then_the_stages() -> None:
    """Sentences keep their order and brackets; the trace's id is last."""
    text = io.StringIO()
    show(EXPLANATION, Console(file=text, width=120, highlight=False))
    lines = [line.rstrip() for line in text.getvalue().splitlines() if line.strip()]

    assert lines[:2] == EXPLANATION["sentences"]
    assert [line.split()[0] for line in lines[2:]] == ["stage", "features", "student", "whole", "trace"]
    assert [line.count("█") for line in lines[3:5]] == [CELLS // 2, 1]
