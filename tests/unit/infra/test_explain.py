"""`tailrace explain`: its request, the drawing, and errors."""

from typing import Any

import pytest

from infra.local.commands.explain import Door, ask
from services.errors import EnvironmentFault, NotFound
from tests.support.scripted_server import Step, running
from tests.support.servers import HOST, free_port

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


def test_the_request_has_the_whole_id_and_the_key() -> None:
    """The id is encoded as a single path segment."""
    with running([Step(200, EXPLANATION)]) as door:
        assert ask(Door(url=door.address, key="secret"), "a/b ü?x=1") == EXPLANATION

    (request,) = door.requests
    assert (request["path"], request["authorization"]) == ("/v1/explanations/a%2Fb%20%C3%BC%3Fx%3D1", "Bearer secret")


@pytest.mark.parametrize(
    ("status", "body", "error", "words"),
    [
        (404, "not_found", NotFound, "no such record; ask sooner"),
        (401, "unauthenticated", EnvironmentFault, "scope admin by --key-file"),
        (503, "unavailable", EnvironmentFault, "no such record"),
        (200, "<html>", EnvironmentFault, "not a Tailrace gateway"),
        (404, "<html>", EnvironmentFault, "not a Tailrace gateway"),
        (500, '{"error": "text"}', EnvironmentFault, "not a Tailrace gateway"),
    ],
)
def test_a_refusal_is_one_line_with_the_fix(status: int, body: str, error: type[Exception], words: str) -> None:
    """Every API error, and the answer of another server, becomes an error for the operator."""
    error_body = {"code": body, "message": "no such record", "field": None, "fix": "ask sooner", "request_id": "x"}
    step = Step(status, body if body[0] in "<{" else {"error": error_body})

    with running([step]) as door, pytest.raises(error, match=words):
        ask(Door(url=door.address), "r")


def test_where_nobody_answers_the_stack_of_this_machine_is_named() -> None:
    """If no gateway answers, the error names the local stack's REST address, or `tailrace status` if it is the same."""
    url = f"http://{HOST}:{free_port()}"

    with pytest.raises(EnvironmentFault, match=f"no gateway answers at {url} .*`tailrace status`"):
        ask(Door(url=url, local_url=url), "r")
    with pytest.raises(EnvironmentFault, match="the REST address of this machine's stack is http://other"):
        ask(Door(url=url, local_url="http://other"), "r")
