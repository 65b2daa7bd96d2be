"""Both doors with keys: which calls are admitted, the code of each refusal, and that a refusal reveals nothing."""

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import structlog
from google.rpc import status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from starlette.requests import Request
from starlette.responses import Response

from services.contracts import recommend_pb2 as pb
from services.contracts import recommend_pb2_grpc as api
from services.contracts.access import Priority, Scope
from services.gateway.access.authorize import KeyedAccess
from services.gateway.access.keyring import KeyRing
from services.gateway.access.keys import KeysFile, write_keys
from services.gateway.access.shared_rates import SharedRates
from services.gateway.call.headers import Call
from services.gateway.call.http import json_response
from services.gateway.call.operation import Operation
from services.gateway.grpc.door import RpcDoor
from services.gateway.rest.door import create_rest_app
from services.gateway.rest.operations import REST_ERRORS
from tests.support.keys import bearer, stored_key
from tests.unit.gateway.clients import rpc_channel
from tests.unit.gateway.world import MAX_BODY_BYTES, World

PAST, FUTURE = (datetime.now(UTC) + timedelta(days=days) for days in (-1, 1))
MAX_K = 15

Headers = dict[str, str]


KEYS = KeysFile(
    keys=(
        stored_key("shop", Scope.RECOMMEND, Scope.EVENTS, priority=Priority.HIGH),
        stored_key("clicks", Scope.EVENTS),
        stored_key("root", *Scope),
        stored_key("expired", *Scope, hashes={"expired": PAST}),
        stored_key(
            "rotated", Scope.RECOMMEND, hashes={"rotated-old": FUTURE, "rotated-new": None, "rotated-gone": PAST}
        ),
        stored_key("slow", Scope.RECOMMEND, Scope.EVENTS, rate_per_s=0.01, burst=1),
        stored_key("daily", Scope.RECOMMEND, Scope.EVENTS, daily_quota=1),
        stored_key("small", Scope.RECOMMEND, max_k=2),
    )
)


@dataclass
class Outcome:
    """What a caller receives: the status, every byte that could distinguish wrong keys, when to retry."""

    status: str
    text: str
    retry_after: float | None = None
    num_items: int = 0
    limits: Headers = field(default_factory=dict)


class RestDoor:
    """A client of the REST door."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http

    async def recommend(self, headers: Headers, **body: Any) -> Outcome:
        """Request two items."""
        return _rest(
            await self.http.post("/v1/recommendations", json={"user_id": "nobody", "k": 2, **body}, headers=headers)
        )

    async def record(self, headers: Headers) -> Outcome:
        """Record one event."""
        return _rest(await self.http.post("/v1/events", json={"user_id": "u", "item_id": "i"}, headers=headers))


class RpcCaller:
    """A client of the gRPC door."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self._stub = api.RecommenderStub(channel)

    async def recommend(self, headers: Headers, **body: Any) -> Outcome:
        """Request two items."""
        return await _rpc(self._stub.Recommend, pb.RecommendRequest(**{"user_id": "nobody", "k": 2, **body}), headers)

    async def record(self, headers: Headers) -> Outcome:
        """Record one event."""
        event = pb.Interaction(user_id="u", item_id="i")
        return await _rpc(self._stub.RecordEvents, pb.RecordEventsRequest(events=[event]), headers)


Door = RestDoor | RpcCaller


@pytest.fixture
def access(tmp_path: Path) -> KeyedAccess:
    """A ring with the table's keys."""
    path = tmp_path / "keys.json"
    write_keys(path, KEYS)
    return KeyedAccess(KeyRing(path, MAX_K), SharedRates())


@pytest.fixture
async def rest(world: World, access: KeyedAccess) -> AsyncIterator[RestDoor]:
    """The REST door with keys."""
    app = create_rest_app(lambda: world.plane, lambda: b"# metrics\n", MAX_BODY_BYTES, access=access)

    async def drill(_: Request, call: Call) -> Response:
        """An administrative operation that returns its caller."""
        return json_response({"by": call.admitted.key_id})

    operation = Operation(
        name="drill",
        method="POST",
        path="/admin/drill",
        summary="",
        scope=Scope.ADMIN,
        errors=REST_ERRORS,
        answers={},
        is_audited=True,
    )
    app.serve(operation, drill)
    transport = httpx.ASGITransport(app, client=("192.0.2.7", 4711))
    async with httpx.AsyncClient(transport=transport, base_url="http://door") as http:
        yield RestDoor(http)


