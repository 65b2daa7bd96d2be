"""Tenants at both doors: the calls that their keys open, and that no answer has another tenant's data."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from models.registry.bundle import Bundle
from models.registry.store import BundleStore
from services.contracts.access import Scope
from services.contracts.events import decode_interaction
from services.contracts.items import ItemState
from services.contracts.tenant import TenantState, scoped
from services.errors import DependencyUnavailable
from services.gateway.access.authorize import KeyedAccess
from services.gateway.access.tenants import StoredTenant, read_tenants, write_tenants
from services.gateway.records.answer import RefusalRecord
from services.gateway.records.metrics import AnswerMetrics
from services.gateway.request.names import NameResidency
from services.gateway.rest.door import create_rest_app
from services.gateway.text.tier import TextLimits
from services.observability.metrics import GatewayMetrics
from tests.support.engine.parrot import Parrot
from tests.support.gateway.fakes import FakeLlm
from tests.support.gateway.keys import bearer, stored_key
from tests.support.wait import until, until_answer
from tests.unit.gateway.clients import Door, RestClient, in_process
from tests.unit.gateway.world import (
    World,
    add_version,
    catalogue_of,
    keyed_access,
    let_write,
    make_world,
    publish,
    user,
)

TENANTS = ("acme", "bolt")
HISTORY = ("i00", "i01", "i02", "i03")
ASKED: dict[str, Any] = {"user_id": "long", "k": 2, "deadline_ms": 4_000}
SURFACES = """
[home]
k = 1
["acme/home"]
k = 3
["acme/secret"]
k = 4
["bolt/home"]
k = 2
"""


@pytest.fixture
def access(tmp_path: Path) -> KeyedAccess:
    """Keys of the default tenant (op), of two tenants, of a suspended, a deleted and an unknown tenant."""
    ended = {"paused": TenantState.SUSPENDED, "gone": TenantState.DELETED}
    keys = [stored_key("op", *Scope), stored_key("lost", *Scope, tenant="nobody")]
    keys += [stored_key(tenant, *Scope, tenant=tenant) for tenant in (*TENANTS, *ended)]
    tenants = [StoredTenant(id="acme", daily_quota=12, max_k=5), StoredTenant(id="bolt")]
    keys.append(stored_key("acme-app", Scope.RECOMMEND, tenant="acme"))
    tenants += [StoredTenant(id=tenant, state=state) for tenant, state in ended.items()]
    return keyed_access(tmp_path, *keys, tenants=tenants)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """A stack with a bundle of its own for each tenant, all with the same items and the same user ids."""
    root = tmp_path / "bundles"
    publish(root, "v1", catalogue_of())
    for tenant in TENANTS:
        add_version(root, f"{tenant}-v1", catalogue_of())
        BundleStore(root, f"{tenant}.default").promote(f"{tenant}-v1")
    (tmp_path / "surfaces.toml").write_text(SURFACES)
    llms = {
        f"{tenant}.default": FakeLlm([f"i{number:02}" for number in range(10, 20)], f"{tenant}-v1")
        for tenant in TENANTS
    }
    made = make_world(root, others=llms, surfaces_file=tmp_path / "surfaces.toml")
    for tenant in ("", *TENANTS):
        made.features.users[scoped(tenant, "long")] = user(*HISTORY)
    await made.plane.start()
    yield made
    await made.plane.stop()


async def test_each_tenant_is_answered_by_its_own_bundle(world: World, door: Door) -> None:
    """The same request gets each tenant's version, with the features of the tenant's own user."""
    del world.features.users[scoped("bolt", "long")]

    answers = [(await door.recommend(ASKED, bearer(key))).body for key in ("op", *TENANTS)]

    assert [answer["bundle_version"] for answer in answers] == ["v1", "acme-v1", "bolt-v1"]
    assert [answer["reason"] for answer in answers] == ["llm_in_time", "llm_in_time", "unknown_user"]
    assert world.others["acme.default"].requests[0].user_id == scoped("acme", "long")


async def test_events_are_recorded_under_the_tenant_s_user(world: World, door: Door) -> None:
    """The same user id of two tenants has two keys in the log, so no store ever joins them."""
    for key in ("op", "acme"):
        assert (await door.record([{"user_id": "u", "item_id": "i00"}], bearer(key))).code == "ok"

    assert [key for key, _ in world.events.records] == [b"u", b"acme\x1fu"]
    assert [decode_interaction(value).user_id for _, value in world.events.records] == ["u", "acme\x1fu"]


@pytest.mark.parametrize("sent", ["acme\x1fu", "\x1fu"])
async def test_no_caller_can_send_another_tenant_s_id(world: World, door: Door, sent: str) -> None:
    """The separator is a control character, which no field of a request may have."""
    recommended = await door.recommend({**ASKED, "user_id": sent}, bearer("op"))
    recorded = await door.record([{"user_id": sent, "item_id": "i00"}], bearer("bolt"))

    assert (recommended.code, recorded.code) == ("invalid_request", "invalid_request")
    assert world.events.records == []


async def test_surfaces_of_other_tenants_are_unknown(world: World, door: Door) -> None:
    """A tenant has the surfaces of its own prefix; errors name and suggest no other."""
    answers = [await door.recommend({"user_id": "long", "surface": "home"}, bearer(key)) for key in ("op", *TENANTS)]
    refused = [
        await door.recommend({"user_id": "long", "surface": name}, bearer(key))
        for key, name in (("op", "acme/home"), ("bolt", "acme/home"), ("bolt", "secret"), ("op", "acme.default"))
    ]

    assert [len(answer.body["items"]) for answer in answers] == [1, 3, 2]
    assert [(refusal.code, refusal.field) for refusal in refused] == [("invalid_request", "surface")] * 4
    assert not any("acme" in refusal.sent.replace("acme/home", "") for refusal in refused[1:3])


@pytest.mark.parametrize(
    ("key", "code"),
    [("gone", "unauthenticated"), ("lost", "unauthenticated"), ("paused", "not_allowed"), ("acme", "ok")],
)
async def test_a_key_is_worth_as_much_as_its_tenant(door: Door, key: str, code: str) -> None:
    """A deleted or unknown tenant's key is a wrong key; a suspended tenant's is refused."""
    assert (await door.recommend(ASKED, bearer(key))).code == code


@pytest.mark.parametrize(
    ("state", "code"), [(TenantState.SUSPENDED, "not_allowed"), (TenantState.DELETED, "unauthenticated")]
)
async def test_a_request_under_way_is_answered_when_its_tenant_is_no_longer_admitted(
    world: World, rest: RestClient, access: KeyedAccess, tmp_path: Path, state: TenantState, code: str
) -> None:
    """It was admitted; the tenant's next requests are refused within seconds."""
    llm, path = world.others["bolt.default"], tmp_path / "tenants.json"
    gate = llm.gate = asyncio.Event()
    await access.start()
    under_way = asyncio.create_task(rest.recommend({**ASKED, "deadline_ms": 40_000}, bearer("bolt")))
    await until(lambda: llm.requests)
    llm.gate = None
    write_tenants(path, read_tenants(path).with_changed("bolt", state=state))

    async def refused() -> str | None:
        return (await rest.recommend(ASKED, bearer("bolt"))).code

    await until_answer(refused, code.__eq__)
    gate.set()
    answer = await under_way
    await access.stop()

    assert (answer.code, answer.body["reason"], len(answer.body["items"])) == ("ok", "llm_in_time", 2)


