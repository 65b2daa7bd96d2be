"""Batches of users, similar items and popular items, by the same cases through both doors."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.contracts.access import Scope
from services.contracts.batch import MAX_BATCH
from services.gateway.call.guard import Access
from tests.support.gateway.keys import stored_key
from tests.unit.gateway.clients import Door
from tests.unit.gateway.world import World, keyed_access, user

KEYED = {"authorization": "Bearer shop"}


def item_ids(body: Mapping[str, Any]) -> list[str]:
    return [item["item_id"] for item in body["items"]]


async def test_each_entry_is_answered_as_if_it_came_alone(door: Door, world: World) -> None:
    """Entries get the answers of single requests, in order, with one store read; a wrong entry gets its error."""
    entries = [{"user_id": name, "k": 2} for name in ("listed", "long", "short", "nobody")]
    alone = [(await door.recommend(entry)).body for entry in entries]
    wrong = [
        {"user_id": "long", "k": 0},
        {"user_id": "long", "deadline_ms": 7},
        {"filters": {"categories": ["zz"]}, "user_id": "a"},
    ]

    reply = await door.batch({"requests": [*entries, *wrong], "deadline_ms": 700})

    answers = reply.body["answers"]
    assert reply.code == "ok"
    assert [(answer["tier"], answer["reason"], item_ids(answer)) for answer in answers[:4]] == [
        (answer["tier"], answer["reason"], item_ids(answer)) for answer in alone
    ]
    assert {answer["deadline_ms"] for answer in answers[:4]} == {700}
    assert [(answer["error"]["code"], answer["error"]["field"]) for answer in answers[4:]] == [
        ("invalid_request", name) for name in ("k", "deadline_ms", "filters.categories[0]")
    ]
    assert len({answer.get("request_id") or answer["error"]["request_id"] for answer in answers}) == 7
    assert world.features.read_together == [("listed", "long", "short", "nobody", "a")]
    refused = {"door": door.name, "tier": "none", "reason": "none", "code": "invalid_request"}
    assert world.metric("tailrace_requests_total", **refused) == 3


async def test_an_entrys_own_id_is_kept_and_others_are_made_of_the_calls(door: Door) -> None:
    """An entry without a valid id gets an id made from the call's; its error names the field."""
    entries = [{"user_id": "a", "request_id": "mine"}, {"user_id": "b"}, {"user_id": "c", "request_id": "r" * 300}]

    reply = await door.batch({"requests": entries}, {"x-request-id": "call"})

    first, second, third = reply.body["answers"]
    assert (first["request_id"], second["request_id"]) == ("mine", "call.1")
    assert (third["error"]["request_id"], third["error"]["field"]) == ("call.2", "request_id")


@pytest.mark.parametrize(
    ("body", "headers", "field"),
    [
        ({"requests": []}, {}, "requests"),
        ({"requests": [{"user_id": "a"}] * (MAX_BATCH + 1)}, {}, "requests"),
        ({"requests": [{"user_id": "a"}]}, {"x-batch-size": "2"}, "x-batch-size"),
        ({"requests": [{"user_id": "a"}]}, {"x-batch-size": "one"}, "x-batch-size"),
        ({"requests": [{"user_id": "a"}]}, {"x-deadline-ms": "0"}, "x-deadline-ms"),
        *(({"requests": [{"user_id": "a"}], "deadline_ms": ms}, {}, "deadline_ms") for ms in (0, 60_001)),
    ],
)
async def test_a_wrong_batch_is_refused_whole(
    door: Door, body: dict[str, Any], headers: dict[str, str], field: str
) -> None:
    """A wrong number of entries, a size other than the edge's header or a deadline out of range is named."""
    reply = await door.batch(body, headers)

    assert (reply.code, reply.field) == ("invalid_request", field)


def asked(first: int, num: int, user_id: str = "long") -> dict[str, Any]:
    """Return a request with `num` conditions that no other range of `first` shares."""
    return {
        "user_id": user_id,
        "filters": {"must": [{"key": "popularity", "range": {"gte": -number}} for number in range(first, first + num)]},
    }


