"""The installable client, sync and async, over REST and gRPC, through a proxy to the real doors."""

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.rpc import error_details_pb2, status_pb2
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from benchmarks.faults.tcp_proxy import TcpProxy, Wire
from services.contracts.access import Scope
from services.contracts.erasure import Erasure, ErasureStore, decode_record
from services.errors import DependencyUnavailable, Overloaded
from services.gateway.grpc.door import RpcDoor, add_recommender_to_server
from services.gateway.rest.door import create_rest_app
from tailrace_client import (
    AsyncClient,
    CallOptions,
    CatalogueItem,
    Client,
    Event,
    Explanation,
    Recommendation,
    SurfaceAssignment,
    TailraceError,
)
from tailrace_client.rpc import _refusal as refusal_of
from tests.support.gateway.keys import stored_key
from tests.support.servers import HOST, free_port
from tests.support.wait import until
from tests.unit.gateway.openai.conftest import serve
from tests.unit.gateway.world import MAX_BODY_BYTES, NOW_S, VERSION, World, keyed_access, started_world

KEY = "shop"


class Blocking:
    """The synchronous client; each call runs in a thread."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        return functools.partial(asyncio.to_thread, getattr(self._client, name))


@dataclass
class Case:
    """One kind of client and the server behind it."""

    world: World
    wire: TcpProxy
    client: Any
    scheme: str


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with started_world(tmp_path) as made:
        yield made


@pytest.fixture
async def ports(world: World, tmp_path: Path) -> AsyncIterator[dict[str, int]]:
    """The ports of both doors, which require a key."""
    access = keyed_access(tmp_path, stored_key(KEY, *Scope))
    server = grpc.aio.server()
    add_recommender_to_server(RpcDoor(lambda: world.plane, MAX_BODY_BYTES, access), server)
    rpc_port = server.add_insecure_port(f"{HOST}:0")
    await server.start()
    app = create_rest_app(lambda: world.plane, lambda: b"", MAX_BODY_BYTES, access=access, echoes_request_id=True)
    async for url in serve(app):
        yield {"http": int(url.rpartition(":")[2]), "grpc": rpc_port}
    await server.stop(None)


@pytest.fixture(params=["http-async", "http-sync", "grpc-async", "grpc-sync"])
async def case(request: pytest.FixtureRequest, world: World, ports: dict[str, int]) -> AsyncIterator[Case]:
    """Each kind of client in turn."""
    scheme, kind = request.param.split("-")
    async with TcpProxy(HOST, free_port(), ports[scheme]) as wire:
        address = f"{scheme}://{HOST}:{wire.port}"
        async with AsyncClient(address, api_key=KEY) as client:
            with Client(address, api_key=KEY) as blocking:
                yield Case(world, wire, client if kind == "async" else Blocking(blocking), scheme)


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_a_key_that_no_header_can_have_is_refused_at_once(scheme: str) -> None:
    """A key that was read from a file may end with a line feed; within it, only what `tailrace keys new` prints."""
    for kind in (Client, AsyncClient):
        for key in ("schl\u00fcssel", "a\nb"):
            with pytest.raises(ValueError, match="api_key"):
                kind(f"{scheme}://{HOST}:1", api_key=key)
    Client(f"{scheme}://{HOST}:1", api_key="key\n").close()


async def refusals(call: str, *arguments: Any, **options: Any) -> list[TailraceError]:
    """Return each kind of client's error for this call to an unreachable server."""
    errors = []
    for address in (f"http://{HOST}:1", f"grpc://{HOST}:1"):
        async with AsyncClient(address) as client:
            with Client(address) as blocking:
                calls = (getattr(caller, call)(*arguments, **options) for caller in (client, Blocking(blocking)))
                errors += [await refused(call) for call in calls]
    return errors


async def refused(call: Awaitable[Any]) -> TailraceError:
    """Return the error of a call."""
    with pytest.raises(TailraceError) as error:
        await call
    return error.value


async def test_lists_are_the_same_through_every_client(case: Case) -> None:
    """Batches, similar and popular items are the same through every client, and options reach the server."""
    batch = await case.client.recommend_batch(["long", {"user_id": "a", "k": 0}], k=2, deadline_ms=5_000)
    similar = await case.client.similar("i05", k=2, categories=["even"], deadline_ms=5_000)
    cart = await case.client.similar(["i05", "i06"], "long", k=2, deadline_ms=5_000)
    popular = await case.client.popular("1h", "odd", k=2, deadline_ms=5_000)
    unknown = await refused(case.client.similar("a/b", deadline_ms=5_000))

    assert [item.item_id for item in batch[0].items] == ["i04", "i05"]
    assert (batch[1].code, batch[1].field, bool(batch[1].request_id)) == ("invalid_request", "k", True)
    assert [[item.item_id for item in answer.items] for answer in (similar, cart)] == [["i06", "i08"], ["i07", "i08"]]
    assert ([item.item_id for item in popular.items], popular.tier) == (["i01", "i03"], "popular")
    assert (unknown.code, "a/b" in unknown.message) == ("not_found", True)


