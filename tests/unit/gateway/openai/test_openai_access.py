"""The OpenAI door with keys: the scope text, the scope recommend for the recommender, and refusals in OpenAI's words."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.contracts.access import Priority, Scope
from services.gateway.access.authorize import KeyedAccess
from services.gateway.access.keyring import KeyRing
from services.gateway.access.keys import KeysFile, StoredHash, StoredKey, hash_of, write_keys
from services.gateway.access.rates import Rates
from services.gateway.rest.door import create_rest_app
from tests.support.parrot import MODEL, Parrot
from tests.unit.gateway.world import MAX_BODY_BYTES, World


def stored(key_id: str, *scopes: Scope, **fields: Any) -> StoredKey:
    """A key whose text is its id."""
    hashes = (StoredHash(sha256=hash_of(key_id), expires_at=None),)
    return StoredKey(id=key_id, hashes=hashes, scopes=frozenset(scopes), **fields)


KEYS = KeysFile(
    keys=(
        stored("writer", Scope.TEXT, priority=Priority.LOW),
        stored("both", Scope.TEXT, Scope.RECOMMEND, max_k=2),
        stored("shop", Scope.RECOMMEND),
        stored("daily", Scope.TEXT, daily_quota=1),
    )
)
TEXT = {"model": MODEL, "prompt": "a b"}
RANKED = {"model": "tailrace-recommender", "prompt": "i00 i01", "n": 2}


@pytest.fixture
async def http(texts: World, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """The door with keys."""
    path = tmp_path / "keys.json"
    write_keys(path, KEYS)
    access = KeyedAccess(KeyRing(path, 100), Rates())
    app = create_rest_app(lambda: texts.plane, lambda: b"", MAX_BODY_BYTES, access=access)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://door") as client:
        yield client


TABLE: list[tuple[str | None, dict[str, Any], int, str | None]] = [
    (None, TEXT, 401, "authentication_error"),
    ("nonsense", TEXT, 401, "authentication_error"),
    ("shop", TEXT, 403, "permission_error"),
    ("writer", TEXT, 200, None),
    ("writer", RANKED, 403, "permission_error"),
    ("shop", RANKED, 403, "permission_error"),
    ("both", RANKED, 200, None),
    ("both", {**RANKED, "n": 3}, 400, "invalid_request_error"),
]


@pytest.mark.parametrize(("key", "body", "status", "kind"), TABLE)
async def test_the_table(
    http: httpx.AsyncClient, key: str | None, body: dict[str, Any], status: int, kind: str | None
) -> None:
    """Text needs the scope text; ranked choices need recommend beside it, and mind the key's most items."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}

    answer = await http.post("/v1/completions", json=body, headers=headers)

    assert answer.status_code == status
    assert answer.json().get("error", {}).get("type") == kind


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/parrot"])
@pytest.mark.parametrize(("key", "status"), [(None, 401), ("shop", 403), ("writer", 200)])
async def test_the_list_of_models_needs_the_scope_too(
    http: httpx.AsyncClient, path: str, key: str | None, status: int
) -> None:
    """What is served is not everybody's business."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}

    assert (await http.get(path, headers=headers)).status_code == status


async def test_a_used_up_quota_is_a_429_with_the_time(http: httpx.AsyncClient) -> None:
    """In the words by which the openai client waits."""
    headers = {"authorization": "Bearer daily"}
    first = await http.post("/v1/completions", json=TEXT, headers=headers)
    again = await http.post("/v1/completions", json=TEXT, headers=headers)

    assert (first.status_code, again.status_code) == (200, 429)
    assert int(again.headers["retry-after"]) > 0
    assert again.json()["error"]["code"] == "rate_limit_exceeded"


async def test_a_refusal_comes_before_the_body_is_read(http: httpx.AsyncClient, parrot: Parrot) -> None:
    """Without a key the body is not judged."""
    answer = await http.post("/v1/completions", content=b"{")

    assert (answer.status_code, parrot.asked) == (401, [])


async def test_the_keys_priority_goes_along(http: httpx.AsyncClient, parrot: Parrot) -> None:
    """The engine's queue sees it."""
    await http.post("/v1/completions", json=TEXT, headers={"authorization": "Bearer writer"})

    assert parrot.asked[0].priority == Priority.LOW


async def test_health_is_open(http: httpx.AsyncClient) -> None:
    """GuideLLM asks it before anything else, and may have no key then."""
    assert (await http.get("/health")).status_code == 200
