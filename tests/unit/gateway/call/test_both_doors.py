"""The same cases through both doors: equal answers, and matching errors."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, NoReturn

import pytest

from benchmarks.load.recommender_stub import RecommenderStub
from services.contracts import recommend_pb2
from services.contracts.answers import ErrorBody, ErrorDetail
from services.contracts.items import ItemState
from services.errors import (
    BundleNotFound,
    ContextTooLong,
    DeadlineExceeded,
    DependencyUnavailable,
    InvalidRequest,
    NotAllowed,
    NotFound,
    Overloaded,
    QuotaExceeded,
    RequestTooLarge,
    TailraceError,
    Unauthenticated,
)
from services.gateway.call.json_schema import schemas_of
from services.gateway.openai.schema import OpenAiErrorBody, OpenAiErrorDetail
from tests.support.manifests import ROOT
from tests.unit.gateway.clients import Door, RestClient, RpcClient
from tests.unit.gateway.world import NOW_S, World

NOW_MS = int(NOW_S * 1_000)
USER = {"user_id": "nobody"}

ANSWERS: list[tuple[str, dict[str, Any], str, str, list[str]]] = [
    ("listed", {"user_id": "listed", "k": 3}, "precomputed", "precomputed_fresh", ["i05", "i06", "i07"]),
    ("long", {"user_id": "long", "k": 3}, "llm", "llm_in_time", ["i04", "i05", "i06"]),
    ("anonymous", {"recent_item_ids": ["i00", "i01", "i04"], "k": 2}, "llm", "llm_in_time", ["i05", "i06"]),
    ("short", {"user_id": "short", "k": 3}, "student", "short_history", ["i19", "i18", "i17"]),
    ("unknown", {"user_id": "nobody", "k": 3}, "popular", "unknown_user", ["i00", "i01", "i02"]),
    ("no known item", {"user_id": "dropouts", "k": 2}, "popular", "short_history", ["i00", "i01"]),
    ("all seen", {"user_id": "sated", "k": 2}, "popular", "everything_seen", ["i00", "i01"]),
    (
        "nothing allowed",
        {"user_id": "long", "filters": {"allowed_item_ids": ["i05"]}, "exclude_item_ids": ["i05"]},
        "popular",
        "nothing_allowed",
        [],
    ),
    (
        "filtered list",
        {"user_id": "listed", "k": 2, "filters": {"categories": ["even"]}, "exclude_item_ids": ["i06"]},
        "precomputed",
        "precomputed_fresh",
        ["i08", "i10"],
    ),
    ("seen items wanted", {"user_id": "listed", "k": 1, "exclude_seen": False}, "llm", "llm_in_time", ["i04"]),
    (
        "an expression",
        {
            "user_id": "long",
            "k": 3,
            "filters": {
                "must": [{"key": "categories", "eq": "even"}, {"key": "popularity", "range": {"lt": 14}}],
                "must_not": [{"should": [{"key": "item_id", "in": ["i08"]}, {"key": "categories", "exists": False}]}],
            },
        },
        "llm",
        "llm_in_time",
        ["i10", "i12", "i14"],
    ),
    (
        "rules",
        {
            "user_id": "long",
            "k": 4,
            "rules": {
                "boosts": [{"where": {"key": "item_id", "eq": "i09"}, "factor": 100}],
                "pins": [{"item_id": "i15", "position": 2}],
                "blocks": [{"key": "item_id", "in": ["i04"]}],
                "caps": [{"attribute": "categories", "most": 2}],
            },
        },
        "llm",
        "llm_in_time",
        ["i09", "i15", "i06", "i08"],
    ),
    ("top up", {"user_id": "short", "k": 2_000}, "student", "short_history", [f"i{i:02}" for i in range(19, 0, -1)]),
]


@pytest.mark.parametrize(
    ("body", "tier", "reason", "item_ids"), [case[1:] for case in ANSWERS], ids=[c[0] for c in ANSWERS]
)
async def test_both_doors_answer_alike(
    door: Door, world: World, body: dict[str, Any], tier: str, reason: str, item_ids: list[str]
) -> None:
    """A request gets the same items, tier and reason through either door, and the metrics count it by them."""
    reply = await door.recommend(body)

    assert reply.code == "ok", reply
    assert (reply.body["tier"], reply.body["reason"]) == (tier, reason)
    assert [item["item_id"] for item in reply.body["items"]] == item_ids
    assert world.metric("tailrace_requests_total", door=door.name, tier=tier, reason=reason, code="ok") == 1
    assert world.metric("tailrace_request_seconds_count", door=door.name, tier=tier) == 1


REFUSALS: list[tuple[str, dict[str, Any], dict[str, str], str]] = [
    ("a rule of the contract", {"user_id": "u", "k": 0}, {}, "k"),
    ("user id missing", {}, {}, "user_id"),
    ("unknown item", {"filters": {"allowed_item_ids": ["i01", "zz"]}, **USER}, {}, "filters.allowed_item_ids[1]"),
    ("unknown category", {"filters": {"categories": ["zz"]}, **USER}, {}, "filters.categories[0]"),
    ("unknown attribute", {"filters": {"must": [{"key": "pirce", "eq": 1}]}, **USER}, {}, "filters.must[0].key"),
    (
        "two tests",
        {"filters": {"must": [{"key": "categories", "eq": "a", "exists": True}]}, **USER},
        {},
        "filters.must[0]",
    ),
    (
        "a number for a text",
        {"filters": {"should": [{"must": [{"key": "categories", "eq": 1}]}]}, **USER},
        {},
        "filters.should[0].must[0].eq",
    ),
    (
        "a range of texts",
        {"rules": {"blocks": [{"key": "categories", "range": {"gt": 1}}]}, **USER},
        {},
        "rules.blocks[0].range",
    ),
    ("a rule out of range", {"rules": {"diversity": 2}, **USER}, {}, "rules.diversity"),
    ("a pin of nothing", {"rules": {"pins": [{"item_id": "zz", "position": 1}]}, **USER}, {}, "rules.pins[0].item_id"),
    ("unknown surface", {"surface": "home", **USER}, {}, "surface"),
    ("empty item id", {"exclude_item_ids": ["a", ""], **USER}, {}, "exclude_item_ids[1]"),
    ("session id", {"session_id": "a\n", **USER}, {}, "session_id"),
    ("long request id", {"request_id": "r" * 300, **USER}, {}, "request_id"),
    ("long request id in a header", USER, {"x-request-id": "r" * 300}, "x-request-id"),
    *(
        (f"deadline {text}", USER, {"x-deadline-ms": text}, "x-deadline-ms")
        for text in ("", "1_0", "9" * 40, "0", "999999999")
    ),
]


@pytest.mark.parametrize(
    ("body", "headers", "field"), [case[1:] for case in REFUSALS], ids=[case[0] for case in REFUSALS]
)
async def test_both_doors_refuse_alike(
    door: Door, world: World, body: dict[str, Any], headers: dict[str, str], field: str
) -> None:
    """Both doors reject a bad request with the same code and field, and count it; a header is its own field."""
    reply = await door.recommend(body, headers)

    labels = {"door": door.name, "tier": "none", "reason": "none", "code": "invalid_request"}
    assert (reply.code, reply.field) == ("invalid_request", field)
    assert world.metric("tailrace_requests_total", **labels) == 1


@pytest.mark.parametrize("decay", [201, -1, 1.5, 2**31])
async def test_both_doors_show_a_number_alike(rest: RestClient, rpc: RpcClient, decay: float) -> None:
    """A whole number is one in JSON and in protobuf, where it is a floating-point number."""
    by_rest, by_rpc = [await door.recommend({"rules": {"decay": decay}, **USER}) for door in (rest, rpc)]

    assert by_rpc.message.startswith(f"rules.decay: {by_rest.message}; ")


@pytest.mark.parametrize(
    ("body", "header", "granted"),
    [
        ({}, None, 10_000),
        ({}, "300", 300),
        ({"deadline_ms": 400}, "300", 400),
        ({"deadline_ms": 1}, None, 5),
        ({}, "60000", 50_000),
    ],
)
async def test_the_deadline_comes_by_field_or_header_and_is_clamped(
    door: Door, body: dict[str, Any], header: str | None, granted: int
) -> None:
    """The field takes precedence over the header, the header over the default; the limits apply to all three."""
    reply = await door.recommend({"user_id": "nobody", **body}, {"x-deadline-ms": header} if header else None)

    assert reply.body["deadline_ms"] == granted


async def test_the_request_id_is_echoed(door: Door) -> None:
    """The id comes from the field, else the header, else is generated; a non-ASCII id is in the body only."""
    other = {"x-request-id": "other"}
    beyond_ascii = await door.recommend({"request_id": "日本", **USER})
    by_field = await door.recommend({"request_id": "mine", **USER}, other)
    by_header = await door.recommend(USER, other)
    made = await door.recommend(USER)

    assert beyond_ascii.body["request_id"] == "日本"
    assert by_field.body["request_id"] == by_field.request_id == "mine"
    assert by_header.body["request_id"] == by_header.request_id == "other"
    assert len(made.request_id or "") == 32


@pytest.mark.parametrize(
    ("request_id", "kept"), [("mine", "mine"), ("日本", "日本"), ("r" * 300, "other"), (None, "other")]
)
@pytest.mark.parametrize(
    "wrong", [{"k": 0}, {"deadline_ms": 0}, {"exclude_item_ids": [""]}, {"filters": {"categories": ["zz"]}}]
)
async def test_a_refused_request_keeps_its_id(
    door: Door, request_id: str | None, kept: str, wrong: dict[str, Any]
) -> None:
    """The error has the body's id if valid, else the header's; the response header or trailer has it if it is ASCII."""
    body = {**USER, **wrong} if request_id is None else {**USER, "request_id": request_id, **wrong}

    reply = await door.recommend(body, {"x-request-id": "other"})

    assert (reply.code, reply.refused_id) == ("invalid_request", kept)
    assert reply.request_id == (kept if kept.isascii() else None)


EVENT = {"event_id": "e1", "user_id": "u", "item_id": "i01"}


async def test_acknowledged_events_are_in_the_log(door: Door, world: World) -> None:
    """Ids are returned in the order sent, records are ordered by time and keyed by user id, and times are filled in."""
    reply = await door.record([EVENT, {"user_id": "v", "item_id": "i02", "value": 2.5, "event_time_ms": NOW_MS - 1}])

    assert reply.body["accepted"] == 2
    assert reply.body["event_ids"][0] == "e1"
    (_, second), (key, first) = world.events.records
    assert key == b"u"
    assert json.loads(first) == {
        **EVENT,
        "event_time_ms": NOW_MS,
        "event_type": "click",
        "value": 1.0,
        "accepted_time_ms": NOW_MS,
    }
    assert json.loads(second)["event_id"] == reply.body["event_ids"][1]


WRONG = {"item_id": "a", "title": ""}


@pytest.mark.parametrize(
    ("items", "field"),
    [
        ([WRONG], "items[0].title"),
        ([WRONG, {"item_id": ""}], "items[0].title"),
        ([{"item_id": "a"}, WRONG], None),
        ([WRONG, {"item_id": "a"}], None),
    ],
)
async def test_items_of_which_none_is_right_are_refused(
    rest: RestClient, rpc: RpcClient, world: World, items: list[dict[str, Any]], field: str | None
) -> None:
    """If all items are wrong the call is rejected by the first wrong field; otherwise the valid items are put."""
    by_rest = await rest.http.put("/v1/items", json={"items": items})
    stub = RecommenderStub(rpc.channel)
    by_rpc = await rpc.call(stub.PutItems, recommend_pb2.PutItemsRequest(items=items), None)

    assert by_rest.status_code == (200 if field is None else 422)
    assert by_rest.json().get("error", {}).get("field") == by_rpc.field == field
    assert by_rest.json().get("accepted") == by_rpc.body.get("accepted") == (1 if field is None else None)
    assert len(world.items.records) == (2 if field is None else 0)


async def test_an_id_that_is_sent_twice_is_recorded_once(door: Door, world: World) -> None:
    """Duplicates of a user's event id are dropped; another user's event with the same id is a different event."""
    reply = await door.record([EVENT, {**EVENT, "item_id": "i02"}, {**EVENT, "user_id": "v"}, EVENT])

    assert (reply.body["accepted"], reply.body["event_ids"]) == (2, ["e1"] * 4)
    assert [(key, json.loads(value)["item_id"]) for key, value in world.events.records] == [
        (b"u", "i01"),
        (b"v", "i01"),
    ]


async def test_events_of_unknown_items_are_accepted_and_named(door: Door, world: World) -> None:
    """Events of unknown items are recorded and counted, and each unknown item is reported once, in the order sent."""
    items = ("new1", "i01", "new2", "new1")

    reply = await door.record([{"user_id": "u", "item_id": item} for item in items])
    known = await door.record([EVENT])

    assert (reply.body["accepted"], reply.body["unknown_items"]) == (4, ["new1", "new2"])
    assert known.body["unknown_items"] == []
    assert [json.loads(value)["item_id"] for _, value in world.events.records] == [*items, "i01"]
    assert world.metric("tailrace_unknown_item_events_total", door=door.name) == 3


async def test_an_item_that_was_deleted_is_unknown_as_before_it_came(door: Door, world: World) -> None:
    """Deleting an item that no bundle has makes it unknown again, to events and to similar items."""
    world.items.live_items.apply([("new", ItemState(item_id="new", title="New")), ("new", None), ("never", None)])
    for item_id in ("new", "never"):
        reply = await door.record([{"user_id": "u", "item_id": item_id}])

        assert reply.body["unknown_items"] == [item_id]
        assert (await door.similar([item_id], {})).code == "not_found"


SECONDS = NOW_MS // 1_000
BAD_EVENTS: list[tuple[str, list[dict[str, Any]], str, str]] = [
    ("none", [], "events", ""),
    ("too many", [EVENT] * 51, "events", ""),
    ("user missing", [{"item_id": "i"}], "events[0].user_id", ""),
    ("item missing", [EVENT, {"user_id": "u"}], "events[1].item_id", ""),
    ("future", [{**EVENT, "event_time_ms": NOW_MS + 61_000}], "events[0].event_time_ms", ""),
    ("past", [{**EVENT, "event_time_ms": NOW_MS - 31 * 86_400_000}], "events[0].event_time_ms", ""),
    ("seconds", [{**EVENT, "event_time_ms": SECONDS}], "events[0].event_time_ms", "looks like seconds"),
    ("not a number", [{**EVENT, "value": float("nan")}], "events[0].value", ""),
    ("bad request id", [{**EVENT, "request_id": "a\tb"}], "events[0].request_id", ""),
]


@pytest.mark.parametrize(
    ("events", "field", "words"), [case[1:] for case in BAD_EVENTS], ids=[case[0] for case in BAD_EVENTS]
)
async def test_bad_events_are_refused_whole(
    door: Door, world: World, events: list[dict[str, Any]], field: str, words: str
) -> None:
    """One bad event rejects the whole request, by index and field, before anything is sent."""
    reply = await door.record(events)

    assert (reply.code, reply.field) == ("invalid_request", field)
    assert words in reply.message
    assert world.events.records == []


@pytest.mark.parametrize(
    ("error", "code", "retry_after"),
    [
        (DependencyUnavailable("events", 0.2), "unavailable", "1"),
        (Overloaded("events", 1.5), "overloaded", "2"),
        (ZeroDivisionError("secret"), "internal", None),
    ],
)
async def test_what_breaks_inside_leaves_no_trace(
    door: Door, world: World, error: Exception, code: str, retry_after: str | None
) -> None:
    """A failing broker acknowledges nothing, `unavailable` has a retry time, and an internal error is opaque."""
    world.events.error = error

    reply = await door.record([EVENT])

    assert (reply.code, reply.retry_after, "secret" in reply.message) == (code, retry_after, False)
    assert world.metric("tailrace_events_total", door=door.name, code="ok") == 0


ERRORS = [
    InvalidRequest("k", "wrong", "send another"),
    ContextTooLong("prompt", "too long", "send less"),
    RequestTooLarge(1),
    Unauthenticated(),
    NotAllowed("recommend", "shop"),
    NotFound("no such name", "look"),
    QuotaExceeded("rate", 1.0),
    Overloaded("llm", 1.0),
    DependencyUnavailable("features", 1.0),
    DeadlineExceeded("llm"),
    BundleNotFound("none"),
    TailraceError(),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_an_error_has_the_documented_fields_and_no_other(
    rest: RestClient, rpc: RpcClient, world: World, error: TailraceError
) -> None:
    """Errors have the schema's fields through all three doors, and over gRPC the details named in recommend.proto."""

    async def fail(*_: object) -> NoReturn:
        raise error

    world.plane.recommend = fail  # type: ignore[assignment]
    replies = [await door.recommend({"user_id": "u"}) for door in (rest, rpc)]
    text = await rest.http.post("/v1/completions", json={"model": "none", "prompt": "x"})
    page = (ROOT / "services/contracts/recommend.proto").read_text()

    assert replies[0].parts == set(ErrorDetail.__struct_fields__)
    assert {"google.rpc.ErrorInfo", "google.rpc.RequestInfo"} <= replies[1].parts
    assert [part for part in replies[1].parts if part not in page] == []
    assert set(text.json()["error"]) == set(OpenAiErrorDetail.__struct_fields__)