@pytest.mark.parametrize("item_id", [".", ".."])
async def test_a_dot_is_an_id_and_no_step_to_another_path(case: Case, item_id: str) -> None:
    """. and .. cannot be HTTP path segments, so the HTTP client rejects them; over gRPC they are ordinary ids."""
    calls = (case.client.similar(item_id), case.client.delete_item(item_id), case.client.erase_user(item_id))
    errors = [await refused(call) if case.scheme == "http" else await one_of(call) for call in calls]

    if case.scheme == "http":
        assert [(error.code, error.field) for error in errors] == [
            ("invalid_request", name) for name in ("item_id", "item_id", "user_id")
        ]
    else:
        assert errors == ["not_found", "ok", "ok"]
    sent = [*case.world.items.records, *case.world.events.records]
    assert [key for key, _ in sent] == ([] if case.scheme == "http" else [item_id.encode()] * 2)


async def one_of(call: Awaitable[Any]) -> str:
    """Return the code of a call's error, or ok."""
    try:
        await call
    except TailraceError as error:
        return error.code
    return "ok"


async def test_who_gets_what_is_the_same_through_every_client(case: Case) -> None:
    """A user and a session have assignments; the server rejects a call without either."""
    user, session = await case.client.assignment("long"), await case.client.assignment(session_id="s")
    nobody = await refused(case.client.assignment())

    own = SurfaceAssignment(surface=None, name="default", bundle_version=VERSION, is_canary=False, variants={})
    assert [user.surfaces, session.surfaces] == [(own,), (own,)]
    assert (nobody.code, nobody.field) == ("invalid_request", "user_id")


async def test_both_doors_give_the_same_answer(case: Case) -> None:
    """Items have scores, and the answer has tier, reason, bundle, request id and stages; options reach the server."""
    answer = await case.client.recommend("long", k=3, deadline_ms=5_000, categories=["even"], exclude_item_ids=("i04",))

    assert isinstance(answer, Recommendation)
    assert (answer.items[0].item_id, answer.items[0].title, answer.items[0].source) == ("i06", "Item 6", "llm")
    assert [int(item.item_id[1:]) % 2 for item in answer.items] == [0, 0, 0]
    assert (answer.tier, answer.reason, answer.bundle_version) == ("llm", "llm_in_time", VERSION)
    assert (answer.num_attempts, answer.deadline_ms <= 5_000, answer.feature_age_ms) == (1, True, 5_000)
    assert {"features", "rank"} <= answer.stages_ms.keys()
    stranger = await case.client.recommend(recent_item_ids=["i00"], request_id="mine", deadline_ms=5_000)
    assert (stranger.request_id, stranger.newest_event_time_ms) == ("mine", None)


async def test_errors_are_the_same_over_both_doors(case: Case) -> None:
    """Errors have code, field, fix, request id and retry time; an error that a retry cannot fix is sent once."""
    wrong = await refused(case.client.recommend("long", k=0))
    case.world.events.error = Overloaded("events", 2.0)
    busy = await refused(case.client.record(Event("u", "i00"), deadline_ms=1_900))
    case.world.events.error = DependencyUnavailable("broker", 2.0)
    unavailable = await refused(case.client.record(Event("u", "i00"), deadline_ms=1_900))
    async with AsyncClient(f"{case.scheme}://{HOST}:{case.wire.port}") as nobody:
        unknown = await refused(nobody.recommend("long"))

    assert (wrong.code, wrong.field, wrong.fix) == ("invalid_request", "k", "send 1 to 2000")
    assert (wrong.message, wrong.num_attempts) == ("0 is out of range", 1)
    assert len(wrong.request_id or "") == 32
    assert (busy.code, busy.retry_after_s, busy.num_attempts) == ("overloaded", 2.0, 1)
    assert (unavailable.code, unavailable.retry_after_s, unavailable.num_attempts) == ("unavailable", 2.0, 1)
    assert unknown.code == "unauthenticated"


