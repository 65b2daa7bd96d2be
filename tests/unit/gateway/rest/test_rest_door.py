"""REST specifics: JSON shapes and types, statuses, headers, pages, and chunked bodies."""

import gzip
import json
import math
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import pytest

from services.contracts.answers import ErrorDetail
from services.contracts.text import TokenLogprob
from services.gateway.call.http import json_response
from services.gateway.openai.chunks import completion_logprobs
from services.gateway.openai.schema import OpenAiErrorDetail
from services.gateway.openai.streaming import sse
from services.gateway.rest.door import create_rest_app
from services.items.live_items import Knowledge
from tests.unit.gateway.clients import RestClient, in_process
from tests.unit.gateway.world import MAX_BODY_BYTES, World, make_world, started_world

RECOMMEND, EVENTS = "/v1/recommendations", "/v1/events"

NOT_JSON = "send one JSON object"
BAD_BODIES = [
    (RECOMMEND, b"", "body", ""),
    (RECOMMEND, b'{"user_id": "u", "k": 2', "body", f"not JSON: Input data was truncated; {NOT_JSON}"),
    (RECOMMEND, b"{'user_id': 'u'}", "body", NOT_JSON),
    (RECOMMEND, b"[]", "body", f"not a JSON object; {NOT_JSON}"),
    (RECOMMEND, b"\xff\xfe", "body", ""),
    (RECOMMEND, b"[" * 10_000, "body", ""),
    (RECOMMEND, b'{"user_id": "u", "filters": {"shape": []}}', "filters.shape", ""),
    (RECOMMEND, b"{" + b",".join(b'"f%d": 1' % number for number in range(101)) + b"}", "f0", ""),
    (RECOMMEND, b'{"user_id": 7}', "user_id", "not a string; send a string"),
    (RECOMMEND, b'{"user_id": "u", "k": true}', "k", ""),
    (RECOMMEND, b'{"user_id": "u", "k": 2.5}', "k", "not an integer; send an integer"),
    (RECOMMEND, b'{"user_id": "u", "k": ' + b"9" * 4_000 + b"}", "k", ""),
    (RECOMMEND, b'{"user_id": "u", "k": ' + b"9" * 5_000 + b"}", "body", ""),
    (RECOMMEND, b'{"user_id": "u", "exclude_item_ids": "50"}', "exclude_item_ids", "not an array; send an array"),
    (RECOMMEND, b'{"user_id": "u", "filters": 3}', "filters", "not an object; send an object"),
    (RECOMMEND, b'{"user_id": "\\ud800"}', "user_id", ""),
    (RECOMMEND, b'{"user_id": "u", "\\ud800": 1}', "\x00", ""),
    (EVENTS, b'{"events": [], "\\ud800": 1}', "\x00", ""),
    (EVENTS, b'{"user_id": "u",}', "body", "not JSON: JSON is malformed: trailing comma in object (byte 16)"),
    (EVENTS, b"7", "events", ""),
    (EVENTS, b'{"events": [], "more": 1}', "more", ""),
    (EVENTS, b'{"events": [1]}', "events[0]", ""),
    (EVENTS, b'[{"user_id": "u", "item_id": "i", "accepted_time_ms": 1}]', "events[0].accepted_time_ms", ""),
    (EVENTS, b'{"user_id": "u", "item_id": "i", "value": ' + b"9" * 400 + b"}", "events[0].value", ""),
    (EVENTS, b'{"user_id": "u", "item_id": "i", "event_time_ms": 1795542826.5}', "events[0].event_time_ms", ""),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "field", "words"), BAD_BODIES, ids=[f"{path[4:7]} {body[:50]!r}" for path, body, *_ in BAD_BODIES]
)
async def test_a_bad_body_is_a_422_that_names_the_field(
    rest: RestClient, path: str, body: bytes, field: str, words: str
) -> None:
    """Every error has REST's error format, with the position of invalid JSON or the type of the field in the fix."""
    answer = await rest.http.post(path, content=body)

    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["field"]) == (422, "invalid_request", field)
    assert error["fix"]
    assert words in f"{error['message']}; {error['fix']}"
    assert error["request_id"] == answer.headers["x-request-id"]
    assert "Traceback" not in answer.text


