"""`tailrace explain` on the running stack."""

import json
import uuid
from typing import Any

from tests.support.stacks.stack import Stack, with_features
from tests.support.wait import wait_for

ITEMS = ["50", "181", "172", "174", "1", "100"]


def test_an_answer_of_the_decoder_is_explained(stack: Stack) -> None:
    """The command prints the decision with its figures and every stage, in words and as JSON."""
    ids: list[str] = []

    def ask() -> Any:
        """Request a recommendation with a new ID each time."""
        ids.append(f"why {uuid.uuid4().hex[:8]}/ü")
        body = {"recent_item_ids": ITEMS, "k": 3, "deadline_ms": 2_000, "request_id": ids[-1]}
        return stack.rest.post("/v1/recommendations", json=body).json()

    def explain(*options: str) -> str:
        """Run the command; empty until the explanation is stored, which takes a fifth of a second."""
        ended = stack.command("explain", ids[-1], *options)
        assert ended.returncode == 0 or "no explanation" in ended.stderr, ended.stderr
        return ended.stdout

    answer = with_features(ask)
    shown = wait_for(explain, 60.0, f"an explanation of {ids[-1]}")
    explanation = json.loads(explain("--json"))

    words = ("by llm (llm_in_time)", answer["bundle_version"], "prompt tokens came from the prefix cache", "in time,")
    assert [part for part in words if part not in shown] == []
    drawn = {line.split()[0] for line in shown.splitlines() if "█" in line}
    assert {"features", "route", "rank", "llm", "student", "answer"} <= drawn == set(answer["stages_ms"])
    assert {stage["name"]: stage["duration_ms"] for stage in explanation["stages"]} == answer["stages_ms"]
    assert explanation["facts"]["num_history"] == len(ITEMS)
