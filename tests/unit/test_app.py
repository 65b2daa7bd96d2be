"""The LLM and the text model of a gateway: missing, or another server."""

import pytest

from services.app import AbsentLlm, AbsentText, llms_of
from services.contracts.rank import RankRequest
from services.contracts.text import TextRequest
from services.errors import DependencyUnavailable
from services.llm.remote import RemoteLlm
from services.settings.settings import Settings


async def test_what_is_missing_refuses() -> None:
    """A request to a missing LLM or text model raises DependencyUnavailable, not an unknown-model error."""
    request = RankRequest(request_id="r", user_id=None, bundle_version="v", history_item_ids=(), k=1, budget_ms=1.0)
    with pytest.raises(DependencyUnavailable, match="llm"):
        await AbsentLlm().rank(request, 1.0)
    with pytest.raises(DependencyUnavailable, match="text"):
        await AbsentText().models()
    with pytest.raises(DependencyUnavailable, match="text"):
        AbsentText().write(TextRequest(request_id="r", model="m", prompt="p"))


async def test_another_server_ranks_for_every_name() -> None:
    """With `llm_url` no handle of our own replicas is needed: one server answers for all names."""
    llms = llms_of(Settings(llm_url="http://gpu-host:8001/v1", names="films,books"), {})

    assert list(llms) == ["films", "books"]
    (server,) = set(llms.values())
    assert isinstance(server, RemoteLlm)
    await server.close()
