"""Two tenants and the operator call every operation at both doors, on a real Valkey: nobody sees another's data."""

import asyncio
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from prometheus_client import generate_latest
from redis import Redis
from structlog.testing import capture_logs

from benchmarks.load.recommender_stub import RecommenderStub
from models.catalogue import Catalogue
from models.registry.store import BundleStore
from services.contracts import recommend_pb2 as pb
from services.contracts.access import Scope
from services.contracts.tenant import scoped
from services.features.erasing import RedisReceipts
from services.features.explanations import RedisExplanations
from services.features.rate_counts import RedisRateCounts
from services.gateway.access.authorize import KeyedAccess
from services.gateway.access.keyring import KeyRing
from services.gateway.access.keys import KeysFile, write_keys
from services.gateway.access.shared_rates import SharedRates
from services.gateway.access.tenants import FollowedTenants, StoredTenant, TenantsFile, write_tenants
from services.gateway.console.editor import add_editor
from services.gateway.console.releases import add_releases
from services.gateway.grpc.door import RpcDoor
from services.gateway.rest.door import create_rest_app
from services.gateway.text.tier import TextLimits
from services.settings.addresses import RedisAddress
from tests.support.engine.parrot import Parrot
from tests.support.gateway.fakes import FakeLlm
from tests.support.gateway.keys import bearer, stored_key
from tests.support.servers import HOST, Server
from tests.unit.gateway.clients import RestClient, RpcClient, in_process, rpc_channel
from tests.unit.gateway.world import MAX_BODY_BYTES, World, add_version, catalogue_of, let_write, make_world, user

TENANTS = ("acme", "bolt")
CALLERS = ("", *TENANTS)
NUM_ITEMS = 12
QUOTA = 30
MARKS = ("item", "title", "user", "req", "version", "place", "key")
SURFACES = "".join(f'["{tenant}/{tenant}place"]\nk = 2\n' for tenant in TENANTS)


def marked(tenant: str, what: str) -> str:
    """Return a text that only this caller's data has."""
    return f"{tenant or 'oper'}{what}"


def catalogue_for(tenant: str) -> Catalogue:
    """Return items whose ids and titles name their owner."""
    return replace(
        catalogue_of(NUM_ITEMS),
        item_ids=tuple(marked(tenant, f"item{index:02}") for index in range(NUM_ITEMS)),
        titles=tuple(marked(tenant, f"title {index}") for index in range(NUM_ITEMS)),
    )