async def test_a_tenant_is_deleted_while_its_name_is_loaded(tmp_path: Path) -> None:
    """The load ends, and other names load after it; the deleted catalogue is removed and does not return."""
    root, gate, begun = tmp_path / "bundles", Event(), Event()
    publish(root, "v1", catalogue_of())
    for tenant in TENANTS:
        add_version(root, f"{tenant}-v1", catalogue_of())
        BundleStore(root, f"{tenant}.default").promote(f"{tenant}-v1")

    def load_reader(bundle: Bundle, _catalogue: object) -> None:
        if bundle.version == "acme-v1":
            begun.set()
            gate.wait(30.0)

    llms = {f"{tenant}.default": FakeLlm(["i10"], f"{tenant}-v1") for tenant in TENANTS}
    residency = NameResidency(budget_bytes=None, min_stay_s=0.0, pinned=frozenset())
    world = make_world(root, others=llms, load_reader=load_reader, residency=residency)
    items, names = world.items.live_items, world.plane.names
    await world.plane.start()
    items.apply([(scoped("acme", "i10"), ItemState(item_id="i10", available=False))])
    with suppress(DependencyUnavailable):
        names.current("acme.default")
    await until(begun.is_set)
    items.apply([(scoped("acme", "i10"), None), (scoped("acme", ""), None)])
    gate.set()
    for tenant in TENANTS:
        with suppress(DependencyUnavailable):
            names.current(f"{tenant}.default")
        await until(lambda tenant=tenant: names.of(f"{tenant}.default").is_loaded)
    items.apply([(scoped("acme", "i11"), ItemState(item_id="i11", available=False))])
    await world.plane.stop()

    assert "acme" not in items.tenants


