"""Text from containers, over a tiny random checkpoint: `pytest tests/compose --stack compose`."""

from pathlib import Path

from tests.support.checkpoints import write_checkpoint
from tests.support.compose_stack import ComposeStack

ASKED = {"model": "tiny", "messages": [{"role": "user", "content": "the river runs on"}], "max_tokens": 8}


def test_text_is_served_where_its_variable_names_a_checkpoint(composed: ComposeStack, tmp_path: Path) -> None:
    """With TEXT_PATH the same doors write, without it they say that nobody does; recommendations go on either way."""
    composed.put(write_checkpoint(tmp_path / "tiny", max_positions=256), "/state")

    without = composed.rest.post("/v1/chat/completions", json=ASKED)
    with composed.given(TEXT_PATH="/state/tiny"):
        written = composed.rest.post("/v1/chat/completions", json=ASKED)
        recommended = composed.recommend("1")

    assert without.status_code == 404
    assert written.status_code == 200, written.text
    assert 0 < written.json()["usage"]["completion_tokens"] <= ASKED["max_tokens"]
    assert recommended["items"]
