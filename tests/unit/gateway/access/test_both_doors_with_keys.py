"""Both doors with keys: which calls are admitted, the code of each rejection, and that a rejection reveals nothing."""

from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.load.recommender_stub import RecommenderStub
from services.contracts import recommend_pb2
from services.contracts.access import Priority, Scope
from services.gateway.access.authorize import KeyedAccess
from services.gateway.access.keyring import KeyRing
from services.gateway.access.keys import KeysFile, write_keys
from services.gateway.access.shared_rates import SharedRates
from services.gateway.access.tenants import FollowedTenants
from services.gateway.rest.door import create_rest_app
from tests.support.gateway.keys import bearer, stored_key
from tests.unit.gateway.clients import CLIENT_HOST, Door, RestClient, RpcClient, in_process
from tests.unit.gateway.world import World, keyed_access

PAST, FUTURE = (datetime.now(UTC) + timedelta(days=days) for days in (-1, 1))
MAX_K = 15
REQUEST: dict[str, Any] = {"user_id": "nobody", "k": 2}
EVENTS = [{"user_id": "u", "item_id": "i"}]

Headers = dict[str, str]


@pytest.fixture
def access(tmp_path: Path) -> KeyedAccess:
    """A key ring with these keys; each key's text is its id."""
    rotated = {"rotated-old": FUTURE, "rotated-new": None, "rotated-gone": PAST}
    return keyed_access(
        tmp_path,
        stored_key("shop", Scope.RECOMMEND, Scope.EVENTS, priority=Priority.HIGH),
        stored_key("clicks", Scope.EVENTS),
        stored_key("root", *Scope),
        stored_key("expired", *Scope, hashes={"expired": PAST}),
        stored_key("rotated", Scope.RECOMMEND, hashes=rotated),
        stored_key("slow", Scope.RECOMMEND, Scope.EVENTS, rate_per_s=0.01, burst=1),
        stored_key("daily", Scope.RECOMMEND, Scope.EVENTS, daily_quota=1),
        stored_key("small", Scope.RECOMMEND, max_k=2),
        max_k=MAX_K,
    )


TABLE: list[tuple[str, Headers, str]] = [
    ("missing", {}, "unauthenticated"),
    ("wrong", bearer("nonsense"), "unauthenticated"),
    ("another scheme", {"authorization": "Basic shop"}, "unauthenticated"),
    ("a bad header beside a good one", {"authorization": "Basic x", "x-api-key": "shop"}, "unauthenticated"),
    ("expired", bearer("expired"), "unauthenticated"),
    ("good", bearer("shop"), "ok"),
    ("good, the other header", {"x-api-key": "shop"}, "ok"),
    ("rotated, old within the overlap", bearer("rotated-old"), "ok"),
    ("rotated, old after the overlap", bearer("rotated-gone"), "unauthenticated"),
    ("wrong scope", bearer("clicks"), "not_allowed"),
]


