"""The TypeScript client: its types match the document, and it retries and calls like the Python client."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tailrace_client import CallOptions, Client, TailraceError
from tests.support.gateway.plain_doors import running_plain_doors
from tests.support.node import TYPESCRIPT, in_node, npx
from tests.support.scripted_server import Step, running
from tests.support.servers import HOST, free_port

MAX_LINES = 220
ANSWER = {
    "request_id": "r",
    "tier": "llm",
    "reason": "llm_in_time",
    "bundle_version": "v",
    "deadline_ms": 1_000,
    "items": [],
    "stages_ms": {},
    "newest_event_time_ms": None,
    "feature_age_ms": None,
}
OK = Step(200, ANSWER)
AWAY = Step(503, {"error": {"code": "unavailable", "message": "away", "field": None, "fix": None, "request_id": "r"}})
FULL = {"error": {"code": "overloaded", "message": "full", "field": None, "fix": "retry", "request_id": "r"}}
WRONG = {"error": {"code": "invalid_request", "message": "bad", "field": "k", "fix": "send 1", "request_id": "r"}}
SCRIPTS = {
    "answered": [OK],
    "unavailable, then answered": [AWAY, AWAY, OK],
    "unavailable until the budget is spent": [AWAY],
    "closed connection, then answered": [Step(0), OK],
    "a proxy's 502, then answered": [Step(502, "<html>"), OK],
    "refused with a time, then answered": [Step(429, FULL, {"retry-after": "1"}), OK],
    "refused with a time behind the deadline": [Step(429, FULL, {"retry-after": "60"})],
    "refused without a time": [Step(429, FULL)],
    "a wrong field": [Step(422, WRONG)],
    "late": [Step(200, ANSWER, delay_s=2.5)],
    "unavailable, then late": [AWAY, Step(200, ANSWER, delay_s=2.5)],
    "an answer of another server": [Step(200, "<html>")],
}
DEADLINE_MS = 1_500
QUICK = CallOptions(first_pause_ms=1.0, longest_pause_ms=5.0)
CALL = f"""
const client = new Client(address, {{ firstPauseMs: 1, longestPauseMs: 5 }});
const outcome = await caught(client.recommend({{ user_id: "u" }}, {{ deadlineMs: {DEADLINE_MS} }}));
done(outcome.answer ? {{ tier: outcome.answer.tier }} : outcome);
"""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with running_plain_doors() as (http_port, _grpc_port):
        yield f"http://{HOST}:{http_port}"


def test_the_types_are_those_of_the_document(tmp_path: Path) -> None:
    """Regenerating the types writes the committed file."""
    out = tmp_path / "openapi.ts"
    done = npx("openapi-typescript", "../../docs/openapi.json", "--output", out, "--default-non-nullable", "false")

    assert done.returncode == 0, done.stderr
    assert out.read_text() == (TYPESCRIPT / "src/openapi.ts").read_text(), "run `make typescript`"


def test_the_compiler_takes_the_client_and_what_callers_may_write(tmp_path: Path) -> None:
    """The client compiles strictly, is short, and its types reject a wrong field, type, path or answer field."""
    copy = shutil.copytree(TYPESCRIPT, tmp_path / "client", ignore=shutil.ignore_patterns("node_modules", "dist"))
    lines = [
        'import { Client, type Recommendation } from "./client.ts";',
        'const client = new Client("http://host", { apiKey: "key" });',
        (
            'export const answer: Recommendation = await client.recommend({ user_id: "u", k: 5, filters: { '
            'categories: ["a"] } });'
        ),
        "export const score: number | undefined = answer.items[0]?.score;",
        'export const bundle = await client.call("get", "/v1/bundle", {});',
        "export const size: number = bundle.num_items;",
    ]
    wrong = [
        'await client.recommend({ user_id: "u", kk: 5 });',
        "await client.recommend({ user_id: 5 });",
        'await client.call("get", "/v1/bundles", {});',
        'await client.call("post", "/v1/bundle", {});',
        'await client.call("get", "/v1/explanations/{request_id}", {});',
        'await client.record({ user_id: "u" });',
        "export const typo = answer.item;",
        "export const text: string = answer.items[0].item_id;",
    ]
    marked = [text for line in wrong for text in ("// @ts-expect-error", line)]
    (copy / "src/caller.ts").write_text("\n".join([*lines, *marked]) + "\n")
    done = npx("tsc", "--noEmit", "--project", copy)

    assert done.returncode == 0, done.stdout
    assert len((TYPESCRIPT / "src/client.ts").read_text().splitlines()) < MAX_LINES


@pytest.mark.parametrize("script", SCRIPTS)
def test_it_retries_as_the_python_client_does(script: str) -> None:
    """The TypeScript and Python clients end with the same result after the same number of attempts and budgets."""
    with running(SCRIPTS[script]) as server:
        outcome = in_node(CALL, server.address)
        requests = list(server.requests)
    with running(SCRIPTS[script]) as server, Client(server.address, options=QUICK) as client:
        try:
            expected = {"tier": client.recommend("u", deadline_ms=DEADLINE_MS).tier}
        except TailraceError as error:
            expected = {"code": error.code, "field": error.field, "numAttempts": error.num_attempts, "fix": error.fix}
        by_python = len(server.requests)
    given_ms = [int(request["x-deadline-ms"]) for request in requests]

    assert {name: outcome.get(name) for name in expected} == expected
    assert len(requests) == by_python
    assert len({request["body"]["request_id"] for request in requests}) == 1
    assert all(0 < deadline_ms < DEADLINE_MS for deadline_ms in given_ms)
    assert given_ms == sorted(given_ms, reverse=True)


EVENT = {"user_id": "u", "item_id": "i"}
RECORDED = Step(200, {"accepted": 1, "event_ids": ["e"], "unknown_items": []})


@pytest.mark.parametrize(
    "body",
    [EVENT, [EVENT, {**EVENT, "event_id": "mine"}], {"events": [EVENT]}, {"events": [{**EVENT, "event_id": None}]}],
)
@pytest.mark.parametrize("method", ["call", "record"])
def test_a_repeated_event_has_the_same_id(method: str, body: Any) -> None:
    """A retried event has the same ID in every form of the body: the server may have recorded the first attempt."""
    call = 'call("post", "/v1/events", { body })' if method == "call" else "record(body.events ?? body)"
    script = f"const body = {json.dumps(body)}; done(await caught(new Client(address, {{ firstPauseMs: 1 }}).{call}));"
    with running([Step(0), RECORDED]) as server:
        outcome = in_node(script, server.address)
        first, second = (request["body"] for request in server.requests)

    sent = first["events"] if isinstance(first, dict) and "events" in first else first
    assert outcome["answer"]["accepted"] == 1
    assert first == second
    assert all(event["event_id"] for event in (sent if isinstance(sent, list) else [sent]))


@pytest.mark.parametrize("user_id", [".", "..", ""])
def test_a_dot_fits_in_no_path(user_id: str) -> None:
    """A path parameter that `fetch` would read as another path, also encoded, is refused before it is sent."""
    given = f'{{ path: {{ user_id: "{user_id}" }} }}'
    with running([OK]) as server:
        script = (
            f'const call = () => new Client(address).call("delete", "/v1/users/{{user_id}}", {given}); done(await '
            "caught(call()));"
        )
        outcome = in_node(script, server.address)
        assert (outcome["code"], outcome["field"], list(server.requests)) == ("invalid_request", "user_id", [])


def test_nobody_listens() -> None:
    """An absent server is `unreachable`, after as many attempts as the budget allows."""
    outcome = in_node(CALL, f"http://{HOST}:{free_port()}")

    assert (outcome["kind"], outcome["code"], outcome["cause"]) == ("TailraceError", "unreachable", "unreachable")
    assert outcome["numAttempts"] == 11


def test_a_callers_signal_ends_the_call() -> None:
    """An aborted call throws the signal's own reason, not a server error."""
    script = (
        "const signal = AbortSignal.timeout(50); done(await caught(new Client(address).recommend({ user_id: 'u' }, { "
        "deadlineMs: 5_000, signal })));"
    )
    with running([Step(200, ANSWER, delay_s=1.0)]) as server:
        outcome = in_node(script, server.address)

    assert (outcome["kind"], outcome["message"]) == ("DOMException", "The operation was aborted due to timeout")


