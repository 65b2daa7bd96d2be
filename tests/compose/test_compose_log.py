"""What containers write to their standard output."""

from tests.support.stacks.compose_stack import ComposeStack
from tests.support.wait import wait_for


def test_a_stopped_container_leaves_its_last_words(composed: ComposeStack) -> None:
    """`docker logs` has a gateway's last request and the line of its SIGTERM, of serve and standby alike."""
    request_id = str(composed.recommend("1")["request_id"])

    composed.restart("serve", "standby")

    assert [line["event"] for line in composed.log_lines(request_id=request_id)] == ["recommended"]
    for part in ("serve", "standby"):
        wait_for(lambda part=part: composed.log_lines(part=part, event="stopping"), 5.0, f"the last words of {part}")