async def test_half_a_surrogate_pair_costs_only_its_item(rest: RestClient, world: World) -> None:
    """The outcome can be written although the id cannot be repeated, and the other item is accepted."""
    answer = await rest.http.put("/v1/items", content=b'{"items": [{"item_id": "\\ud800"}, {"item_id": "a"}]}')

    wrong, right = answer.json()["outcomes"]
    assert (answer.status_code, answer.json()["accepted"], right["error"]) == (200, 1, None)
    assert wrong["error"]["field"] == "items[0].item_id"
    assert len(world.items.records) == 1


@pytest.mark.parametrize(
    ("name", "value", "field", "fix"),
    [
        ("0.5", [""], "attributes.0.5[0]", "send 1 to 256"),
        ("x[1].y", ["a", ""], "attributes.x[1].y[1]", "send 1 to 256"),
        ("n" * 300, "a", "attributes", "send 1 to 64"),
        ("", "a", "attributes", "send 1 to 64"),
    ],
)
async def test_an_attribute_of_any_name_is_refused_by_it(
    rest: RestClient, name: str, value: object, field: str, fix: str
) -> None:
    """Dots and brackets in a name do not hide what is wrong, and a wrong name is told from too many names."""
    answer = await rest.http.put("/v1/items/a", json={"attributes": {name: value}})

    error = answer.json()["error"]
    assert (answer.status_code, error["field"]) == (422, field)
    assert error["fix"].startswith(fix)


CLAUSE = '{"key": "popularity", '
OF_NUMBERS = [
    ("POST", RECOMMEND, '{"user_id": "u", "k": %s}', "k"),
    ("POST", RECOMMEND, '{"user_id": "u", "deadline_ms": %s}', "deadline_ms"),
    ("POST", RECOMMEND, '{"user_id": "u", "filters": {"must": [' + CLAUSE + '"eq": %s}]}}', "filters.must[0].eq"),
    ("POST", RECOMMEND, '{"user_id": "u", "filters": {"must": [' + CLAUSE + '"in": [1, %s]}]}}', "filters.must[0].in[1]"),
    ("POST", RECOMMEND, '{"user_id": "u", "filters": {"must": [' + CLAUSE + '"range": {"lt": %s}}]}}', "filters.must[0].range.lt"),
    ("POST", RECOMMEND, '{"user_id": "u", "rules": {"boosts": [{"where": ' + CLAUSE + '"eq": 1}, "factor": %s}]}}', "rules.boosts[0].factor"),
    ("POST", RECOMMEND, '{"user_id": "u", "rules": {"diversity": %s}}', "rules.diversity"),
    ("POST", RECOMMEND, '{"user_id": "u", "rules": {"freshness": {"half_life_h": 1, "factor": %s}}}', "rules.freshness.factor"),
    ("POST", RECOMMEND, '{"user_id": "u", "rules": {"caps": [{"attribute": "categories", "most": %s}]}}', "rules.caps[0].most"),
    ("POST", f"{RECOMMEND}:batch", '{"requests": [{"user_id": "u"}], "deadline_ms": %s}', "deadline_ms"),
    ("POST", EVENTS, '{"user_id": "u", "item_id": "i", "value": %s}', "events[0].value"),
    ("POST", EVENTS, '{"user_id": "u", "item_id": "i", "event_time_ms": %s}', "events[0].event_time_ms"),
    ("PUT", "/v1/items/a", '{"attributes": {"price": %s}}', "attributes.price"),
    ("PUT", "/v1/items/a", '{"value": %s}', "value"),
    ("PUT", "/v1/items", '{"items": [{"item_id": "a", "published_ms": %s}]}', "items[0].published_ms"),
    ("PATCH", "/v1/items/i00", '{"attributes": {"price": %s}}', "attributes.price"),
    *(
        ("POST", "/v1/completions", f'{{"model": "parrot", "prompt": "a", "{name}": %s}}', name)
        for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "n", "max_tokens")
    ),
    ("POST", "/v1/completions", '{"model": "parrot", "prompt": "a", "logit_bias": {"1": %s}}', "logit_bias.1"),
    ("POST", "/v1/chat/completions", '{"model": "parrot", "messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"x": [%s]}}', "chat_template_kwargs"),
]  # fmt: skip


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize(
    ("method", "path", "body", "field"), OF_NUMBERS, ids=[f"{case[1]} {case[3]}" for case in OF_NUMBERS]
)
async def test_a_number_that_is_not_finite_is_refused_by_its_field(
    rest: RestClient, world: World, method: str, path: str, body: str, field: str, number: str
) -> None:
    """JSON has no such numbers, but most encoders write them."""
    answer = await rest.http.request(method, path, content=body % number)

    error = answer.json()["error"]
    assert answer.status_code in {400, 422}
    assert error.get("field", error.get("param")) == field
    assert not world.events.records
    assert not world.items.records


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_no_answer_has_a_number_that_is_not_finite(number: float) -> None:
    """Answers and stream events reject them; a token's probability of 0 is written as OpenAI does."""
    for write in (json_response, sse):
        with pytest.raises(ValueError, match="JSON"):
            write({"items": [{"score": number}]})
    if number == -math.inf:
        token = TokenLogprob(token="a", token_bytes=b"a", logprob=number, top=(), text_offset=0)
        assert completion_logprobs([token], 1)["token_logprobs"] == [-9999.0]


