"""`tailrace explain`: what it asks the door, how it draws, and how it says no."""

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from infra.local.commands.explain import Door, ask, bar, show
from services.errors import EnvironmentFault, NotFound
from tests.support.servers import free_port

CELLS = 40
TOLD: dict[str, Any] = {
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
    """A door that gives one answer and remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status, self.body = 200, json.dumps(TOLD)
        self.asked: list[tuple[str, str | None]] = []

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Canned

    def do_GET(self) -> None:
        """Answer as told."""
        self.server.asked.append((self.path, self.headers.get("authorization")))
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(self.server.body.encode())

    def log_message(self, *_: object) -> None:
        """Say nothing."""


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


def drawn(told: dict[str, Any]) -> str:
    """What is printed."""
    out = Console(file=io.StringIO(), width=120, highlight=False)
    show(told, out)
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


def refusal(code: str, message: str) -> str:
    """An error as doors write it."""
    return json.dumps(
        {"error": {"code": code, "message": message, "field": None, "fix": "ask sooner", "request_id": "x"}}
    )


def test_it_asks_by_the_whole_id_with_the_key(door: Canned) -> None:
    """Whatever the id holds is one part of the path."""
    told = ask(Door(url=door.url, key="secret"), "a/b ü?x=1")

    assert told == TOLD
    assert door.asked == [("/v1/explanations/a%2Fb%20%C3%BC%3Fx%3D1", "Bearer secret")]


@pytest.mark.parametrize(
    ("status", "body", "error", "words"),
    [
        (404, refusal("not_found", "nothing is kept"), NotFound, "nothing is kept; ask sooner"),
        (
            401,
            refusal("unauthenticated", "this call needs a valid API key"),
            EnvironmentFault,
            "scope admin by --key-file",
        ),
        (403, refusal("not_allowed", "this key lacks the scope admin"), EnvironmentFault, "--key-file"),
        (503, refusal("dependency_away", "features is away"), EnvironmentFault, "features is away"),
        (200, "<html>", EnvironmentFault, "no Tailrace gateway"),
        (404, "<html>", EnvironmentFault, "no Tailrace gateway"),
        (500, '{"error": "text"}', EnvironmentFault, "no Tailrace gateway"),
    ],
)
def test_a_refusal_is_one_line_with_what_to_do(
    door: Canned, status: int, body: str, error: type[Exception], words: str
) -> None:
    """In the operator's terms, never a traceback."""
    door.status, door.body = status, body

    with pytest.raises(error, match=words):
        ask(Door(url=door.url), "r")


def test_a_door_that_is_not_there_is_said() -> None:
    """With the address that was tried."""
    url = f"http://127.0.0.1:{free_port()}"

    with pytest.raises(EnvironmentFault, match=f"no gateway answers at {url}"):
        ask(Door(url=url), "r")


def test_the_sentences_come_first_then_the_stages() -> None:
    """In the order given, brackets unharmed, and the trace's id last."""
    lines = [line.rstrip() for line in drawn(TOLD).splitlines() if line.strip()]

    assert lines[:2] == TOLD["sentences"]
    assert [line.split()[0] for line in lines[2:]] == ["stage", "features", "student", "whole", "trace"]
    assert lines[3].count("█") == CELLS // 2
    assert lines[4].count("█") == 1


@given(st.floats(0, 2), st.floats(0, 2))
def test_a_bar_never_leaves_its_place(begin: float, length: float) -> None:
    """At least one cell, and no more than there are."""
    drawn_bar = bar(begin, length)

    assert 1 <= drawn_bar.count("█") <= CELLS
    assert len(drawn_bar) <= CELLS
