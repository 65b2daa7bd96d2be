"""What is not there says so in the words of what could be."""

import pytest

from services.contracts.rank import RankRequest
from services.contracts.text import TextRequest
from services.errors import DependencyAway
from services.llm.absent import AbsentLlm, AbsentText

QUESTION = RankRequest(request_id="r", user_id=None, bundle_version="v", history_item_ids=(), k=1, budget_ms=1.0)


async def test_nobody_ranks() -> None:
    """The policy takes it for an LLM that is away."""
    with pytest.raises(DependencyAway, match="llm"):
        await AbsentLlm().rank(QUESTION, 1.0)


async def test_nobody_writes() -> None:
    """A caller is told to come back, rather than that there is no such model."""
    with pytest.raises(DependencyAway, match="text"):
        await AbsentText().models()
    with pytest.raises(DependencyAway, match="text"):
        AbsentText().write(TextRequest(request_id="r", model="m", prompt="p"))