@pytest.mark.parametrize("path", [RECOMMEND, EVENTS])
async def test_a_query_parameter_is_refused_and_not_ignored(rest: RestClient, path: str) -> None:
    """These calls take only a body; the rejection has the body's request id."""
    answer = await rest.http.post(f"{path}?k=1", json={"user_id": "u", "item_id": "i", "request_id": "mine"})

    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["field"]) == (422, "invalid_request", "k")
    assert path == EVENTS or error["request_id"] == "mine"


@pytest.mark.parametrize(
    "rest_of_body",
    [b'"k": "ten"}', b'"colour": 1}', b'"user_id": 7}', b'"user_id": "u", "k": 3, "filters": {"categories": ["Com'],
)
async def test_a_body_that_is_refused_keeps_its_request_id(rest: RestClient, rest_of_body: bytes) -> None:
    """With wrong types, unknown fields or a truncated body, the id is still read if possible."""
    answer = await rest.http.post(RECOMMEND, content=b'{"request_id": "mine", ' + rest_of_body)

    assert answer.json()["error"]["request_id"] == answer.headers["x-request-id"] == "mine"


@pytest.mark.parametrize(("path", "schema"), [(RECOMMEND, "RecommendBody"), (EVENTS, "EventBody")])
async def test_an_unknown_field_is_answered_with_those_that_are_documented(
    rest: RestClient, world: World, path: str, schema: str
) -> None:
    """An unknown field's name is truncated in the answer, the log and the explanation store."""
    schemas = (await rest.http.get("/openapi.json")).json()["components"]["schemas"]

    answer = await rest.http.post(path, json={"x" * 10_000: 1, "user_id": "u", "item_id": "i"})
    await world.plane.explanations.flush()

    error = answer.json()["error"]
    assert error["fix"] == f"the fields are {', '.join(sorted(schemas[schema]['properties']))}"
    assert "xxx" in error["field"]
    assert len(answer.content) < 1_000
    assert all(len(record) < 1_000 for record in world.shelf.records.values())


async def test_events_come_as_an_object_a_list_or_one(rest: RestClient, world: World) -> None:
    """All three shapes record the same event."""
    event = {"event_id": "e", "user_id": "u", "item_id": "i"}

    for body in ({"events": [event]}, [event], event):
        answer = await rest.http.post(EVENTS, json=body)
        assert answer.json() == {"accepted": 1, "event_ids": ["e"], "unknown_items": ["i"]}

    assert len(world.events.records) == 3


async def test_an_event_may_write_out_what_the_schema_says_may_be_null(rest: RestClient, world: World) -> None:
    """Generated clients send null for absent fields: id and time are filled in, and the request id stays absent."""
    schema = (await rest.http.get("/openapi.json")).json()["components"]["schemas"]["EventBody"]["properties"]
    nulls = {name: None for name, kind in schema.items() if "null" in kind["type"]}

    answer = await rest.http.post(EVENTS, json={"user_id": "u", "item_id": "i", **nulls})

    assert nulls
    assert answer.status_code == 200, answer.text
    kept = json.loads(world.events.records[0][1])
    assert kept["event_id"] == answer.json()["event_ids"][0]
    assert "request_id" not in kept