@pytest.mark.parametrize("model", [ErrorBody, OpenAiErrorBody])
def test_the_schema_of_an_error_allows_no_other_field(model: Any) -> None:
    """The schema forbids extra fields, so the document's tests (test_openapi.py) would detect them."""
    for schema in schemas_of([model]).values():
        assert schema["additionalProperties"] is False
        assert set(schema["required"]) == set(schema["properties"])


async def test_an_oversized_body_is_refused(door: Door) -> None:
    """The size limit applies at both doors."""
    reply = await door.recommend({"user_id": "u", "exclude_item_ids": ["x" * 200] * 100})

    assert (reply.code, reply.field) == ("request_too_large", "body")


async def test_both_doors_return_the_same_object(rest: RestClient, rpc: RpcClient) -> None:
    """The bodies are equal except for the times of stages and number formats."""
    first, second = [
        (await door.recommend({"user_id": "long", "k": 1, "request_id": "same"})).body for door in (rest, rpc)
    ]
    for body in (first, second):
        body["stages_ms"] = {*body["stages_ms"]}
        body |= {name: int(body[name]) for name in ("newest_event_time_ms", "feature_age_ms")}

    assert first == second
    assert (first["newest_event_time_ms"], first["feature_age_ms"]) == (NOW_MS - 5_000, 5_000)
    assert first["bundle_version"] == "v1"
    assert first["items"] == [{"item_id": "i04", "score": 0.0, "title": "Item 4", "source": "llm"}]
    assert first["stages_ms"] >= {"features", "route", "llm", "student", "rank", "answer"}