@pytest.fixture
async def rpc(world: World, access: KeyedAccess) -> AsyncIterator[RpcCaller]:
    """The gRPC door with keys."""
    async with rpc_channel(RpcDoor(lambda: world.plane, MAX_BODY_BYTES, access)) as channel:
        yield RpcCaller(channel)


@pytest.fixture(params=["rest", "rpc"])
def door(request: pytest.FixtureRequest) -> Door:
    """Each door in turn."""
    caller: Door = request.getfixturevalue(request.param)
    return caller


OK = ("200", "OK")
NO_KEY = ("401", "UNAUTHENTICATED")
NO_SCOPE = ("403", "PERMISSION_DENIED")
USED_UP = ("429", "RESOURCE_EXHAUSTED")

TABLE: list[tuple[str, Headers, str, tuple[str, str]]] = [
    ("missing", {}, "recommend", NO_KEY),
    ("missing, events", {}, "record", NO_KEY),
    ("wrong", bearer("nonsense"), "recommend", NO_KEY),
    ("another scheme", {"authorization": "Basic shop"}, "recommend", NO_KEY),
    ("a bad header beside a good one", {"authorization": "Basic x", "x-api-key": "shop"}, "recommend", NO_KEY),
    ("expired", bearer("expired"), "recommend", NO_KEY),
    ("good", bearer("shop"), "recommend", OK),
    ("good, events", bearer("shop"), "record", OK),
    ("good, the other header", {"x-api-key": "shop"}, "recommend", OK),
    ("rotated, old within the overlap", bearer("rotated-old"), "recommend", OK),
    ("rotated, old after the overlap", bearer("rotated-gone"), "recommend", NO_KEY),
    ("wrong scope", bearer("clicks"), "recommend", NO_SCOPE),
]


