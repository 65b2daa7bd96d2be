"""`tailrace explain` on the running stack."""

import json
import uuid
from typing import Any

from tests.support.stacks.stack import Stack, with_features
from tests.support.wait import wait_for

ITEMS = ["50", "181", "172", "174", "1", "100"]


def recommend(stack: Stack, **fields: Any) -> tuple[str, dict[str, Any]]:
    """Request a recommendation under a new id; return the id and the answer."""
    ids: list[str] = []

    def once() -> Any:
        """Send the request, under a new id each time."""
        ids.append(f"why {uuid.uuid4().hex[:8]}/ü")
        body = {"k": 3, "deadline_ms": 2_000, **fields, "request_id": ids[-1]}
        return stack.rest.post("/v1/recommendations", json=body).json()

    answer = with_features(once)
    return ids[-1], answer


def explain(stack: Stack, request_id: str, *options: str) -> str:
    """Run the command until the explanation is stored, which takes a fifth of a second."""

    def shown() -> str:
        """Run it once; empty while nothing is stored."""
        ended = stack.command("explain", request_id, *options)
        assert ended.returncode == 0 or "no explanation" in ended.stderr, ended.stderr
        return ended.stdout

    return str(wait_for(shown, 60.0, f"an explanation of {request_id}"))


def test_an_answer_of_the_decoder_is_explained(stack: Stack) -> None:
    """The decision with its numbers and every stage, in words and as JSON."""
    request_id, answer = recommend(stack, recent_item_ids=ITEMS)

    shown = explain(stack, request_id)
    explanation = json.loads(explain(stack, request_id, "--json"))

    words = ("by llm (llm_in_time)", answer["bundle_version"], "prompt tokens came from the prefix cache", "in time,")
    assert [part for part in words if part not in shown] == []
    drawn = {line.split()[0] for line in shown.splitlines() if "█" in line}
    assert {"features", "route", "rank", "llm", "student", "answer"} <= drawn == set(answer["stages_ms"])
    assert {stage["name"]: stage["duration_ms"] for stage in explanation["stages"]} == answer["stages_ms"]
    assert explanation["facts"]["num_history"] == len(ITEMS)
