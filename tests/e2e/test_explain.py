"""`tailrace explain` on the running stack: each way to an answer says what it was and why: `pytest tests/e2e/test_explain.py`."""

import json
import uuid
from typing import Any

import pytest

from tests.support.stack import Stack, new_user_id, with_features
from tests.support.wait import wait_for

ITEMS = ["50", "181", "172", "174", "1", "100"]


def asked(stack: Stack, **fields: Any) -> tuple[str, dict[str, Any]]:
    """Ask under an id of our own; gives it and the answer or the error."""
    ids: list[str] = []

    def once() -> Any:
        """Ask, under a new id each time."""
        ids.append(f"why {uuid.uuid4().hex[:8]}/ü")
        body = {"k": 3, "deadline_ms": 2_000, **fields, "request_id": ids[-1]}
        return stack.rest.post("/v1/recommendations", json=body).json()

    answer = with_features(once)
    return ids[-1], answer


def explain(stack: Stack, request_id: str, *options: str) -> str:
    """Run the command until the explanation is there, which takes a fifth of a second."""

    def shown() -> str:
        """Run it once; empty while nothing is kept."""
        ended = stack.command("explain", request_id, *options)
        assert ended.returncode == 0 or "no explanation" in ended.stderr, ended.stderr
        return ended.stdout

    text: str = wait_for(shown, 60.0, f"an explanation of {request_id}")
    return text


@pytest.mark.parametrize(
    ("fields", "words", "stages"),
    [
        (
            {"recent_item_ids": ITEMS},
            ["by llm (llm_in_time)", "it answered in time", "prompt tokens came from the prefix cache", "in time,"],
            {"features", "route", "rank", "llm", "student", "answer"},
        ),
        (
            {"recent_item_ids": ITEMS[:1]},
            ["by student (short_history)", "1 known items are too few for the LLM, which is asked from 3 on"],
            {"features", "route", "rank", "student", "answer"},
        ),
        (
            {"recent_item_ids": ITEMS, "deadline_ms": 5},
            ["by student (llm_", "The longest stage was", "of a deadline of 5 ms"],
            {"route", "student"},
        ),
        ({"user_id": "nobody-knows-me"}, ["by popular (unknown_user)", "Nothing is known of this user"], {"answer"}),
    ],
)
def test_each_tier_says_why(stack: Stack, fields: dict[str, Any], words: list[str], stages: set[str]) -> None:
    """The decision with its numbers, and every stage on the time line."""
    request_id, answer = asked(stack, **fields)

    shown = explain(stack, request_id)

    assert all(part in shown for part in (answer["tier"], answer["reason"], answer["bundle_version"], *words)), shown
    drawn = {line.split()[0] for line in shown.splitlines() if "█" in line}
    assert stages <= drawn == set(answer["stages_ms"])


def test_a_stored_list_says_that_it_is_fresh(stack: Stack) -> None:
    """And after a click that it was left behind."""
    user_id = stack.listed_user()
    fresh_id, _ = asked(stack, user_id=user_id)
    fresh = explain(stack, fresh_id)
    stack.sees_click(user_id, "50")
    stale_id, _ = asked(stack, user_id=user_id)

    stale = explain(stack, stale_id)

    assert "has seen every event of the user" in fresh
    assert "the user has done something since it was made" in stale


def test_a_refusal_says_what_was_wrong(stack: Stack) -> None:
    """Found by the id that the error named."""
    _, refused = asked(stack, user_id=new_user_id(), recent_item_ids=["\x00"])
    request_id = refused["error"]["request_id"]

    shown = explain(stack, request_id)

    assert shown.startswith("Refused with invalid_request: recent_item_ids[0]")


def test_machines_get_the_same_as_json(stack: Stack) -> None:
    """The console and scripts read offsets and durations."""
    request_id, answer = asked(stack, recent_item_ids=ITEMS)

    told = json.loads(explain(stack, request_id, "--json"))

    assert told["request_id"] == request_id
    assert {stage["name"]: stage["duration_ms"] for stage in told["stages"]} == answer["stages_ms"]
    assert told["facts"]["num_history"] == len(ITEMS)


def test_an_unknown_request_is_one_line(stack: Stack) -> None:
    """Exit code 1 and what to do."""
    ended = stack.command("explain", "never-asked")

    assert ended.returncode == 1
    assert "no explanation of this request is kept" in ended.stderr
    assert "Traceback" not in ended.stderr