async def test_all_keys_of_a_tenant_share_its_limits(world: World, door: Door) -> None:
    """The daily quota and the most items of a tenant hold for its keys together, and for no other tenant."""
    too_many = await door.recommend({**ASKED, "k": 6}, bearer("acme"))
    keys = ["acme", *["acme-app"] * 10, "acme", "acme-app", "bolt"]
    codes = [(await door.recommend(ASKED, bearer(key))).code for key in keys]

    assert too_many.code == "invalid_request"
    assert codes == ["ok"] * 11 + ["quota_exceeded"] * 2 + ["ok"]


async def test_a_tenant_writes_text_by_the_shared_model(world: World, access: KeyedAccess) -> None:
    """The text model is for all tenants; a request carries its tenant and key, which keep cached prefixes apart."""
    parrot = Parrot()
    let_write(world, parrot, TextLimits(max_tokens=32, max_choices=4, deadline_ms=20_000))
    asked = {"model": "parrot", "prompt": "a river", "max_tokens": 4, "cache_salt": "s"}
    async with in_process(create_rest_app(lambda: world.plane, lambda: b"", 15_000, access=access)) as http:
        codes = [
            (await http.post("/v1/completions", json=asked, headers=bearer(key))).status_code
            for key in (*TENANTS, "acme-app")
        ]

    assert codes == [200, 200, 403]
    assert [request.tenant for request in parrot.requests] == [*TENANTS]
    assert len({request.cache_scope for request in parrot.requests}) == len(TENANTS)


async def test_a_page_token_is_worth_nothing_to_another_tenant(world: World, door: Door) -> None:
    """Neither the same user id nor an anonymous visitor of another tenant may send it."""
    for asked in (ASKED, {"recent_item_ids": ["i00"], "k": 2, "deadline_ms": 4_000}):
        token = (await door.recommend(asked, bearer("op"))).body["next"]
        again = [(await door.recommend({**asked, "next": token}, bearer(key))).code for key in ("bolt", "op")]

        assert again == ["invalid_request", "ok"]


async def test_an_explanation_belongs_to_its_tenant(world: World, rest: RestClient) -> None:
    """The same request id of two tenants has two explanations, each with the ids that its callers know."""
    for key in ("acme", "bolt"):
        await rest.recommend({**ASKED, "request_id": "r", "surface": "home"}, bearer(key))
    await world.plane.explanations.flush()

    responses = [await rest.http.get("/v1/explanations/r", headers=bearer(key)) for key in ("bolt", "acme", "op")]
    forged = await rest.http.get("/v1/explanations/acme%1Fr", headers=bearer("op"))

    assert [response.status_code for response in responses] == [200, 200, 404]
    assert forged.status_code in {404, 422, 400}
    bodies = [response.json() for response in responses[:2]]
    assert [body["bundle_version"] for body in bodies] == ["bolt-v1", "acme-v1"]
    assert {(body["request_id"], body["user_id"], body["surface"]) for body in bodies} == {("r", "long", "home")}