@pytest.mark.parametrize(
    ("options", "field", "expected"),
    [
        ({"user_id": 196}, "user_id", "a str"),
        ({"k": "ten"}, "k", "an int"),
        ({"k": True}, "k", "an int"),
        ({"k": 2.5}, "k", "an int"),
        ({"k": 2**40}, "k", "an int of at most 32 bits"),
        ({"recent_item_ids": "i00"}, "recent_item_ids", "a list of str"),
        ({"exclude_item_ids": 7}, "exclude_item_ids", "a list of str"),
        ({"exclude_item_ids": ["i00", 7]}, "exclude_item_ids[1]", "a str"),
        ({"exclude_item_ids": ["\ud800"]}, "exclude_item_ids[0]", "a str"),
        ({"exclude_seen": "no"}, "exclude_seen", "a bool"),
        ({"categories": "even"}, "filters.categories", "a list of str"),
        ({"allowed_item_ids": [None]}, "filters.allowed_item_ids[0]", "a str"),
        ({"rationale": 1}, "rationale", "a bool"),
        ({"request_id": 5}, "request_id", "a str"),
        ({"categories": []}, "filters.categories", ""),  # over gRPC an empty list equals an absent list: all pass
        ({"allowed_item_ids": []}, "filters.allowed_item_ids", ""),
        ({"deadline_ms": "soon"}, "deadline_ms", "a number"),
        ({"deadline_ms": float("nan")}, "deadline_ms", "a number"),
        ({"deadline_ms": 10**12}, "deadline_ms", "a number"),
    ],
)
async def test_a_value_of_a_wrong_type_is_named_before_anything_is_sent(
    options: dict[str, Any], field: str, expected: str
) -> None:
    """The error names the field and its type, the same over both doors."""
    for error in await refusals("recommend", **{"user_id": "long", **options}):
        assert (error.code, error.field, error.num_attempts) == ("invalid_request", field, 0)
        assert expected in (error.fix or "")


@pytest.mark.parametrize(
    ("events", "field", "expected"),
    [
        ({"user_id": "u", "item_id": "i00"}, "events", "Event"),
        ([{"user_id": "u", "item_id": "i00"}], "events[0]", "Event"),
        (7, "events", "Event"),
        ([Event("u", "i00"), Event("u", 7)], "events[1].item_id", "a str"),
        (Event(7, "i00"), "events[0].user_id", "a str"),
        (Event("u", "i00", event_type=1), "events[0].event_type", "a str"),
        (Event("u", "i00", event_id=None), "events[0].event_id", "a str"),
        (Event("u", "i00", event_time_ms=1.5), "events[0].event_time_ms", "an int"),
        (Event("u", "i00", value="much"), "events[0].value", "a number"),
        (Event("u", "i00", value=10**400), "events[0].value", "a number"),
        (Event("u", "i00", event_id=7), "events[0].event_id", "a str"),
    ],
)
async def test_an_event_of_a_wrong_type_is_named_before_anything_is_sent(
    events: Any, field: str, expected: str
) -> None:
    """The error names the event's index and field."""
    for error in await refusals("record", events):
        assert (error.code, error.field, error.num_attempts) == ("invalid_request", field, 0)
        assert expected in (error.fix or "")


async def test_values_that_are_as_good_are_taken(case: Case) -> None:
    """NumPy numbers and any iterable of ids are accepted; events of unknown items are recorded and reported."""
    answer = await case.client.recommend(
        "long", k=np.int64(2), exclude_item_ids=(f"i{number:02}" for number in (4, 5)), deadline_ms=np.float32(5_000)
    )
    measured = Event("u", "i00", value=np.float32(2), event_time_ms=np.int64(NOW_S * 1_000))
    recorded = await case.client.record([measured, Event("u", "new"), Event("u", "new")])

    assert [item.item_id for item in answer.items] == ["i06", "i07"]
    assert (len(recorded.event_ids), recorded.unknown_items) == (3, ("new",))


async def test_answers_are_explained_and_users_data_handed_out_over_rest(case: Case) -> None:
    """REST explains an answer and exports a user's data; the gRPC client has neither call and points to http://."""
    if case.scheme == "grpc":
        for call in (case.client.explain("r"), case.client.user_data("u")):
            with pytest.raises(ValueError, match="http://"):
                await call
        return
    answer = await case.client.recommend("long", deadline_ms=5_000)
    await until(lambda: answer.request_id in case.world.shelf.records)

    explained = await case.client.explain(answer.request_id)
    data = await case.client.user_data("u/1 ü")

    assert isinstance(explained, Explanation)
    assert (explained.outcome, explained.fields["tier"], bool(explained.sentences)) == ("ok", "llm", True)
    assert data.user_id == "u/1 ü"
    assert {"history", "shown", "lists", "explanations", "events", "impressions"} <= set(data.fields)


