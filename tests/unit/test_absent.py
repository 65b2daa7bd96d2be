"""A missing LLM or text model refuses like an unavailable one."""

import pytest

from services.contracts.rank import RankRequest
from services.contracts.text import TextRequest
from services.errors import DependencyAway
from services.llm.absent import AbsentLlm, AbsentText

REQUEST = RankRequest(request_id="r", user_id=None, bundle_version="v", history_item_ids=(), k=1, budget_ms=1.0)


async def test_a_missing_llm_refuses() -> None:
    """The error is that of an unavailable LLM."""
    with pytest.raises(DependencyAway, match="llm"):
        await AbsentLlm().rank(REQUEST, 1.0)


async def test_a_missing_text_model_refuses() -> None:
    """The error is that of an unavailable text model, not an unknown one."""
    with pytest.raises(DependencyAway, match="text"):
        await AbsentText().models()
    with pytest.raises(DependencyAway, match="text"):
        AbsentText().write(TextRequest(request_id="r", model="m", prompt="p"))
