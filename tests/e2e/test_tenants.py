"""A whole stack that two tenants and the operator share: tokens of a real provider, memory for models, deletion."""

import time
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest

from benchmarks.many.scan import traces_of
from models.registry.store import BundleStore
from services.contracts import recommend_pb2 as pb
from services.contracts.tenant import scoped
from services.llm.engine.config import EngineConfig
from services.llm.ranking.shared_engines import engine_for
from tests.support.gateway.keys import bearer
from tests.support.gateway.oidc_provider import Provider
from tests.support.stacks.stack import Stack, admitted
from tests.support.wait import wait_for

ALL = "recommend events items erase"
CLAIMS: dict[str, dict[str, Any]] = {
    "shop": {"tenant": "acme", "scope": ALL},
    "rival": {"tenant": "bolt", "scope": ALL},
    "viewer": {"tenant": "acme", "scope": "events"},
    "chief": {"tenant": "operator", "scope": f"{ALL} admin"},
}
NAMES = ("default", "acme.default", "bolt.default")
DEADLINE_MS = 4_000


@pytest.fixture(scope="module")
def provider(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Provider]:
    """A running provider."""
    with Provider(tmp_path_factory.mktemp("provider"), CLAIMS) as made:
        yield made


@pytest.fixture(scope="module")
def shared(stack: Stack, provider: Provider, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack of two tenants, with memory for two of three names, both pinned. The names share the decoder's memory."""
    folder = tmp_path_factory.mktemp("shared")
    trained = BundleStore(stack.settings.bundle_root).live()
    size = engine_for(trained, EngineConfig(), 4).size
    own = Stack(
        folder / "state",
        names=",".join(NAMES),
        resident=",".join(NAMES[:2]),
        llm_memory_gib=(size.total + 1.5 * size.own) / 2**30,
        api_keys_file=folder / "keys.json",
        tenants_file=folder / "tenants.json",
        oidc_issuer=provider.url,
        oidc_audience="tailrace",
    )
    store = BundleStore(own.settings.bundle_root)
    about = {name: value for name, value in trained.manifest.items() if name not in {"version", "files"}}
    for number, name in enumerate(NAMES):
        store.publish(trained.path, f"v{number}", about)
        store.named(name).promote(f"v{number}")
    own.api_key = own.new_key("ops", *ALL.split(), "admin")
    for tenant in ("acme", "bolt"):
        assert own.command("tenants", "new", tenant).returncode == 0
    own.start()
    yield own
    own.close()


def ask(stack: Stack, token: str, **body: Any) -> httpx.Response:
    """Request a recommendation over REST."""
    asked = {"user_id": "u", "k": 3, "deadline_ms": DEADLINE_MS, **body}
    return admitted(lambda: stack.rest.post("/v1/recommendations", json=asked, headers=bearer(token)))


def ask_rpc(stack: Stack, token: str) -> pb.RecommendResponse:
    """Request a recommendation over gRPC."""
    request = pb.RecommendRequest(user_id="u", k=3, deadline_ms=DEADLINE_MS)
    answer: pb.RecommendResponse = stack.rpc.Recommend(request, metadata=[*bearer(token).items()])
    return answer


def test_a_token_opens_both_doors_for_its_tenant_and_scopes(shared: Stack, provider: Provider) -> None:
    """Behind the edge, the tenant of a token decides the bundle, and its scopes the calls, at REST and gRPC."""
    tokens = {sub: provider.token(sub) for sub in CLAIMS}
    versions = {
        sub: (ask(shared, tokens[sub]).json()["bundle_version"], ask_rpc(shared, tokens[sub]).bundle_version)
        for sub in ("shop", "rival", "chief")
    }
    with pytest.raises(grpc.RpcError) as refused:
        ask_rpc(shared, tokens["viewer"])
    metrics = [shared.rest.get("/metrics", headers=bearer(tokens[sub])).status_code for sub in ("chief", "shop")]

    assert versions == {"shop": ("v1", "v1"), "rival": ("v2", "v2"), "chief": ("v0", "v0")}
    assert ask(shared, tokens["viewer"]).status_code == 403
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert metrics == [200, 403]


def test_rotated_keys_of_the_provider_are_read_without_a_restart(shared: Stack, provider: Provider) -> None:
    """A token by a new key is admitted in seconds at every gateway and door; one by the old key no more."""
    old = provider.token("shop")
    provider.kill()
    while_away = ask(shared, old).status_code
    provider.start()
    new = provider.token("shop")

    wait_for(lambda: all(ask(shared, new).status_code == 200 for _ in range(8)), 60.0, "the new key at REST")
    assert ask_rpc(shared, new).bundle_version == "v1"
    assert while_away == 200
    wait_for(lambda: all(ask(shared, old).status_code == 401 for _ in range(8)), 60.0, "the end of the old key")


def test_a_name_without_room_is_answered_and_the_operator_sees_it(shared: Stack, provider: Provider) -> None:
    """Pinned names are in memory; the third is answered by another tier, and metric, log and command say why."""
    rival, token = {"part": "llm", "name": "bolt.default"}, provider.token("rival")
    visitor = {"user_id": None, "recent_item_ids": ["50", "181", "174"]}

    def listed_failure() -> str:
        """Ask for the name's model, and return the list if it says that the name cannot be loaded."""
        ask(shared, token, **visitor)
        listed = shared.command("bundles", "list", "--resident").stdout
        return listed if "cannot be loaded" in listed else ""

    listed = wait_for(listed_failure, 90.0, "the listed failure")
    answers = [ask(shared, token, **visitor).json() for _ in range(3)]
    held = {name: shared.metric("tailrace_model_resident_bytes", part="llm", name=name) for name in NAMES}
    console = shared.rest.get("/console/models", headers=bearer(shared.api_key)).text
    refusals = shared.log_lines(event="model_refused", name="bolt.default")

    assert all(name in console for name in NAMES)
    assert {answer["tier"] for answer in answers} <= {"student", "popular"}
    assert [bool(held[name]) for name in NAMES] == [True, True, False]
    assert sum(held.values()) <= (shared.settings.llm_memory_gib or 0) * 2**30
    assert shared.metric("tailrace_model_load_failed", **rival) >= 1
    assert "pinned names take" in refusals[0]["error"]
    rows = [line.split() for line in listed.splitlines()]
    assert [row[-3:] for row in rows if row[:1] == ["llm"] and "bolt.default" in row] == [["cannot", "be", "loaded"]]


def test_a_deleted_tenant_is_in_no_store_and_the_other_is(shared: Stack, provider: Provider) -> None:
    """After events, answers, explanations, items and an export, a scan of every store finds no id of the tenant."""
    made = {sub: use_everything(shared, provider.token(sub), sub) for sub in ("shop", "rival")}
    for sub, tenant in (("shop", "acme"), ("rival", "bolt")):
        own = scoped(tenant, made[sub])
        wait_for(lambda own=own: traces_of(shared.settings, own), 60.0, f"the stores of {tenant}")

    deleted = wait_for(
        lambda: "is deleted" in (out := shared.command("tenants", "delete", "acme", "--yes").stdout) and out,
        300.0,
        "the deletion",
    )
    refused = ask(shared, provider.token("shop")).status_code

    assert "nothing of it is left" in deleted
    assert refused == 401
    assert traces_of(shared.settings, made["shop"]) == []
    assert traces_of(shared.settings, "acme\x1f") == []
    assert traces_of(shared.settings, scoped("bolt", made["rival"]))
    assert ask(shared, provider.token("rival"), user_id=made["rival"]).status_code == 200


def use_everything(stack: Stack, token: str, sub: str) -> str:
    """Call each operation that stores something, as a user of this id, and return the id."""
    user_id, headers = f"{sub}-user-4711", bearer(token)
    rest = stack.rest

    def sent(method: str, path: str, **given: Any) -> httpx.Response:
        reply = admitted(lambda: rest.request(method, path, headers=headers, **given))
        assert reply.status_code in {200, 202}, reply.text
        return reply

    for item_id in ("50", "181", "174"):
        event = {"user_id": user_id, "item_id": item_id, "event_time_ms": int(time.time() * 1_000)}
        sent("POST", "/v1/events", json=event)
    sent("PUT", "/v1/items/4711-item", json={"title": "Own", "categories": ["Comedy"], "available": True})
    sent("PATCH", "/v1/items/50", json={"available": False})
    wait_for(
        lambda: ask(stack, token, user_id=user_id).json()["newest_event_time_ms"], 60.0, "an answer from the history"
    )
    sent("POST", "/v1/recommendations:batch", json={"requests": [{"user_id": user_id}, {"session_id": "visit"}]})
    sent("POST", "/v1/items/181/similar", json={"user_id": user_id, "k": 2})
    sent("GET", "/v1/search", params={"q": "star", "user_id": user_id})
    sent("GET", f"/v1/users/{user_id}/data")
    erasure_id = sent("DELETE", f"/v1/users/{user_id}-gone").json()["erasure_id"]
    sent("GET", f"/v1/erasures/{erasure_id}")
    return user_id
