"""The editor's routes: their changes and rejections."""

import json
from typing import Any

import pytest

from tests.unit.gateway.console.conftest import CART, Console


async def test_a_hidden_item_is_found_gone_and_comes_back(console: Console) -> None:
    """An item is found by its id and can be hidden and shown again."""
    first = (await console.item_ids())[0]
    await console.send("PATCH", f"/console/items/{first}", available=False)
    hidden = await console.item_ids()
    answer = await console.send("GET", f"/console/items?find={first}")
    await console.send("PATCH", f"/console/items/{first}", available=True)

    assert answer["items"][0] | {"categories": None} == {
        "item_id": first, "title": f"Item {int(first[1:])}", "categories": None, "available": False, "is_shown": False,
    }  # fmt: skip
    assert first not in hidden
    assert (await console.item_ids())[0] == first


async def test_a_search_returns_the_exact_id_first_and_ends_at_the_limit(console: Console) -> None:
    """Deleted items are not found; items that only the live catalogue has are."""
    await console.world.plane.items.put_one("item 7", {"title": "Another"})
    await console.world.plane.items.delete(["i07"])
    ids = {
        text: [item["item_id"] for item in (await console.send("GET", f"/console/items?find={text}"))["items"]]
        for text in ("item 7", "ITEM 1", "i0", "nothing", "i")
    }
    empty = await console.refused("GET", "/console/items?find=%20")

    assert ids["item 7"] == ["item 7"]
    assert ids["ITEM 1"] == ["i01", *(f"i{number}" for number in range(10, 20))]
    assert ids["i0"] == [f"i0{number}" for number in range(10) if number != 7]
    assert ids["nothing"] == []
    assert len(ids["i"]) == 20
    assert empty["field"] == "find"


async def test_an_unknown_item_is_neither_hidden_nor_boosted(console: Console) -> None:
    """An unknown item is not found, since a typing error would go unnoticed."""
    boost = {"text": CART, "surface": "cart", "item_id": "nowhere", "factor": 2.0}
    hidden = await console.refused("PATCH", "/console/items/nowhere", available=False)
    boosted = await console.refused("POST", "/console/surfaces:boost", **boost)

    assert [answer["code"] for answer in (hidden, boosted)] == ["not_found"] * 2
    assert not console.world.items.records


async def test_a_draft_is_tried_and_nothing_is_recorded(console: Console) -> None:
    """A preview returns both lists with the moved items, and changes no file, impressions, explanations or counts."""
    now = await console.item_ids(k=None, surface="cart")
    pinned = now[-1]
    draft = f"{CART}[cart.rules]\npins = [{{ item_id = '{pinned}', position = 1 }}]\n"
    tried = await console.send("POST", "/console/surfaces:preview", text=draft, surface="cart", user_id="long")
    before, after = ([item["item_id"] for item in tried[side]["items"]] for side in ("before", "after"))

    assert before == now
    assert after == [pinned, *now[:-1]]
    assert tried["before"]["ruled"] == []
    moved = {item["item_id"]: (item["before"], item["after"], item["rules"]) for item in tried["after"]["ruled"]}
    assert moved[pinned] == (len(now), 1, ["pins"])
    assert console.world.metric("tailrace_surface_answers_total", surface="cart", tier="student") == 1
    assert console.surfaces.read_text() == CART
    assert await console.item_ids(k=None, surface="cart") == now
    assert {json.loads(value)["request_id"] for _, value in console.world.impressions.records} == {"r"}