@pytest.mark.parametrize(("edges", "code"), [(("edge-0", "edge-0"), "overloaded"), (("edge-0", "edge-1"), "ok")])
async def test_a_request_that_waited_at_the_edge_past_its_deadline_is_refused(
    door: Door, world: World, edges: tuple[str, str], code: str
) -> None:
    """The deadline counts from the stamp of the named edge: at the same edge, the second request is 1,000 s old."""
    replies = [
        await door.recommend(
            {"user_id": "long", "deadline_ms": 900},
            {"x-edge-arrived-ms": stamp_ms, "x-edge-in-flight": "1", "x-edge-name": edge},
        )
        for stamp_ms, edge in zip(("5000000", "4000000"), edges, strict=True)
    ]

    assert [reply.code for reply in replies] == ["ok", code]
    assert replies[1].retry_after == ("1" if code == "overloaded" else None)
    assert len(world.llm.requests) == (1 if code == "overloaded" else 2)


@pytest.mark.parametrize("stamp", ["", "-1", "1e3", "9" * 5_000])
async def test_a_mark_that_is_no_number_of_the_edge_s_is_ignored(door: Door, stamp: str) -> None:
    """A malformed stamp is ignored, as if the request did not come through the edge."""
    reply = await door.recommend({"user_id": "long"}, {"x-edge-arrived-ms": stamp, "x-edge-in-flight": "1"})

    assert reply.code == "ok"