class TenantsMachine(RuleBasedStateMachine):
    """The calls of three callers in any order, and the ids that each caller has made."""

    def __init__(self, valkey: Server, folder: Path) -> None:
        super().__init__()
        with Redis(host=HOST, port=valkey.port) as client:
            client.flushall()
        self.runner = asyncio.Runner()
        self.address = RedisAddress(host=HOST, port=valkey.port)
        self.made: dict[str, dict[str, list[str]]] = {caller: {} for caller in CALLERS}
        self.hidden: set[str] = set()
        self.calls: Counter[str] = Counter()
        self.number = 0
        folder.mkdir()
        self.folder = folder
        self.runner.run(self._start(folder))

    async def _start(self, folder: Path) -> None:
        for tenant in CALLERS:
            add_version(folder / "bundles", marked(tenant, "version"), catalogue_for(tenant))
            name = f"{tenant}.default" if tenant else "default"
            BundleStore(folder / "bundles", name).promote(marked(tenant, "version"))
        (folder / "surfaces.toml").write_text(SURFACES)
        llms = {caller: FakeLlm(catalogue_for(caller).item_ids[4:], marked(caller, "version")) for caller in CALLERS}
        self.shelf = RedisExplanations(self.address, 3_600, 10_000_000)
        ports = {"explanations": self.shelf, "receipts": RedisReceipts(self.address)}
        others = {f"{tenant}.default": llms[tenant] for tenant in TENANTS}
        self.world: World = make_world(
            folder / "bundles", others=others, ports=ports, surfaces_file=folder / "surfaces.toml"
        )
        let_write(self.world, Parrot(), TextLimits(max_tokens=32, max_choices=4, deadline_ms=20_000))
        self.world.llm.order = llms[""].order
        self.world.llm.version = marked("", "version")
        for tenant in CALLERS:
            ids = catalogue_for(tenant).item_ids[:4]
            self.world.features.users |= {
                scoped(tenant, user_id): user(*ids) for user_id in ("u", marked(tenant, "user"))
            }
        keys = [stored_key(marked(caller, "key"), *Scope, tenant=caller) for caller in CALLERS]
        write_keys(folder / "keys.json", KeysFile(keys=tuple(keys)))
        tenants = (StoredTenant(id="acme", daily_quota=QUOTA), StoredTenant(id="bolt"))
        write_tenants(folder / "tenants.json", TenantsFile(tenants=tenants))
        rates = SharedRates(RedisRateCounts(self.address), 1, timeout_s=5.0)
        self.access = KeyedAccess(KeyRing(folder / "keys.json", 100), FollowedTenants(folder / "tenants.json"), rates)
        await self.access.start()
        self.closing = await self._open_doors(self.access)
        await self.world.plane.start()

    async def _open_doors(self, access: KeyedAccess) -> list[Any]:
        app = create_rest_app(
            lambda: self.world.plane,
            lambda: generate_latest(self.world.registry),
            MAX_BODY_BYTES,
            access=access,
            tracing=None,
            echoes_request_id=True,
        )
        add_editor(app, lambda: self.world.plane)
        add_releases(app, BundleStore(self.folder / "bundles"), 10.0, lambda: 0.0)
        door = RpcDoor(lambda: self.world.plane, MAX_BODY_BYTES, access, None)
        opened = [in_process(app), rpc_channel(door)]
        self.rest = RestClient(await opened[0].__aenter__())
        self.rpc = RpcClient(await opened[1].__aenter__())
        return opened

    def teardown(self) -> None:
        """Stop everything."""

        async def stop() -> None:
            await self.world.plane.stop()
            await self.access.stop()
            for context in reversed(self.closing):
                await context.__aexit__(None, None, None)

        self.runner.run(stop())
        self.runner.close()

    # the operations

    @rule(
        caller=st.sampled_from(CALLERS),
        about=st.sampled_from(CALLERS),
        user_id=st.sampled_from(["u", "own", "theirs", "forged", "none"]),
        surface=st.booleans(),
        is_rpc=st.booleans(),
        token=st.booleans(),
        wish=st.booleans(),
    )
    def recommend(
        self, caller: str, about: str, user_id: str, *, surface: bool, is_rpc: bool, token: bool, wish: bool = False
    ) -> None:
        """Recommend with an own, another's or a forged id, surface and page token, and a wish for another's title."""
        self.number += 1
        asked: dict[str, Any] = {"k": 2, "deadline_ms": 4_000, "request_id": marked(caller, f"req{self.number}")}
        ids = {"u": "u", "own": marked(caller, "user"), "theirs": marked(about, "user"), "none": None}
        if (sent := ids.get(user_id, f"{about}\x1fu")) is not None:
            asked["user_id"] = sent
        if surface:
            asked["surface"] = f"{about}place"
        if wish:
            asked |= {"wish": marked(about, "title 3"), "session_wishes": [marked(about, "title 4")]}
        if token and (tokens := self.made[about].get("token")):
            asked["next"] = tokens[-1]
        client = self.rpc if is_rpc else self.rest
        reply = self.call(caller, asked, lambda: client.recommend(asked, bearer(marked(caller, "key"))))
        if reply.code == "ok":
            assert user_id != "forged"
            assert not surface or about == caller
            self.keep(caller, "req", asked["request_id"])
            self.keep(caller, "token", reply.body["next"])
            shown = [item["item_id"] for item in reply.body["items"]]
            assert all(item_id.startswith(marked(caller, "item")) for item_id in shown)
            assert not self.hidden.intersection(shown)

    @rule(caller=st.sampled_from(CALLERS), is_rpc=st.booleans())
    def batch(self, caller: str, *, is_rpc: bool) -> None:
        """Recommend for two users; the second request is invalid."""
        client = self.rpc if is_rpc else self.rest
        asked = {"requests": [{"user_id": "u", "k": 2, "deadline_ms": 4_000}, {"user_id": "x", "surface": "none"}]}
        self.call(caller, asked, lambda: client.batch(asked, bearer(marked(caller, "key"))), cost=2)

    @rule(caller=st.sampled_from(CALLERS), about=st.sampled_from(CALLERS), number=st.integers(0, NUM_ITEMS))
    def similar_popular_and_search(self, caller: str, about: str, number: int) -> None:
        """The lists without a user, about an own or another's item, at both doors."""
        item_id, title = marked(about, f"item{number:02}"), marked(about, f"title {number}")
        self.get(caller, f"/v1/items/{item_id}/similar", item_id, method="POST", json={"k": 2})
        self.get(caller, "/v1/popular?k=3")
        self.get(caller, f"/v1/search?q={title}", title, item_id)
        request = {"k": 2, "user_id": "u"}
        self.rpc_call(caller, "SimilarItems", pb.SimilarItemsRequest(item_ids=[item_id], request=request), item_id)
        self.rpc_call(caller, "Popular", pb.PopularRequest(request=request))
        self.rpc_call(caller, "Search", pb.SearchRequest(q=title, request=request), title)

    @rule(caller=st.sampled_from(CALLERS), about=st.sampled_from(CALLERS), is_rpc=st.booleans())
    def record(self, caller: str, about: str, *, is_rpc: bool) -> None:
        """Record an event on an own or another's item, tied to an own or another's request."""
        event = {"user_id": "u", "item_id": marked(about, "item01"), "request_id": self.last(about, "req")}
        client, before = self.rpc if is_rpc else self.rest, len(self.world.events.records)
        self.call(caller, event, lambda: client.record([event], bearer(marked(caller, "key"))))
        assert all(key == scoped(caller, "u").encode() for key, _ in self.world.events.records[before:])

    @rule(caller=st.sampled_from(CALLERS), about=st.sampled_from(CALLERS))
    def explain(self, caller: str, about: str) -> None:
        """Read the explanation of an own or another's request."""
        self.runner.run(self.world.plane.explanations.flush())
        request_id = self.last(about, "req")
        response = self.get(caller, f"/v1/explanations/{request_id}", request_id)
        if response.status_code != httpx.codes.TOO_MANY_REQUESTS:
            assert (response.status_code == httpx.codes.OK) == (caller == about and request_id != "nothing")

    @rule(caller=st.sampled_from(CALLERS), about=st.sampled_from(CALLERS), is_rpc=st.booleans())
    def erase_export_and_read_a_receipt(self, caller: str, about: str, *, is_rpc: bool) -> None:
        """Erase and export an own user, and read an own or another's receipt."""
        self.get(caller, "/v1/users/u/data")
        erasure_id = self.last(about, "erasure")
        is_own = caller == about and erasure_id != "nothing"
        if is_rpc:
            erased = self.rpc_call(caller, "EraseUser", pb.EraseUserRequest(user_id="u"))
            self.keep(caller, "erasure", erased.body.get("erasure_id"))
            read = self.rpc_call(caller, "GetErasure", pb.GetErasureRequest(erasure_id=erasure_id), erasure_id)
            assert read.code == "quota_exceeded" or (read.code == "ok") is is_own
            return
        sent = self.get(caller, "/v1/users/u", method="DELETE")
        if sent.status_code == httpx.codes.ACCEPTED:
            self.keep(caller, "erasure", sent.json()["erasure_id"])
        response = self.get(caller, f"/v1/erasures/{erasure_id}", erasure_id)
        if response.status_code != httpx.codes.TOO_MANY_REQUESTS:
            assert (response.status_code == httpx.codes.OK) is is_own

    @rule(
        caller=st.sampled_from(CALLERS),
        about=st.sampled_from(CALLERS),
        number=st.integers(4, 6),
        way=st.sampled_from(["PATCH", "PUT", "PUT many", "DELETE"]),
        is_rpc=st.booleans(),
    )
    def hide(self, caller: str, about: str, number: int, way: str, *, is_rpc: bool) -> None:
        """Hide or delete an own item, or an item by another's id, and read it."""
        item_id, path = marked(about, f"item{number:02}"), f"/v1/items/{marked(about, f'item{number:02}')}"
        hidden = pb.CatalogueItem(item_id=item_id, available=False)
        if is_rpc:
            calls: dict[str, tuple[str, Any]] = {
                "PATCH": ("PatchItem", pb.PatchItemRequest(changes=hidden)),
                "DELETE": ("DeleteItems", pb.DeleteItemsRequest(item_ids=[item_id])),
            }
            method, message = calls.get(way, ("PutItems", pb.PutItemsRequest(items=[hidden])))
            is_done = self.rpc_call(caller, method, message, item_id).code == "ok"
            self.rpc_call(caller, "GetItem", pb.GetItemRequest(item_id=item_id), item_id)
        else:
            state = {"available": False}
            body = {"PUT many": {"items": [{"item_id": item_id, **state}]}, "DELETE": None}.get(way, state)
            given = {} if body is None else {"json": body}
            sent_to = "/v1/items" if way == "PUT many" else path
            is_done = self.get(caller, sent_to, item_id, method=way.split(maxsplit=1)[0], **given).is_success
            self.get(caller, path, item_id)
        if is_done and caller == about:
            self.hidden.add(item_id)

    @rule(caller=st.sampled_from(CALLERS), about=st.sampled_from(CALLERS))
    def read_about_the_stack(self, caller: str, about: str) -> None:
        """Read assignments, bundles by any name, metrics and the console."""
        for path in ("/v1/assignment?user_id=u", "/v1/bundle"):
            self.get(caller, path, owner=caller)
        self.rpc_call(caller, "Assign", pb.AssignRequest(user_id="u"))
        self.get(caller, f"/v1/bundle?name={about}.default", f"{about}.default")
        for path in ("/metrics", "/console/names", "/console/items?find=t", "/console/surfaces"):
            response = self.get(caller, path, owner=caller or None)
            assert not caller or response.status_code in {403, 429}

    @rule(caller=st.sampled_from(CALLERS), is_chat=st.booleans())
    def write_text(self, caller: str, *, is_chat: bool) -> None:
        """Complete an own prompt by the shared text model."""
        prompt = marked(caller, "title 1")
        asked = {"messages": [{"role": "user", "content": prompt}]} if is_chat else {"prompt": prompt}
        body = {"model": "parrot", "max_tokens": 4, **asked}
        self.get(caller, f"/v1/{'chat/' if is_chat else ''}completions", method="POST", json=body)
        for path in ("/v1/models", "/v1/models/parrot"):
            self.get(caller, path)

    @invariant()
    def metrics_have_no_ids(self) -> None:
        """No user, item, request or title is in a metric."""
        text = generate_latest(self.world.registry).decode()
        assert not any(marked(caller, what) in text for caller in CALLERS for what in ("user", "item", "req", "title"))

    # how they are made

    def keep(self, caller: str, what: str, value: str | None) -> None:
        """Remember what a caller got."""
        if value:
            self.made[caller].setdefault(what, []).append(value)

    def last(self, caller: str, what: str) -> str:
        """Return the last value of a caller; "nothing" without one."""
        return self.made[caller].get(what, ["nothing"])[-1]

    def get(self, caller: str, path: str, *sent: str, owner: str | None = "", method: str = "GET", **given: Any) -> Any:
        """Call the REST door, and check the answer."""

        async def ask() -> httpx.Response:
            return await self.rest.http.request(method, path, headers=bearer(marked(caller, "key")), **given)

        with capture_logs() as lines:
            response = self.runner.run(ask())
        if response.status_code != httpx.codes.FORBIDDEN:  # a call that the caller may not make uses no quota
            self.count(caller, response.status_code == httpx.codes.TOO_MANY_REQUESTS, 1)
        if owner is not None:
            self.check(caller, f"{sorted(response.headers.items())} {response.text} {lines}", [*sent, path])
        return response

    def call(self, caller: str, sent: dict[Any, Any], ask: Any, cost: int = 1) -> Any:
        """Call either door by its client, and check the answer."""
        with capture_logs() as lines:
            reply = self.runner.run(ask())
        self.count(caller, reply.code == "quota_exceeded", cost)
        self.check(caller, f"{reply} {lines}", [str(value) for value in sent.values()])
        return reply

    def rpc_call(self, caller: str, method: str, message: Any, *sent: str) -> Any:
        """Call a method of the gRPC door, and check the answer."""
        stub, headers = RecommenderStub(self.rpc.channel), bearer(marked(caller, "key"))
        return self.call(caller, dict(enumerate(sent)), lambda: self.rpc.call(getattr(stub, method), message, headers))

    def count(self, caller: str, is_refused: bool, cost: int) -> None:
        """Only the tenant's own calls use up its quota."""
        if is_refused:
            assert caller == "acme"
            assert self.calls[caller] + cost > QUOTA
        else:
            self.calls[caller] += cost
            assert caller != "acme" or self.calls[caller] <= QUOTA

    def check(self, caller: str, text: str, sent: list[str]) -> None:
        """An answer and its log lines contain another caller's data only where the request sent it."""
        for value in sorted(sent, key=len, reverse=True):
            text = text.replace(value, "").replace(json.dumps(value)[1:-1], "")
        for other in CALLERS:
            if other != caller:
                marks = [mark for mark in MARKS if marked(other, mark) in text]
                assert not marks, (other, marks, text)
                assert not other or f"{other}\x1f" not in text