async def test_a_user_is_erased_and_the_receipt_is_read_again(case: Case) -> None:
    """The erasure goes to the interaction log under the user's key; the receipt names the stores, but no user."""
    accepted = await case.client.erase_user("u/1 ü")
    receipt = await case.client.erasure(accepted.erasure_id)
    unknown = await refused(case.client.erasure("unknown"))

    key, value = case.world.events.records[-1]
    erasure = Erasure(erasure_id=accepted.erasure_id, user_id="u/1 ü", accepted_time_ms=int(NOW_S * 1_000))
    assert (key.decode(), decode_record(value), value) == ("u/1 ü", erasure, erasure.encode())
    assert set(receipt.stores) == {store.value for store in ErasureStore}
    assert (receipt.is_done, receipt.is_done_online, set(receipt.stores.values())) == (False, False, {None})
    assert len(receipt.remaining) == len(accepted.remaining) > 3
    assert "u/1" not in repr(receipt)
    assert unknown.code == "not_found"


async def test_a_list_goes_on_with_the_token_of_the_one_before(case: Case) -> None:
    """Pages share no item; an invalid period or token is rejected by its field, in the client or at the server."""
    first = await case.client.recommend("long", k=4, deadline_ms=5_000)
    second = await case.client.recommend("long", k=4, next=first.next, avoid_shown_within="1h", deadline_ms=5_000)
    wrong = ({"next": "x"}, {"avoid_shown_within": "an hour"})
    errors = [await refused(case.client.recommend("long", **options)) for options in wrong]

    assert {item.item_id for item in first.items}.isdisjoint(item.item_id for item in second.items)
    assert [error.field for error in errors] == ["next", "avoid_shown.within"]


async def test_an_event_whose_answer_is_lost_has_its_effect_once(case: Case) -> None:
    """An event whose answer is lost is resent with the same id, so the stream counts it once."""
    log, answers = case.world.events, asyncio.Event()
    keep = log.record

    async def record(records: list[tuple[bytes, bytes]]) -> None:
        """Keep the records, and answer late."""
        await keep(records)
        await answers.wait()

    log.record = record  # type: ignore[method-assign,assignment]
    sending = asyncio.create_task(case.client.record(Event("u", "i00"), deadline_ms=20_000))
    await until(lambda: log.records)
    await case.wire.become(Wire.RESET)
    answers.set()
    await case.wire.become(Wire.PASS)
    recorded = await sending

    assert recorded.num_attempts >= 2
    assert [json.loads(value)["event_id"] for _, value in log.records] == [*recorded.event_ids] * 2


async def test_a_broken_connection_is_repaired_within_the_deadline(case: Case) -> None:
    """The server stops between two calls and returns: the next call is answered."""
    await case.client.recommend("long", deadline_ms=20_000)
    await case.wire.become(Wire.STOP)
    asking = asyncio.create_task(case.client.recommend("long", deadline_ms=20_000))
    await asyncio.sleep(0)
    await case.wire.become(Wire.PASS)

    assert (await asking).tier == "llm"


async def test_a_server_that_hangs_costs_the_deadline(case: Case) -> None:
    """An unanswered attempt ends at the deadline and is not repeated; later calls succeed."""
    await case.wire.become(Wire.HANG)
    late = await refused(case.client.recommend("long", deadline_ms=150))
    await case.wire.become(Wire.PASS)

    assert (late.code, late.num_attempts) == ("deadline_exceeded", 1)
    assert (await case.client.recommend("long", deadline_ms=20_000)).tier == "llm"


@pytest.mark.parametrize("address", ["localhost:8000", "http://localhost:8000/v1", "ftp://a", "grpc://"])
def test_a_wrong_address_is_refused_at_once(address: str) -> None:
    """The error shows the correct form of an address."""
    with pytest.raises(ValueError, match=r"address: .* send such as http://HOST:8000"):
        Client(address)


def test_an_option_that_does_not_exist_is_named_with_those_that_do() -> None:
    """The error names the misspelled option and lists the valid options."""
    with Client("http://localhost:1") as client, pytest.raises(TypeError, match=r"no option fliters; .*categories"):
        client.recommend("u", fliters={"categories": ["a"]})  # type: ignore[call-arg]


class Refused(grpc.RpcError):
    """A gRPC error as the grpc library raises it for a status from another server."""

    def __init__(self, code: grpc.StatusCode, details: str, status: status_pb2.Status | None = None) -> None:
        self.code, self.details = lambda: code, lambda: details
        trailers = status and (("grpc-status-details-bin", status.SerializeToString()),)
        self.trailing_metadata = lambda: trailers


