"""The client that callers install, sync and async, over REST and gRPC, through a proxy to the real doors: each case runs four times."""

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
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
from services.errors import DependencyUnavailable, Overloaded
from services.gateway.access.authorize import KeyedAccess
from services.gateway.access.keyring import KeyRing
from services.gateway.access.keys import KeysFile, write_keys
from services.gateway.access.shared_rates import SharedRates
from services.gateway.grpc.door import RpcDoor, add_recommender_to_server
from services.gateway.rest.door import create_rest_app
from tailrace_client import AsyncClient, CallOptions, Client, Event, Explanation, Recommendation, TailraceError
from tailrace_client.rpc import _refusal as refusal_of
from tests.support.gateway.keys import stored_key
from tests.support.servers import HOST, free_port
from tests.support.wait import until
from tests.unit.gateway.openai.conftest import serve
from tests.unit.gateway.world import MAX_BODY_BYTES, NOW_S, VERSION, World, catalogue_of, make_world, publish

KEY = "shop"


class Blocking:
    """The synchronous client, each call in a thread."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        return functools.partial(asyncio.to_thread, getattr(self._client, name))


@dataclass
class Case:
    """One kind of client, and what is behind it."""

    world: World
    wire: TcpProxy
    client: Any
    scheme: str

    def other(self, **options: Any) -> AsyncClient:
        """Make an asynchronous client of the same door."""
        return AsyncClient(f"{self.scheme}://{HOST}:{self.wire.port}", **options)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """A started plane on fakes."""
    publish(tmp_path / "bundles", VERSION, catalogue_of())
    made = make_world(tmp_path / "bundles")
    await made.plane.start()
    yield made
    await made.plane.stop()


@pytest.fixture
async def ports(world: World, tmp_path: Path) -> AsyncIterator[dict[str, int]]:
    """The ports of both doors, which require a key."""
    write_keys(tmp_path / "keys.json", KeysFile(keys=(stored_key(KEY, *Scope),)))
    access = KeyedAccess(KeyRing(tmp_path / "keys.json", 100), SharedRates())
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
        if kind == "async":
            async with AsyncClient(address, api_key=KEY) as client:
                yield Case(world, wire, client, scheme)
        else:
            with Client(address, api_key=KEY) as client:
                yield Case(world, wire, Blocking(client), scheme)


class Unreachable:
    """Each kind of client, of a server that is not there: whatever is sent fails as unreachable."""

    def __init__(self, blocking: list[Client], clients: list[AsyncClient]) -> None:
        self._blocking, self._clients = blocking, clients

    async def refusals(self, call: str, *arguments: Any, **options: Any) -> list[TailraceError]:
        """Return the error of each client for this call."""
        errors = []
        for client in self._blocking:
            with pytest.raises(TailraceError) as refused:
                getattr(client, call)(*arguments, **options)
            errors.append(refused.value)
        for asynchronous in self._clients:
            with pytest.raises(TailraceError) as refused:
                await getattr(asynchronous, call)(*arguments, **options)
            errors.append(refused.value)
        return errors


@pytest.fixture
async def unreachable() -> AsyncIterator[Unreachable]:
    """The clients of no server."""
    addresses = [f"{scheme}://{HOST}:1" for scheme in ("http", "grpc")]
    made = Unreachable([Client(one) for one in addresses], [AsyncClient(one) for one in addresses])
    yield made
    for client in made._blocking:
        client.close()
    for asynchronous in made._clients:
        await asynchronous.close()


async def test_both_doors_give_the_same_answer(case: Case) -> None:
    """Items with scores, tier, reason, bundle, request id and stages; options reach the server."""
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
    """Code, field, fix, request id and the time to retry; what a retry does not mend is sent once."""
    with pytest.raises(TailraceError) as wrong:
        await case.client.recommend("long", k=0)
    case.world.events.error = Overloaded("events", 2.0)
    with pytest.raises(TailraceError) as busy:
        await case.client.record(Event("u", "i00"), deadline_ms=1_900)
    case.world.events.error = DependencyUnavailable("broker", 2.0)
    with pytest.raises(TailraceError) as away:
        await case.client.record(Event("u", "i00"), deadline_ms=1_900)
    async with case.other() as nobody:
        with pytest.raises(TailraceError) as unknown:
            await nobody.recommend("long")
    with pytest.raises(TypeError, match="no option number"):
        await case.client.recommend("long", number=3)

    refused = wrong.value
    assert (refused.code, refused.field, refused.fix) == ("invalid_request", "k", "send 1 to 2000")
    assert (refused.message, refused.num_attempts) == ("0 is out of range", 1)
    assert len(refused.request_id or "") == 32
    assert (busy.value.code, busy.value.retry_after_s, busy.value.num_attempts) == ("overloaded", 2.0, 1)
    assert (away.value.code, away.value.retry_after_s, away.value.num_attempts) == ("unavailable", 2.0, 1)
    assert unknown.value.code == "unauthenticated"


@pytest.mark.parametrize("name", ["categories", "allowed_item_ids"])
async def test_an_empty_filter_is_refused_and_never_sent(case: Case, name: str) -> None:
    """Over gRPC an empty list is an absent one: a filter that nothing passes would let everything pass."""
    with pytest.raises(TailraceError) as refused:
        await case.client.recommend("long", **{name: []})

    assert (refused.value.code, refused.value.field) == ("invalid_request", f"filters.{name}")
    assert refused.value.num_attempts == 0


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
        ({"deadline_ms": "soon"}, "deadline_ms", "a number"),
        ({"deadline_ms": float("nan")}, "deadline_ms", "a number"),
        ({"deadline_ms": 10**12}, "deadline_ms", "a number"),
    ],
)
async def test_a_value_of_a_wrong_type_is_named_before_anything_is_sent(
    unreachable: Unreachable, options: dict[str, Any], field: str, expected: str
) -> None:
    """The field and the type that it takes, the same over both doors."""
    for refused in await unreachable.refusals("recommend", **{"user_id": "long", **options}):
        assert (refused.code, refused.field, refused.num_attempts) == ("invalid_request", field, 0)
        assert expected in (refused.fix or "")


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
    unreachable: Unreachable, events: Any, field: str, expected: str
) -> None:
    """By its place and field."""
    for refused in await unreachable.refusals("record", events):
        assert (refused.code, refused.field, refused.num_attempts) == ("invalid_request", field, 0)
        assert expected in (refused.fix or "")


async def test_values_that_are_as_good_are_taken(case: Case) -> None:
    """Numbers of numpy, and any iterable of ids."""
    answer = await case.client.recommend(
        "long", k=np.int64(2), exclude_item_ids=(f"i{place:02}" for place in (4, 5)), deadline_ms=np.float32(5_000)
    )
    recorded = await case.client.record(Event("u", "i00", value=np.float32(2), event_time_ms=np.int64(NOW_S * 1_000)))

    assert [item.item_id for item in answer.items] == ["i06", "i07"]
    assert len(recorded.event_ids) == 1


async def test_items_that_the_catalogue_lacks_are_named(case: Case) -> None:
    """Their events are recorded all the same."""
    recorded = await case.client.record([Event("u", "i00"), Event("u", "new"), Event("u", "new")])

    assert (len(recorded.event_ids), recorded.unknown_items) == (3, ("new",))


async def test_an_answer_is_explained_over_rest(case: Case) -> None:
    """In words; the gRPC door has no explanations, and the client names the one that does."""
    answer = await case.client.recommend("long", deadline_ms=5_000)
    if case.scheme == "grpc":
        with pytest.raises(ValueError, match="http://"):
            await case.client.explain(answer.request_id)
        return
    await until(lambda: answer.request_id in case.world.shelf.records)

    told = await case.client.explain(answer.request_id)

    assert isinstance(told, Explanation)
    assert (told.outcome, told.fields["tier"], bool(told.sentences)) == ("ok", "llm", True)


async def test_an_event_whose_answer_is_lost_has_its_effect_once(case: Case) -> None:
    """The connection breaks when the broker has the event: it is sent and recorded again, with its id, by which the stream counts it once."""
    log, answers = case.world.events, asyncio.Event()
    keep = log.record

    async def record(records: list[tuple[bytes, bytes]]) -> None:
        """Keep them, and answer late."""
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
    """The server goes away between two calls and comes back: the next call is answered all the same."""
    await case.client.recommend("long", deadline_ms=20_000)
    await case.wire.become(Wire.STOP)
    asking = asyncio.create_task(case.client.recommend("long", deadline_ms=20_000))
    await asyncio.sleep(0)
    await case.wire.become(Wire.PASS)

    assert (await asking).tier == "llm"


async def test_a_server_that_hangs_costs_the_deadline(case: Case) -> None:
    """An attempt that is never answered ends at the deadline and is not repeated; afterwards all is well."""
    await case.wire.become(Wire.HANG)
    with pytest.raises(TailraceError) as late:
        await case.client.recommend("long", deadline_ms=150)
    await case.wire.become(Wire.PASS)

    assert (late.value.code, late.value.num_attempts) == ("deadline_exceeded", 1)
    assert (await case.client.recommend("long", deadline_ms=20_000)).tier == "llm"


@pytest.mark.parametrize("address", ["localhost:8000", "http://localhost:8000/v1", "ftp://a", "grpc://"])
def test_a_wrong_address_is_refused_at_once(address: str) -> None:
    """With the form that is right."""
    with pytest.raises(ValueError, match=r"address: .* send such as http://HOST:8000"):
        Client(address)


def test_an_option_that_does_not_exist_is_named_with_those_that_do() -> None:
    """As `filters`, which is a field of the request but no option of the client."""
    with Client("http://localhost:1") as client, pytest.raises(TypeError, match=r"no option filters; .*categories"):
        client.recommend("u", filters={"categories": ["a"]})  # type: ignore[call-arg]


def test_the_rest_port_behind_grpc_is_suspected() -> None:
    """An error without Tailrace's details, of a status that no Tailrace sends without them, has the ports as its fix."""

    class Refused(grpc.RpcError):
        """What grpc makes of an HTTP server's 404."""

        code = staticmethod(lambda: grpc.StatusCode.UNKNOWN)
        details = staticmethod(lambda: "Received http2 header with status: 404")
        trailing_metadata = staticmethod(lambda: None)

    error = refusal_of(Refused(), "r")

    assert (error.code, "grpc:// has the port of the gRPC door" in str(error)) == ("internal", True)