@pytest.mark.parametrize(("headers", "what", "statuses"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
async def test_each_key_has_its_status(door: Door, headers: Headers, what: str, statuses: tuple[str, str]) -> None:
    """Both doors return the same code for a key, and a refused caller gets no time to retry."""
    outcome = await getattr(door, what)(headers)

    assert outcome.status == statuses[isinstance(door, RpcCaller)]
    assert outcome.retry_after is None


async def test_missing_wrong_and_expired_are_one_answer(door: Door) -> None:
    """They are equal byte for byte, except for the request's own id: nothing reveals that a key was once valid."""
    same = {"x-request-id": "same"}
    answers = [await door.recommend({**same, **headers}) for headers in ({}, bearer("nonsense"), bearer("expired"))]

    assert answers[0] == answers[1] == answers[2]
    assert "expired" not in answers[0].text
    assert "nonsense" not in answers[1].text


async def test_a_refusal_comes_before_anything_is_read(door: Door, world: World) -> None:
    """Without a key the request is not validated, no feature is read, and no event gets to the broker."""
    nonsense = await door.recommend({}, k=1_000_000)
    await door.record({})

    assert nonsense.status in NO_KEY
    assert world.events.records == []
    assert world.llm.requests == []


@pytest.mark.parametrize("key", ["slow", "daily"])
async def test_a_used_up_key_gets_a_time_to_retry(door: Door, key: str) -> None:
    """429 or RESOURCE_EXHAUSTED with the time, for both calls of that key and for no other key."""
    first = await door.recommend(bearer(key))
    again = await door.recommend(bearer(key))
    events = await door.record(bearer(key))

    policy = {"slow": "1;w=100;counted=replica", "daily": "1;w=86400;counted=replica"}[key]
    assert first.status in OK
    assert {**first.limits, "reset": ""} == {"limit": "1", "remaining": "0", "reset": "", "policy": policy}
    assert 0 < int(again.limits["reset"]) <= 86_400
    assert [again.status in USED_UP, events.status in USED_UP] == [True, True]
    assert again.retry_after is not None
    assert 0 < again.retry_after <= 86_400
    clicks = await door.record(bearer("clicks"))
    assert (clicks.status in OK, clicks.limits) == (True, {})


async def test_grpc_health_is_open(rpc: RpcCaller) -> None:
    """Probes have no keys."""
    health = await health_pb2_grpc.HealthStub(rpc.channel).Check(health_pb2.HealthCheckRequest())

    assert health.status == health_pb2.HealthCheckResponse.SERVING


async def test_both_doors_count_together(rest: RestDoor, rpc: RpcCaller) -> None:
    """A key has one bucket for both doors."""
    await rest.recommend(bearer("slow"))

    assert (await rpc.recommend(bearer("slow"))).status == "RESOURCE_EXHAUSTED"


async def test_items_are_bounded_by_the_settings_and_by_the_key(door: Door) -> None:
    """The refusal names the limit."""
    by_key = await door.recommend(bearer("small"), k=3)
    by_settings = await door.recommend(bearer("root"), k=MAX_K + 1)
    within = await door.recommend(bearer("small"), k=2)

    assert "send 1 to 2" in by_key.text
    assert f"send 1 to {MAX_K}" in by_settings.text
    assert (within.status in OK, within.num_items) == (True, 2)


async def test_the_priority_of_the_key_reaches_the_llm(door: Door, world: World) -> None:
    """The LLM's scheduler orders requests by it."""
    await door.recommend(bearer("shop"), user_id="long")
    await door.recommend(bearer("root"), user_id="long")

    assert [request.priority for request in world.llm.requests] == [Priority.HIGH, Priority.NORMAL]


@pytest.mark.parametrize(
    ("path", "key", "status"),
    [
        ("/healthz", None, 200),
        ("/readyz", None, 200),
        ("/docs", None, 200),
        ("/openapi.json", None, 200),
        ("/v1/bundle", None, 401),
        ("/v1/bundle", "clicks", 403),
        ("/v1/bundle", "shop", 200),
        ("/metrics", None, 401),
        ("/metrics", "shop", 403),
        ("/metrics", "root", 200),
    ],
)
async def test_open_and_protected_paths(rest: RestDoor, path: str, key: str | None, status: int) -> None:
    """Probes and the document are open; the bundle needs the scope recommend, metrics need admin; a 401 names the scheme."""
    answer = await rest.http.get(path, headers=bearer(key))

    assert answer.status_code == status
    assert answer.headers.get("www-authenticate") == ("Bearer" if status == 401 else None)


@pytest.mark.parametrize(
    ("headers", "who", "outcome", "origin"),
    [
        (bearer("root"), "root", "ok", "192.0.2.7"),
        (bearer("shop"), "shop", "not_allowed", "192.0.2.7"),
        ({}, "unauthenticated", "unauthenticated", "192.0.2.7"),
        ({**bearer("root"), "x-forwarded-for": "198.51.100.9"}, "root", "ok", "198.51.100.9"),
    ],
)
async def test_every_administrative_act_leaves_one_audit_line(
    rest: RestDoor, headers: Headers, who: str, outcome: str, origin: str
) -> None:
    """It has the caller, the operation, the origin and the outcome, also when refused; other calls leave no line."""
    with structlog.testing.capture_logs() as logs:
        await rest.http.post("/admin/drill", headers={**headers, "x-request-id": "r1"})
        await rest.recommend(bearer("shop"))

    (line,) = [log for log in logs if log["event"] == "audit"]
    assert (line["act"], line["who"], line["outcome"]) == ("POST /admin/drill", who, outcome)
    assert (line["origin"], line["request_id"]) == (origin, "r1")


async def test_no_log_line_holds_a_key(door: Door) -> None:
    """Neither a valid nor a wrong key is logged."""
    with structlog.testing.capture_logs() as logs:
        await door.recommend(bearer("trk_wrong-secret"))
        await door.recommend({"x-api-key": "rotated-new"})

    assert "wrong-secret" not in str(logs)
    assert "rotated-new" not in str(logs)


def _rest(answer: httpx.Response) -> Outcome:
    retry_after = answer.headers.get("retry-after")
    text = f"{sorted(answer.headers.items())} {answer.text}" if answer.status_code != 200 else ""
    num_items = len(answer.json().get("items", ())) if answer.status_code == 200 else 0
    wait = None if retry_after is None else float(retry_after)
    return Outcome(str(answer.status_code), text, wait, num_items, _limits(answer.headers))


async def _rpc(method: Callable[..., Any], message: Any, headers: Headers) -> Outcome:
    call = method(message, metadata=tuple(headers.items()))
    try:
        answer = await call
    except grpc.aio.AioRpcError as error:
        trailers = dict(error.trailing_metadata() or ())
        status = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
        text = f"{error.details()} {sorted(trailers.items())} {status}"
        retry_after = trailers.get("retry-after")
        wait = None if retry_after is None else float(retry_after)
        return Outcome(error.code().name, text, wait, limits=_limits(trailers))
    trailers = dict(await call.trailing_metadata())
    return Outcome("OK", "", num_items=len(getattr(answer, "items", ())), limits=_limits(trailers))


def _limits(headers: Mapping[str, str]) -> Headers:
    """The fields of a key's limits."""
    return {name.removeprefix("ratelimit-"): value for name, value in headers.items() if name.startswith("ratelimit-")}
