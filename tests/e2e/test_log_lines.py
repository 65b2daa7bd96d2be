"""Log lines of the running stack: `pytest tests/e2e/test_log_lines.py`. Shutdown lines are tested with the shutdown."""

from typing import Any
from uuid import uuid4

from tests.support.stacks.stack import Stack
from tests.support.wait import wait_for


def test_a_request_and_an_administrative_act_are_in_the_log(stack: Stack) -> None:
    """Each request writes one JSON object, immediately, with its process' name, even at low traffic."""
    ids = {name: f"{name}-{uuid4().hex}" for name in ("request", "act")}

    answer = stack.recommend("1", request_id=ids["request"])
    stack.rest.get("/v1/explanations/none", headers={"x-request-id": ids["act"]})

    (request,), (act,) = (line_of(stack, request_id=ids[name]) for name in ("request", "act"))
    assert (request["event"], request["part"], request["tier"]) == ("recommended", "gateway", answer["tier"])
    assert (act["event"], act["part"], act["act"]) == ("audit", "gateway", "GET /v1/explanations/none")
    assert act["outcome"] == "not_found"


def line_of(stack: Stack, **fields: Any) -> list[dict[str, Any]]:
    """Wait for log lines with these fields."""
    lines: list[dict[str, Any]] = wait_for(lambda: stack.log_lines(**fields), 5.0, f"a line with {fields}")
    return lines
