"""Text from containers, over a tiny random checkpoint."""

from pathlib import Path

from tests.support.engine.checkpoints import write_checkpoint
from tests.support.stacks.compose_stack import ComposeStack

REQUEST = {"model": "tiny", "messages": [{"role": "user", "content": "the river runs on"}], "max_tokens": 8}


def test_text_is_served_with_a_checkpoint(composed: ComposeStack, tmp_path: Path) -> None:
    """With TEXT_PATH the doors generate text, without it they answer 404; recommendations work in both cases."""
    composed.put(write_checkpoint(tmp_path / "tiny", max_positions=256), "/state")

    without = composed.rest.post("/v1/chat/completions", json=REQUEST)
    with composed.given(TEXT_PATH="/state/tiny"):
        written = composed.rest.post("/v1/chat/completions", json=REQUEST)
        recommended = composed.recommend("1")

    assert without.status_code == 404
    assert written.status_code == 200, written.text
    assert 0 < written.json()["usage"]["completion_tokens"] <= REQUEST["max_tokens"]
    assert recommended["items"]