@pytest.mark.parametrize("encoding", ["gzip", "br", "GZIP, identity"])
async def test_a_compressed_body_is_refused_by_its_header(rest: RestClient, encoding: str) -> None:
    """A client that compresses learns that, and not that its JSON is malformed, at both doors of HTTP."""
    sent, headers = gzip.compress(b'{"user_id": "long"}'), {"content-encoding": encoding}

    ranked = await rest.http.post("/v1/recommendations", content=sent, headers=headers)
    written = await rest.http.post("/v1/chat/completions", content=sent, headers=headers)

    assert (ranked.status_code, ranked.json()["error"]["field"]) == (422, "content-encoding")
    assert (written.status_code, written.json()["error"]["param"]) == (400, "content-encoding")
    plain = {"content-encoding": "identity"}
    answered = await rest.http.post("/v1/recommendations", content=b'{"user_id": "long"}', headers=plain)
    assert answered.status_code == 200


async def test_an_undeclared_oversize_is_refused_while_it_is_read(rest: RestClient) -> None:
    """Reading a chunked body stops at the first excess chunk."""
    num_sent = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal num_sent
        for _ in range(1_000):
            num_sent += 1
            yield b" " * 1_000

    answer = await rest.http.post(EVENTS, content=chunks())

    assert answer.status_code == 413
    assert num_sent <= MAX_BODY_BYTES / 1_000 + 2


@pytest.mark.parametrize(
    ("path", "nearest"),
    [
        ("/v1/recommendation", RECOMMEND),
        ("/v1/recommend", RECOMMEND),
        ("/recommendations", RECOMMEND),
        ("/v1/event", EVENTS),
        ("/v1/Events", EVENTS),
        ("/v1/bundles", "/v1/bundle"),
        ("/v1/explanation/r1", "/v1/explanations/{request_id}"),
        ("/v1/" + "x" * 5_000, ""),
        ("/v1/customers/196", ""),
    ],
)
async def test_an_unknown_path_is_answered_with_the_nearest(rest: RestClient, path: str, nearest: str) -> None:
    """The 404 has REST's error format and names the nearest path of either door."""
    answer = await rest.http.post(path, headers={"x-request-id": "mine"})

    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["field"], error["request_id"]) == (404, "not_found", None, "mine")
    assert error["fix"] == (f"the nearest is {nearest}; see /docs for all" if nearest else "see /docs for all")
    assert len(answer.content) < 400


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v1/responses", 404),
        ("GET", "/v1/responses/r_1", 404),
        ("POST", "/v1/embeddings", 404),
        ("POST", "/v1/audio/speech", 404),
        ("POST", "/v1/images/generations", 404),
        ("GET", "/v1/files", 404),
        ("POST", "/v1/chat/completions/c_1", 404),
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1//responses", 400),
        ("POST", "/v1/%65mbeddings", 400),
    ],
)
async def test_every_path_of_openai_has_its_envelope(rest: RestClient, method: str, path: str, status: int) -> None:
    """Unknown OpenAI paths have OpenAI's error format, since its clients read no other, and name a supported path."""
    answer = await rest.http.request(method, path)

    error = answer.json()["error"]
    assert (answer.status_code, set(error)) == (status, set(OpenAiErrorDetail.__struct_fields__))
    assert status != 404 or "not offered" in error["message"]
    assert status != 404 or "/v1/chat/completions" in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "allowed", "detail"),
    [
        ("GET", RECOMMEND, "POST", ErrorDetail.__struct_fields__),
        ("POST", "/docs", "GET", ErrorDetail.__struct_fields__),
        ("GET", "/v1/completions", "POST", OpenAiErrorDetail.__struct_fields__),
        ("DELETE", "/v1/models/a/b", "GET", OpenAiErrorDetail.__struct_fields__),
    ],
)
async def test_an_unknown_method_is_answered_with_those_that_exist(
    rest: RestClient, method: str, path: str, allowed: str, detail: Iterable[str]
) -> None:
    """The error has the door's format and names the allowed methods, also in the Allow header."""
    answer = await rest.http.request(method, path, headers={"x-request-id": "mine"})

    error = answer.json()["error"]
    assert (answer.status_code, answer.headers["allow"], answer.headers["x-request-id"]) == (405, allowed, "mine")
    assert (error["code"], set(error)) == ("method_not_allowed", set(detail))
    assert f"use {allowed}" in error.get("fix", error["message"])