async def test_a_refused_request_is_explained_to_its_tenant_only(world: World, rest: RestClient) -> None:
    """A refusal too is kept under the caller's tenant."""
    await rest.recommend({**ASKED, "request_id": "bad", "surface": "none"}, bearer("bolt"))
    await world.plane.explanations.flush()

    responses = [await rest.http.get("/v1/explanations/bad", headers=bearer(key)) for key in ("op", "bolt")]

    assert [response.status_code for response in responses] == [404, 200]


async def test_a_call_beyond_a_quota_is_its_tenant_s(world: World, rest: RestClient) -> None:
    """A call that is refused before its body is read is explained, counted and audited as its own key's."""
    await rest.recommend({**ASKED, "request_id": "why"}, bearer("op"))
    for _ in range(12):
        await rest.recommend(ASKED, bearer("acme"))
    with capture_logs() as logs:
        refused = await rest.recommend(ASKED, {**bearer("acme"), "x-request-id": "why"})
        await rest.http.get("/v1/explanations/why", headers=bearer("acme"))
    await world.plane.explanations.flush()

    code, shelf = "quota_exceeded", world.shelf.records
    assert refused.code == code
    assert [code in str(shelf[key]) for key in ("why", scoped("acme", "why"))] == [False, True]
    counted = [
        world.metric("tailrace_tenant_requests_total", tenant=tenant, outcome=code) for tenant in ("operator", "acme")
    ]
    assert counted == [0, 1]
    assert [line["who"] for line in logs if line["event"] == "audit"] == ["acme"]


async def test_a_receipt_belongs_to_its_tenant(world: World, rest: RestClient) -> None:
    """An erasure covers the tenant's own user, and only the tenant can read its receipt."""
    erased = await rest.http.delete("/v1/users/long", headers=bearer("bolt"))
    receipt = f"/v1/erasures/{erased.json()['erasure_id']}"

    statuses = [(await rest.http.get(receipt, headers=bearer(key))).status_code for key in ("acme", "op", "bolt")]

    assert (erased.status_code, statuses) == (202, [404, 404, 200])
    assert world.events.records[0][0] == b"bolt\x1flong"


async def test_assignments_and_bundles_name_no_other_tenant(world: World, rest: RestClient) -> None:
    """A tenant sees its own surfaces and names, without its prefix; other names are unknown."""
    assigned = await rest.http.get("/v1/assignment", params={"user_id": "long"}, headers=bearer("bolt"))
    bundle = await rest.http.get("/v1/bundle", headers=bearer("bolt"))
    others = [
        await rest.http.get("/v1/bundle", params={"name": name}, headers=bearer(key))
        for key, name in (("bolt", "acme.default"), ("op", "acme.default"), ("bolt", "fr"))
    ]

    assert [(surface["surface"], surface["name"]) for surface in assigned.json()["surfaces"]] == [
        (None, "default"),
        ("home", "default"),
    ]
    assert (bundle.json()["name"], bundle.json()["version"]) == ("default", "bolt-v1")
    assert [response.status_code for response in others] == [422] * 3
    assert "acme" not in "".join(response.text.replace("acme.default", "") for response in others)


async def test_requests_are_counted_by_tenant(world: World, door: Door) -> None:
    """Each tenant has a series for each outcome, with a bound on the tenants; the default tenant is the operator."""
    for key in ("op", "acme", "acme"):
        await door.recommend(ASKED, bearer(key))
    await door.recommend({**ASKED, "surface": "none"}, bearer("bolt"))
    metrics = AnswerMetrics(GatewayMetrics(registry := CollectorRegistry()))
    for number in range(300):
        about = {"request_id": "r", "door": "rest", "code": "overloaded", "message": ""}
        metrics.refused(RefusalRecord(**about, now_ms=0, tenant=f"t{number}"))

    counted = [
        world.metric("tailrace_tenant_requests_total", tenant=tenant, outcome=outcome)
        for tenant, outcome in (("operator", "full"), ("acme", "full"), ("bolt", "invalid_request"))
    ]
    assert counted == [1, 2, 1]
    others = {"tenant": "(others)", "outcome": "overloaded"}
    assert registry.get_sample_value("tailrace_tenant_requests_total", others) == 101


