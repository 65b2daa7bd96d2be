"""A missing LLM or text model fails requests like an unavailable dependency."""

import pytest

from services.app import AbsentLlm, AbsentText
from services.contracts.rank import RankRequest
from services.contracts.text import TextRequest
from services.errors import DependencyUnavailable


async def test_what_is_missing_refuses() -> None:
    """A request to a missing LLM or text model raises DependencyUnavailable, not an unknown-model error."""
    request = RankRequest(request_id="r", user_id=None, bundle_version="v", history_item_ids=(), k=1, budget_ms=1.0)
    with pytest.raises(DependencyUnavailable, match="llm"):
        await AbsentLlm().rank(request, 1.0)
    with pytest.raises(DependencyUnavailable, match="text"):
        await AbsentText().models()
    with pytest.raises(DependencyUnavailable, match="text"):
        AbsentText().write(TextRequest(request_id="r", model="m", prompt="p"))