async def test_requests_of_a_batch_have_one_budget_of_tests(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal filters count once; only the entry that exceeds the budget is rejected, by its field."""
    monkeypatch.setattr("services.items.expression.MAX_TESTS", 40)
    entries = [asked(10 * number, 10) for number in range(4)]
    reply = await door.batch({"requests": [*entries, *entries, asked(0, 5), {"user_id": "long"}]})

    fields = [answer["error"]["field"] if "error" in answer else None for answer in reply.body["answers"]]
    assert fields == [None] * 8 + ["filters", None]


async def test_a_request_has_a_budget_of_tests(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """Conditions of filters, boosts and blocks, times the items tested, share a budget; the error names the clause."""
    clauses = [{"should": asked(10 * number, 10)["filters"]["must"]} for number in range(4)]
    request = {**asked(0, 10), "rules": {"boosts": [{"where": clauses[1], "factor": 2.0}], "blocks": clauses[2:]}}
    monkeypatch.setattr("services.items.expression.MAX_TESTS", 40)
    allowed = await door.recommend(request)
    monkeypatch.setattr("services.items.expression.MAX_TESTS", 39)
    refused = await door.recommend(request)
    monkeypatch.setattr("services.items.expression.MAX_CELLS", 1_000)
    too_many_items = await door.recommend(request)

    assert allowed.code == "ok"
    assert (refused.code, refused.field) == ("invalid_request", "rules.blocks[1]")
    assert (too_many_items.code, too_many_items.field) == ("invalid_request", "rules.boosts[0].where")


async def test_a_batch_whose_features_cannot_be_read_is_answered(door: Door, world: World) -> None:
    """If the store fails, each entry gets the answer of a single request without features."""
    world.features.error = ConnectionError("gone")

    reply = await door.batch({"requests": [{"user_id": "listed"}, {"user_id": "long"}]})

    assert [answer["reason"] for answer in reply.body["answers"]] == ["features_unavailable"] * 2


async def test_a_late_batch_ends_with_its_deadline(door: Door, world: World) -> None:
    """Waiting entries share the call's deadline: a model that never answers costs the call one deadline in total."""
    world.llm.delay_s = 3_600.0
    began_s = asyncio.get_running_loop().time()

    reply = await door.batch({"requests": [{"user_id": "long"}] * MAX_BATCH, "deadline_ms": 300})

    assert asyncio.get_running_loop().time() - began_s < 30
    assert len(reply.body["answers"]) == MAX_BATCH
    assert all(answer["items"] for answer in reply.body["answers"])


@pytest.fixture
def access(request: pytest.FixtureRequest, tmp_path: Path) -> Access | None:
    """A key with the daily quota of the test's parameter; None (open to all) without a parameter."""
    daily_quota: int | None = getattr(request, "param", None)
    if daily_quota is None:
        return None
    return keyed_access(tmp_path, stored_key("shop", *Scope).model_copy(update={"daily_quota": daily_quota}))


@pytest.mark.usefixtures("access")
@pytest.mark.parametrize("access", [10], indirect=True)
async def test_a_batch_uses_as_much_quota_as_it_holds_requests(door: Door) -> None:
    """A batch spends one call per entry; a rejected batch spends nothing, an impossible batch one call."""
    eleven, seven, four, two = [{"requests": [{"user_id": "a"}] * size} for size in (11, 7, 4, 2)]

    never, first, refused, last = [await door.batch(body, KEYED) for body in (eleven, seven, four, two)]

    assert (never.code, never.field) == ("invalid_request", "requests")
    assert (first.code, first.limits["remaining"]) == ("ok", "2")
    assert refused.code == "quota_exceeded"
    assert (last.code, last.limits["remaining"]) == ("ok", "0")


SIMILAR: list[tuple[str, list[str], dict[str, Any], list[str], list[str]]] = [
    ("one item", ["i05"], {"k": 3}, ["i06", "i07", "i08"], ["similar"] * 3),
    (
        "filled up by popularity",
        ["i05"],
        {"k": 5},
        ["i06", "i07", "i08", "i00", "i01"],
        ["similar"] * 3 + ["popular"] * 2,
    ),
    ("a cart", ["i05", "i06"], {"k": 3}, ["i07", "i08", "i09"], ["similar"] * 3),
    ("a category", ["i05"], {"k": 2, "filters": {"categories": ["even"]}}, ["i06", "i08"], ["similar"] * 2),
    ("excluded", ["i05"], {"k": 2, "exclude_item_ids": ["i06"]}, ["i07", "i08"], ["similar"] * 2),
    ("seen", ["i18"], {"user_id": "long", "k": 2}, ["i19", "i04"], ["similar", "popular"]),
    ("seen items wanted", ["i18"], {"user_id": "long", "k": 2, "exclude_seen": False}, ["i19", "i00"], ["similar"] * 2),
    ("disliked", ["i18"], {"user_id": "hater", "k": 2, "exclude_seen": False}, ["i00", "i01"], ["similar"] * 2),
    ("recent items", ["i05"], {"recent_item_ids": ["i06"], "k": 2}, ["i07", "i08"], ["similar"] * 2),
]


@pytest.mark.parametrize(
    ("named", "body", "expected", "sources"), [case[1:] for case in SIMILAR], ids=[case[0] for case in SIMILAR]
)
async def test_similar_items_are_neighbours_that_may_be_shown(
    door: Door, world: World, named: list[str], body: dict[str, Any], expected: list[str], sources: list[str]
) -> None:
    """Nearest items first, excluding named, seen, disliked and filtered items; popular items fill the list."""
    world.features.users["hater"] = replace(user("i03"), disliked_item_ids=("i19",))

    reply = await door.similar(named, body)

    assert (reply.code, reply.body["tier"], reply.body["reason"]) == ("ok", "similar", "similar_asked")
    assert item_ids(reply.body) == expected
    assert [item["source"] for item in reply.body["items"]] == sources


@pytest.mark.parametrize("named", [["zz"], ["i05", "zz"], ["a/b c%"]])
async def test_an_unknown_item_is_named(door: Door, named: list[str]) -> None:
    """An unknown item is not found, and the error names it."""
    reply = await door.similar(named, {})

    assert reply.code == "not_found"
    assert repr(named[-1]) in reply.message


async def test_under_strain_similar_items_come_from_memory(door: Door, world: World) -> None:
    """A shed request still gets neighbours, but does not read the store."""
    world.strain(1)
    world.features.error = AssertionError("nothing may be read")

    reply = await door.similar(["i05"], {"user_id": "long", "k": 2})

    assert (reply.body["tier"], item_ids(reply.body)) == ("similar", ["i06", "i07"])
    assert reply.body.get("newest_event_time_ms") is None


POPULAR: list[tuple[str | None, str | None, Sequence[str], Sequence[float] | None]] = [
    (None, None, ["i07", "i00", "i01"], None),
    ("1h", None, ["i09", "i07", "i00"], [5.0, 2.0, 0.0]),
    ("24h", "odd", ["i07", "i01", "i03"], [30.0, 0.0, 0.0]),
    ("7d", None, ["i07", "i00", "i01"], [0.0, 0.0, 0.0]),
]


@pytest.mark.parametrize(("window", "category", "expected", "scores"), POPULAR)
async def test_popular_items_are_the_tiers_own_numbers(
    door: Door, world: World, window: str | None, category: str | None, expected: list[str], scores: list[float] | None
) -> None:
    """Items with users in the window come first, with the number of users as score; unknown items are skipped."""
    world.features.popular = [("i07", 100.0)]
    world.features.windows = {"1h": [("gone", 9), ("i09", 5), ("i07", 2)], "24h": [("i08", 40), ("i07", 30)]}
    await world.plane.popular.refresh()

    reply = await door.popular(window=window, category=category, k=3)

    assert (reply.body["tier"], reply.body["reason"]) == ("popular", "popular_asked")
    assert item_ids(reply.body) == expected
    if scores is not None:
        assert [item["score"] for item in reply.body["items"]] == scores


@pytest.mark.parametrize(
    ("sent", "field"),
    [({"window": "2h"}, "window"), ({"category": "zz"}, "filters.categories[0]"), ({"k": 0}, "k"), ({"k": 10**6}, "k")],
)
async def test_a_wrong_request_for_popular_items_is_refused(door: Door, sent: dict[str, Any], field: str) -> None:
    """The error names the wrong field."""
    reply = await door.popular(**sent)

    assert (reply.code, reply.field) == ("invalid_request", field)
