"""Paths and methods that are not there: OpenAI's clients hear of it in OpenAI's envelope, the REST door's in its own."""

import httpx
import openai
import pytest
from openai import AsyncOpenAI

OPENAI = {"message", "type", "param", "code"}
REST = {"code", "message", "field", "fix", "request_id"}


@pytest.mark.parametrize(
    ("method", "path", "status", "allowed", "envelope"),
    [
        ("POST", "/v1/embeddings", 404, None, OPENAI),
        ("POST", "/v1/responses", 404, None, OPENAI),
        ("POST", "/v1/audio/speech", 404, None, OPENAI),
        ("GET", "/v1/completions", 405, "POST", OPENAI),
        ("GET", "/v1/chat/completions", 405, "POST", OPENAI),
        ("POST", "/v1/models", 405, "GET", OPENAI),
        ("DELETE", "/v1/models/a/b", 405, "GET", OPENAI),
        ("GET", "/v1/recommendations", 405, "POST", REST),
        ("POST", "/v1/bundle", 405, "GET", REST),
        ("GET", "/v2/models", 404, None, REST),
        ("GET", "/nowhere", 404, None, REST),
    ],
)
async def test_what_is_not_there_is_told_by_whose_it_is(
    http: httpx.AsyncClient, method: str, path: str, status: int, allowed: str | None, envelope: set[str]
) -> None:
    """Below /v1 by OpenAI's envelope, except on the REST door's own paths; a 405 says which methods there are."""
    answer = await http.request(method, path, headers={"x-request-id": "mine"})

    assert (answer.status_code, answer.headers.get("allow")) == (status, allowed)
    assert set(answer.json()["error"]) == envelope
    assert answer.headers["x-request-id"] == "mine"


async def test_the_openai_client_is_told_which_paths_there_are(live_url: str) -> None:
    """With OpenAI's type, by which clients tell it from a failure."""
    async with AsyncOpenAI(base_url=f"{live_url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError, match=r"/v1/models, .*/v1/chat/completions") as raised:
            await client.embeddings.create(model="parrot", input="a")

    assert (raised.value.type, raised.value.code) == ("invalid_request_error", "not_found")