async def test_behind_an_ingress_that_echoes_the_request_id_the_door_does_not(world: World) -> None:
    """The door sends no header, so only the ingress's is sent; the error still has the id."""
    app = create_rest_app(lambda: world.plane, lambda: b"", MAX_BODY_BYTES)
    async with in_process(app) as http:
        answer = await http.post(RECOMMEND, json={"k": 0}, headers={"x-request-id": "mine"})

    assert "x-request-id" not in answer.headers
    assert answer.json()["error"]["request_id"] == "mine"


async def test_before_the_first_bundle_nothing_is_ready_and_nothing_breaks(tmp_path: Path) -> None:
    """Without a bundle, the gateway is alive but not ready; events are accepted without unknown items."""
    bare = make_world(tmp_path / "bundles")
    app = create_rest_app(lambda: bare.plane, lambda: b"", MAX_BODY_BYTES)
    async with in_process(app) as http:
        asked = await http.post(RECOMMEND, json={"user_id": "u"})
        recorded = await http.post(EVENTS, json={"user_id": "u", "item_id": "i"})
        ready = await http.get("/readyz")
        alive = await http.get("/healthz")

    assert (asked.status_code, asked.json()["error"]["message"]) == (503, "bundle of default is unavailable")
    assert "retry-after" in asked.headers
    assert recorded.json()["unknown_items"] == []
    assert (ready.status_code, alive.status_code) == (503, 200)


@pytest.mark.parametrize(
    ("knowledge", "statuses", "words"),
    [
        (Knowledge.NONE, (503, 503, 503, 503), "no states of items yet"),
        (Knowledge.SNAPSHOT, (200, 200, 200, 200), "ready; degraded: items as of the snapshot"),
        (Knowledge.CURRENT, (200, 200, 200, 200), "ready"),
    ],
)
async def test_without_states_of_items_nothing_is_recommended(
    tmp_path: Path, knowledge: Knowledge, statuses: tuple[int, ...], words: str
) -> None:
    """No door answers before it knows which items are hidden; states from a snapshot are reported as degraded."""
    async with started_world(tmp_path) as world:
        app = create_rest_app(lambda: world.plane, lambda: b"", MAX_BODY_BYTES)
        world.items.live_items.knowledge = knowledge
        async with in_process(app) as http:
            answers = [
                await http.get("/readyz"),
                await http.post(RECOMMEND, json={"user_id": "long"}),
                await http.post(RECOMMEND, json={"recent_item_ids": ["i01"]}),
                await http.get("/v1/popular"),
            ]

    assert tuple(answer.status_code for answer in answers) == statuses
    assert answers[0].json() == {"status": words}


async def test_the_docs_page_loads_nothing_from_elsewhere(rest: RestClient) -> None:
    """The page names no other host, and the document's examples have a body."""
    page = (await rest.http.get("/docs")).text
    spec = (await rest.http.get("/openapi.json")).json()

    body = spec["paths"][RECOMMEND]["post"]["requestBody"]["content"]["application/json"]
    assert body["examples"]["example 1"]["value"]["user_id"]
    assert "http" not in page.replace("<!doctype html>", "").replace("<html", "")


@pytest.mark.parametrize(("sent", "field"), [("Grüße".encode(), None), (b"Gr\xfc\xdfe", "x-request-id")])
async def test_a_request_id_is_utf_8(rest: RestClient, sent: bytes, field: str | None) -> None:
    """A UTF-8 id is returned unchanged; other bytes are rejected."""
    answer = await rest.http.post(RECOMMEND, json={"user_id": "long"}, headers={b"x-request-id": sent})

    body = answer.json()
    assert body.get("request_id", "") == ("Grüße" if field is None else "")
    assert body.get("error", {}).get("field") == field