async def test_calls_about_the_whole_stack_are_the_operator_s(rest: RestClient) -> None:
    """A tenant's key with every scope cannot read all metrics."""
    statuses = [(await rest.http.get("/metrics", headers=bearer(key))).status_code for key in ("op", "acme")]

    assert statuses == [200, 403]


async def test_impressions_carry_their_tenant(world: World, door: Door) -> None:
    """An impression belongs to the tenant of its user, or of the name that answered an anonymous visitor."""
    await door.recommend(ASKED, bearer("acme"))
    await door.recommend({"recent_item_ids": ["i00"], "k": 2}, bearer("bolt"))

    await until(lambda: len(world.impressions.records) == 2)
    impressions = [json.loads(value or b"") for _, value in world.impressions.records]

    assert [(impression.get("user_id"), impression["name"]) for impression in impressions] == [
        ("acme\x1flong", "acme.default"),
        (None, "bolt.default"),
    ]


async def test_popularity_of_a_tenant_comes_from_its_own_users(world: World, rest: RestClient) -> None:
    """Users per window are counted for each tenant separately, the default tenant included."""
    world.features.popular = [("i19", 900.0), (scoped("acme", "i18"), 900.0)]
    await world.plane.popular.refresh()

    first = [
        (await rest.http.get("/v1/popular", params={"k": 1}, headers=bearer(key))).json()["items"][0]["item_id"]
        for key in ("op", *TENANTS)
    ]

    assert first == ["i19", "i18", "i00"]


async def test_a_search_finds_the_tenant_s_own_items(world: World, door: Door) -> None:
    """A tenant's new item, and the title that it gives a known item, are in no search of another tenant."""
    for key, title in (("acme", "Zanzibar Nights"), ("bolt", "Quokka Days")):
        change = ItemState(item_id=scoped(key, "new"), title=title)
        world.items.live_items.apply([(scoped(key, "new"), change)])
    await world.plane.wishes.refresh()

    lists = {
        key: [
            [item["item_id"] for item in (await door.search(query, bearer(key), k=1)).body["items"]]
            for query in ("zanzibar", "quokka days")
        ]
        for key in ("op", *TENANTS)
    }

    assert [item_ids == ["new"] for item_ids in lists["acme"]] == [True, False]
    assert [item_ids == ["new"] for item_ids in lists["bolt"]] == [False, True]
    assert ["new"] not in lists["op"]


async def test_items_are_stated_per_tenant(world: World, rest: RestClient) -> None:
    """A tenant hides, states and deletes only its own items: the same ids of others are as they were."""
    hidden = await rest.http.patch("/v1/items/i10", json={"available": False}, headers=bearer("acme"))
    added = await rest.http.put("/v1/items/new", json={"title": "New"}, headers=bearer("bolt"))
    await rest.http.delete("/v1/items/i11", headers=bearer("acme"))

    statuses = {
        key: [
            (await rest.http.get(f"/v1/items/{item_id}", headers=bearer(key))).status_code for item_id in ("i11", "new")
        ]
        for key in ("op", *TENANTS)
    }
    shown = [[item["item_id"] for item in (await rest.recommend(ASKED, bearer(key))).body["items"]] for key in TENANTS]

    assert [hidden.json()["item_id"], added.json()["item_id"]] == ["i10", "new"]
    assert statuses == {"op": [200, 404], "acme": [404, 404], "bolt": [200, 200]}
    assert shown == [["i12", "i13"], ["i10", "i11"]]
    assert [key for key, _ in world.items.records] == [b"acme\x1fi10", b"bolt\x1fnew", b"acme\x1fi11"]