def test_a_refusal_of_another_grpc_server_is_read_as_far_as_it_is_known() -> None:
    """Error details of proxies and newer servers are read; without Tailrace's details the fix explains the ports."""
    status = status_pb2.Status()
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="BUSY", metadata={"service": "a", "fix": "wait"}))

    wrong_port = refusal_of(Refused(grpc.StatusCode.UNKNOWN, "Received http2 header with status: 404"), "r")
    busy = refusal_of(Refused(grpc.StatusCode.UNAVAILABLE, "no backend", status), "r")

    assert (wrong_port.code, "grpc:// has the port of the gRPC door" in str(wrong_port)) == ("internal", True)
    assert (busy.code, busy.message, busy.fix, busy.request_id) == ("busy", "no backend", "wait", "r")


@pytest.mark.parametrize(
    ("status", "body", "retry_after", "code"),
    [
        (200, b"<html>", "", "internal"),
        (200, b"{}", "", "internal"),
        (200, b'{"items": []}', "", "internal"),
        (200, b"[" * 100_000, "", "internal"),
        (503, b"", "-1", "unavailable"),
        (503, b"", "nan", "unavailable"),
    ],
)
async def test_another_server_s_answer_is_the_one_error(status: int, body: bytes, retry_after: str, code: str) -> None:
    """Any response of a proxy or a wrong address becomes a TailraceError."""

    async def answer(_: Request) -> Response:
        return Response(body, status, {"retry-after": retry_after})

    options = CallOptions(retry_reserve=1)
    async for url in serve(Starlette(routes=[Route("/{path:path}", answer, methods=["POST"])])):
        async with AsyncClient(url, options=options) as client:
            with Client(url, options=options) as blocking:
                errors = [
                    await refused(caller.recommend("u", deadline_ms=20_000)) for caller in (client, Blocking(blocking))
                ]

    assert [error.code for error in errors] == [code] * 2


ITEM = CatalogueItem(
    item_id="i04/new",
    title="New",
    categories=("odd", "fresh"),
    attributes={"colour": "red", "sizes": ("s", "m"), "price": 9.5, "new": True},
    published_ms=1_700_000_000_000,
    expires_ms=4_000_000_000_000,
    value=2.0,
)


async def test_items_are_put_patched_read_and_deleted_over_both_doors(case: Case) -> None:
    """A put item is read back, a patch changes only its own fields, and a deleted item is not found."""
    put = await case.client.put_items([ITEM, CatalogueItem(item_id="i04", available=False)])
    read = await case.client.get_item(ITEM.item_id)
    patched = await case.client.patch_item(
        ITEM.item_id, {"title": None, "attributes": {"colour": None, "price": 8.0}, "value": 3.0}
    )
    answer = await case.client.recommend("long", k=10, deadline_ms=5_000)
    await case.client.delete_item(ITEM.item_id)
    missing = await refused(case.client.get_item(ITEM.item_id))

    assert (put.accepted, put.refused, read) == (2, (), ITEM)
    attributes = {"sizes": ("s", "m"), "price": 8.0, "new": True}
    assert patched == replace(ITEM, title=None, attributes=attributes, value=3.0)
    assert "i04" not in {item.item_id for item in answer.items}
    assert (missing.code, missing.field) == ("not_found", None)


async def test_a_wrong_item_is_refused_by_itself(case: Case) -> None:
    """The outcome names the wrong entry, its field and a fix; the valid entries are put."""
    wrong = CatalogueItem(item_id="bad", attributes={"value": 1.0})
    put = await case.client.put_items([wrong, CatalogueItem(item_id="good"), CatalogueItem(item_id="")])

    assert put.accepted == 1
    assert [(refusal.item_id, refusal.field) for refusal in put.refused] == [
        ("bad", "items[0].attributes.value"),
        ("", "items[2].item_id"),
    ]
    assert (await case.client.get_item("good")).title == "good"


async def test_a_patch_of_an_item_that_is_not_there_is_refused(case: Case) -> None:
    """An item that only the bundle has can be patched; an unknown item is not found; a bad change names its field."""
    patched = await case.client.patch_item("i00", {"available": False})
    missing = await refused(case.client.patch_item("none", {"available": False}))
    wrong = await refused(case.client.patch_item("i00", {"published_ms": 5}))

    assert (patched.item_id, patched.available, patched.title) == ("i00", False, None)
    assert (missing.code, wrong.code, wrong.field) == ("not_found", "invalid_request", "published_ms")