def test_no_caller_sees_another_s_data(valkey: Server, tmp_path: Path) -> None:
    """Any order of all calls, at both doors, with own and others' ids, tokens and names."""
    folders = iter(tmp_path / f"{number}" for number in range(10_000))
    quick = settings(max_examples=5, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck))

    run_state_machine_as_test(lambda: TenantsMachine(valkey, next(folders)), settings=quick)


def test_each_operation_succeeds_for_its_owner_and_shows_its_marks(valkey: Server, tmp_path: Path) -> None:
    """The machine calls what works, and its check would see a leak."""
    machine = TenantsMachine(valkey, tmp_path / "one")
    try:
        machine.recommend("bolt", "bolt", "own", surface=True, is_rpc=True, token=False)
        machine.runner.run(machine.world.plane.explanations.flush())
        item, erased = "/v1/items/boltitem05", machine.get("bolt", "/v1/users/u", method="DELETE")
        responses = [
            machine.get("bolt", f"/v1/explanations/{machine.last('bolt', 'req')}"),
            machine.get("bolt", f"/v1/erasures/{erased.json()['erasure_id']}"),
            machine.get("bolt", "/v1/users/u/data"),
            machine.get("bolt", "/v1/assignment?user_id=u"),
            machine.get("bolt", "/v1/bundle"),
            machine.get("bolt", "/v1/popular?k=3"),
            machine.get("bolt", "/v1/search?q=title+3"),
            machine.get("bolt", f"{item}/similar", method="POST", json={"k": 2}),
            machine.get("bolt", item, method="PATCH", json={"available": False}),
            machine.get("bolt", item, method="PUT", json={"available": False}),
            machine.get("bolt", "/v1/items", method="PUT", json={"items": [{"item_id": "boltitem06"}]}),
            machine.get("bolt", item),
            machine.get("bolt", "/v1/models"),
            machine.get("bolt", "/v1/completions", method="POST", json={"model": "parrot", "prompt": "bolt"}),
            machine.get("bolt", item, method="DELETE"),
        ]
        with pytest.raises(AssertionError):
            machine.check("acme", responses[5].text, [])
    finally:
        machine.teardown()

    assert [
        (str(response.url), response.status_code) for response in responses if response.status_code != httpx.codes.OK
    ] == []
    assert machine.made["bolt"]["token"]