@pytest.mark.parametrize(("headers", "code"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
async def test_each_key_has_its_status(door: Door, headers: Headers, code: str) -> None:
    """Both doors return the same code for a key; a rejected caller gets no retry time."""
    reply = await door.recommend(REQUEST, headers)

    assert (reply.code, reply.retry_after) == (code, None)


async def test_missing_wrong_and_expired_are_one_answer(door: Door, world: World) -> None:
    """Rejections differ only in the request id, so they reveal no expired key, and a rejected call has no effect."""
    wrong = ({}, bearer("nonsense"), bearer("expired"))
    replies = [await door.recommend({"k": 1_000_000}, {"x-request-id": "same", **headers}) for headers in wrong]
    recorded = await door.record(EVENTS)

    assert replies[0] == replies[1] == replies[2]
    assert "expired" not in replies[0].sent
    assert "nonsense" not in replies[1].sent
    assert (replies[0].code, recorded.code) == ("unauthenticated", "unauthenticated")
    assert (world.events.records, world.llm.requests) == ([], [])


@pytest.mark.parametrize(("key", "window_s"), [("slow", 100), ("daily", 86_400)])
async def test_a_used_up_key_gets_a_time_to_retry(door: Door, key: str, window_s: int) -> None:
    """The rejection has a retry time and covers both calls of that key, but no other key."""
    first, again = [await door.recommend(REQUEST, bearer(key)) for _ in range(2)]
    events, of_another = [await door.record(EVENTS, bearer(caller)) for caller in (key, "clicks")]

    policy = f"1;w={window_s};counted=replica"
    assert (first.code, again.code, events.code) == ("ok", "quota_exceeded", "quota_exceeded")
    assert {**first.limits, "reset": ""} == {"limit": "1", "remaining": "0", "reset": "", "policy": policy}
    assert 0 < int(again.limits["reset"]) <= 86_400
    assert 0 < float(again.retry_after or 0) <= 86_400
    assert (of_another.code, of_another.limits) == ("ok", {})


async def test_readiness_names_degraded_keys_and_limits(tmp_path: Path, world: World) -> None:
    """A rejected keys file and unavailable shared counts degrade a gateway that stays ready."""
    path, rates = tmp_path / "keys.json", SharedRates()
    write_keys(path, KeysFile(keys=(stored_key("shop", Scope.RECOMMEND),)))
    ring = KeyRing(path, MAX_K)
    app = create_rest_app(
        lambda: world.plane, lambda: b"", 1_000, access=KeyedAccess(ring, FollowedTenants(None), rates)
    )
    path.write_text("{")
    ring.refresh()
    rates.is_unavailable = True

    async with in_process(app) as http:
        ready = await http.get("/readyz")

    assert ready.status_code == 200
    assert ready.json() == {"status": "ready; degraded: API keys outdated, rate limits counted per gateway"}


@pytest.mark.parametrize("service", ["", "tailrace.v1.Recommender"])
async def test_grpc_health_is_open(rpc: RpcClient, service: str) -> None:
    """Health checks need no key; the server and its one service have the same status."""
    health = await health_pb2_grpc.HealthStub(rpc.channel).Check(health_pb2.HealthCheckRequest(service=service))

    assert health.status == health_pb2.HealthCheckResponse.SERVING


async def test_both_doors_count_together(rest: RestClient, rpc: RpcClient) -> None:
    """A key has one bucket for both doors."""
    assert [(await door.recommend(REQUEST, bearer("slow"))).code for door in (rest, rpc)] == ["ok", "quota_exceeded"]


async def test_a_key_has_its_number_of_items_and_its_priority(door: Door, world: World) -> None:
    """Settings and key limit the number of items; the LLM scheduler gets the key's priority."""
    by_key = await door.recommend({**REQUEST, "k": 3}, bearer("small"))
    by_settings = await door.recommend({**REQUEST, "k": MAX_K + 1}, bearer("root"))
    within = await door.recommend(REQUEST, bearer("small"))
    for key in ("shop", "root"):
        await door.recommend({"user_id": "long"}, bearer(key))

    assert "send 1 to 2" in by_key.sent
    assert f"send 1 to {MAX_K}" in by_settings.sent
    assert (within.code, len(within.body["items"])) == ("ok", 2)
    assert [request.priority for request in world.llm.requests] == [Priority.HIGH, Priority.NORMAL]


@pytest.mark.parametrize(
    ("path", "statuses"),
    [
        *((path, (200, 200, 200)) for path in ("/healthz", "/readyz", "/docs", "/openapi.json", "/health")),
        ("/v1/bundle", (401, 200, 200)),
        *((path, (401, 403, 200)) for path in ("/metrics", "/v1/models", "/v1/models/parrot")),
    ],
)
async def test_open_and_protected_paths(rest: RestClient, path: str, statuses: tuple[int, int, int]) -> None:
    """Probes and docs are open; bundle needs scope recommend, models text, metrics admin; a 401 names the scheme."""
    answers = [await rest.http.get(path, headers=bearer(key)) for key in (None, "shop", "root")]

    assert tuple(answer.status_code for answer in answers) == statuses
    assert answers[0].headers.get("www-authenticate") == ("Bearer" if statuses[0] == 401 else None)


@pytest.mark.parametrize(
    ("headers", "who", "outcome", "origin"),
    [
        (bearer("root"), "root", "ok", CLIENT_HOST),
        (bearer("shop"), "shop", "not_allowed", CLIENT_HOST),
        ({}, "unauthenticated", "unauthenticated", CLIENT_HOST),
        ({**bearer("root"), "x-forwarded-for": "198.51.100.9"}, "root", "ok", "198.51.100.9"),
    ],
)
async def test_every_administrative_act_leaves_one_audit_line(
    rest: RestClient, world: World, headers: Headers, who: str, outcome: str, origin: str
) -> None:
    """The audit line has caller, operation, origin and outcome, also for rejected calls."""
    with structlog.testing.capture_logs() as logs:
        await rest.recommend({**REQUEST, "request_id": "why"}, bearer("shop"))
        await world.plane.explanations.flush()
        await rest.http.get("/v1/explanations/why", headers={**headers, "x-request-id": "r1"})

    (line,) = [log for log in logs if log["event"] == "audit"]
    assert (line["act"], line["who"], line["outcome"]) == ("GET /v1/explanations/why", who, outcome)
    assert (line["origin"], line["request_id"]) == (origin, "r1")


async def test_no_log_line_of_an_erasure_names_its_user(rest: RestClient, rpc: RpcClient) -> None:
    """Both doors audit erasure and export, also when rejected, and no log line has the user id."""
    message = recommend_pb2.EraseUserRequest(user_id="secret-user")
    with structlog.testing.capture_logs() as lines:
        for key in ("root", "shop"):
            await rest.http.delete("/v1/users/secret-user", headers={"x-api-key": key})
            await rest.http.get("/v1/users/secret-user/data", headers={"x-api-key": key})
            with suppress(grpc.aio.AioRpcError):
                await RecommenderStub(rpc.channel).EraseUser(message, metadata=(("x-api-key", key),))

    audits = sorted((line["act"], line["outcome"]) for line in lines if line["event"] == "audit")
    acts = ("DELETE /v1/users/{user_id}", "tailrace.v1.Recommender/EraseUser", "GET /v1/users/{user_id}/data")
    assert audits == sorted((act, outcome) for act in acts for outcome in ("ok", "not_allowed"))
    assert "secret-user" not in str(lines)


async def test_no_log_line_holds_a_key(door: Door) -> None:
    """Neither valid nor wrong keys are logged."""
    with structlog.testing.capture_logs() as logs:
        await door.recommend(REQUEST, bearer("trk_wrong-secret"))
        await door.recommend(REQUEST, {"x-api-key": "rotated-new"})

    assert "wrong-secret" not in str(logs)
    assert "rotated-new" not in str(logs)