async def test_an_upload_slower_than_its_deadline_is_answered(rest: RestClient) -> None:
    """Without the edge's stamp, the time of the upload does not count against the deadline."""

    async def body() -> AsyncIterator[bytes]:
        """Send the second half after the deadline."""
        yield b'{"user_id": "nobody", '
        await asyncio.sleep(0.05)
        yield b'"deadline_ms": 5}'

    answer = await rest.http.post("/v1/recommendations", content=body())

    assert answer.status_code == 200


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"session_wishes": ["a", "b" * 401] + ["c"] * 21}, "session_wishes"),
        ({"recent_item_ids": ["i" * 257] + ["i"] * 2000, "wish": ""}, "recent_item_ids"),
        ({"wish": "", "k": 0}, "k"),
        ({"deadline_ms": -1, "session_id": "s" * 257}, "session_id"),
        ({"rules": {"boosts": [{"factor": -1.0}]}, "filters": {"categories": [""]}}, "filters.categories[0]"),
    ],
)
async def test_of_several_errors_the_first_declared_is_named(door: Door, fields: dict[str, Any], field: str) -> None:
    """The caller sees the same error for every order of the fields and through each door."""
    replies = [await door.recommend({"user_id": "short", **fields}), await door.similar(["i01"], fields)]

    assert [(reply.code, reply.field) for reply in replies] == [("invalid_request", field)] * 2