def test_details_of_another_server_s_error_are_no_failure() -> None:
    """A proxy in front, or a newer server, may say more with its code: what is not known is left out."""
    status = status_pb2.Status()
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="BUSY", metadata={"service": "a", "fix": "wait"}))

    class Refused(grpc.RpcError):
        """A call's error."""

        code = staticmethod(lambda: grpc.StatusCode.UNAVAILABLE)
        details = staticmethod(lambda: "no backend")
        trailing_metadata = staticmethod(lambda: (("grpc-status-details-bin", status.SerializeToString()),))

    error = refusal_of(Refused(), "r")

    assert (error.code, error.message, error.fix, error.request_id) == ("busy", "no backend", "wait", "r")


@pytest.mark.parametrize("kind", ["sync", "async"])
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
async def test_another_server_s_answer_is_the_one_error(
    kind: str, status: int, body: bytes, retry_after: str, code: str
) -> None:
    """A proxy or a wrong address may answer anything: it is no answer of Tailrace, and the client raises nothing else."""

    async def answer(_: Request) -> Response:
        """Answer as another server."""
        return Response(body, status, {"retry-after": retry_after})

    async for url in serve(Starlette(routes=[Route("/{path:path}", answer, methods=["POST"])])):
        options = CallOptions(retry_reserve=1)
        with Client(url, options=options) as blocking:
            async with AsyncClient(url, options=options) as client:
                recommend = client.recommend if kind == "async" else Blocking(blocking).recommend
                with pytest.raises(TailraceError) as refused:
                    await recommend("u", deadline_ms=20_000)

    assert refused.value.code == code