def test_it_calls_a_real_door(address: str) -> None:
    """The client handles an answer, its next page, events, other operations, and an error that names the field."""
    script = """
    const client = new Client(address + "/");
    const answer = await client.recommend({ user_id: "long", k: 3 }, { deadlineMs: 5_000 });
    const event = { user_id: "long", item_id: answer.items[0].item_id, request_id: answer.request_id, event_id: "e1" };
    const recorded = [await client.record(event), await client.record([event, { user_id: "long", item_id: "i00" }])];
    const bundle = await client.call("get", "/v1/bundle", {});
    const next = await client.recommend({ user_id: "long", k: 3, next: answer.next }, { deadlineMs: 5_000 });
    const hits = await client.call("get", "/v1/search", { query: { q: "item 7", k: 2 } });
    const path = { item_id: "new/1 é?#" };
    await client.call("put", "/v1/items/{item_id}", { path, body: { title: "New" } });
    const item = await client.call("get", "/v1/items/{item_id}", { path });
    done({ pages: [...answer.items, ...next.items].map((one) => one.item_id), hits: hits.items.length, item, tier: answer.tier, num: answer.items.length, deadline: answer.deadline_ms, ids: recorded.map((one) => one.event_ids), items: bundle.num_items,
      wrong: await caught(client.recommend({ user_id: "long", k: -1 })), none: await caught(client.explain("no/such id")) });
    """
    outcome = in_node(script, address)

    assert (outcome["tier"], outcome["num"], outcome["items"]) == ("llm", 3, 20)
    assert 4_000 < outcome["deadline"] < 5_000
    assert len({*outcome["pages"]}) == 6
    assert (outcome["hits"], outcome["item"]["item_id"]) == (2, "new/1 é?#")
    assert outcome["ids"][0] == ["e1"]
    assert outcome["ids"][1][0] == "e1"
    assert len(outcome["ids"][1][1]) == 32
    assert (outcome["wrong"]["code"], outcome["wrong"]["field"]) == ("invalid_request", "k")
    assert outcome["wrong"]["fix"]
    assert outcome["none"]["code"] == "not_found"