async def test_a_new_surface_is_tried_beside_none(console: Console) -> None:
    """The preview of a new surface compares it with a request without a surface."""
    draft = {"text": f"{CART}[home]\nk = 2\n", "surface": "home", "user_id": "long"}
    tried = await console.send("POST", "/console/surfaces:preview", **draft)

    assert [item["item_id"] for item in tried["before"]["items"]] == await console.item_ids(k=None)
    assert len(tried["after"]["items"]) == 2


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"text": "[cart"}, "text"),
        ({"text": "#" * 200_000}, "text"),
        ({"text": "[cart]\nkk = 1"}, "cart.kk"),
        ({"text": "[cart]\nfilter = { must = [{ key = 'colour', eq = 'red' }] }"}, "cart.filter.must[0].key"),
        ({"text": "[cart]\n[cart.rules]\npins = [{ item_id = 1, position = 1 }]"}, "cart.rules.pins[0].item_id"),
        ({"surface": "crat"}, "surface"),
        ({"user_id": ""}, "user_id"),
    ],
)
async def test_a_bad_draft_is_neither_tried_nor_saved(console: Console, changed: dict[str, str], field: str) -> None:
    """The error names the path, as for a request."""
    draft = {"text": CART, "surface": "cart", "user_id": "long", **changed}
    sha256 = (await console.send("GET", "/console/surfaces"))["sha256"]

    assert (await console.refused("POST", "/console/surfaces:preview", **draft))["field"] == field
    if text := changed.get("text"):
        assert (await console.refused("PUT", "/console/surfaces", text=text, sha256=sha256))["field"] == field
    assert console.surfaces.read_text() == CART


def nested(depth: int, value: Any = 1) -> Any:
    """Return alternately nested lists and objects."""
    for level in range(depth):
        value = [value] if level % 2 else {"must": value}
    return value


@pytest.mark.parametrize("depth", [6, 50, 150])
@pytest.mark.parametrize("name", ["k", "deadline_ms", "tiers", "boosts", "pins", "blocks", "caps"])
async def test_a_form_nested_deep_is_refused_by_its_field(console: Console, name: str, depth: int) -> None:
    """Values, list entries and rule clauses nested too deep are rejected by their field."""
    for value in (nested(depth), [nested(depth)], [{"where": nested(depth), "factor": 2.0}]):
        form = {"text": CART, "surface": "cart", "fields": {name: value}}
        refused = await console.refused("POST", "/console/surfaces:set", **form)
        assert f".{name}" in refused["field"]


async def test_a_boost_is_drafted_tried_and_saved(console: Console) -> None:
    """After the save the item rises in the surface's answers, and a save based on the older text is rejected."""
    now, read = await console.item_ids(k=None, surface="cart"), await console.send("GET", "/console/surfaces")
    boost = {"text": read["text"], "surface": "cart", "item_id": now[-1], "factor": 100.0}
    text = (await console.send("POST", "/console/surfaces:boost", **boost))["text"]
    unsaved = await console.item_ids(k=None, surface="cart")
    saved = await console.send("PUT", "/console/surfaces", text=text, sha256=read["sha256"])
    late = await console.refused("PUT", "/console/surfaces", text=CART, sha256=read["sha256"])

    assert unsaved == now
    assert (await console.item_ids(k=None, surface="cart"))[0] == now[-1]
    assert (saved["text"], saved["names"], console.surfaces.read_text()) == (text, ["cart"], text)
    assert late["field"] == "sha256"


async def test_a_user_is_erased_with_a_receipt(console: Console) -> None:
    """The erasure writes the same event as `DELETE /v1/users/{id}`, and its receipt can be read."""
    accepted = await console.send("POST", "/console/erasures", user_id="long")
    receipt = await console.send("GET", f"/console/erasures/{accepted['erasure_id']}")
    refused = await console.refused("POST", "/console/erasures", user_id="")
    (key, _), *_ = console.world.events.records

    assert key == b"long"
    assert receipt == accepted
    assert not accepted["is_done_online"]
    assert refused["field"] == "user_id"


async def test_found_states_are_those_of_the_catalogue(console: Console) -> None:
    """An item that is not published yet is available, but not shown."""
    await console.world.plane.items.put_one("soon", {"published_ms": 1_900_000_000_000})
    (item,) = (await console.send("GET", "/console/items?find=soon"))["items"]

    assert (item["available"], item["is_shown"]) == (True, False)
