"""The editor's routes: what they change, what they refuse, and who may call them."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from services.contracts.access import Scope
from services.contracts.items import ItemState
from services.gateway.console.editor import add_editor
from services.gateway.rest.door import create_rest_app
from tests.support.gateway.keys import bearer, stored_key
from tests.unit.gateway.clients import in_process
from tests.unit.gateway.world import MAX_BODY_BYTES, World, keyed_access, started_world

CART = "[cart]\nk = 4\ntiers = ['student']\n"
CALLS = (
    ("GET", "/console/items?find=i01", None),
    ("PATCH", "/console/items/i01", {"available": False}),
    ("GET", "/console/surfaces", None),
    ("PUT", "/console/surfaces", {"text": "[cart]\n", "sha256": "0"}),
    ("POST", "/console/surfaces:boost", {"text": CART, "surface": "cart", "item_id": "i01", "factor": 2.0}),
    ("POST", "/console/surfaces:form", {"text": CART, "surface": "cart"}),
    ("POST", "/console/surfaces:set", {"text": CART, "surface": "cart", "fields": {"k": 6}}),
    ("POST", "/console/surfaces:preview", {"text": CART, "surface": "cart", "user_id": "long"}),
    ("POST", "/console/erasures", {"user_id": "long"}),
    ("GET", "/console/erasures/none", None),
)
CHANGES = [call for call in CALLS if call[0] != "GET"]


@dataclass
class Editor:
    """The editor on a plane of fakes: `http` without keys, `keyed` with the keys `admin`, and `others`, which has every other scope."""

    world: World
    http: httpx.AsyncClient
    keyed: httpx.AsyncClient
    path: Path

    async def send(self, method: str, path: str, body: Any = None) -> Any:
        """Return the JSON of an answer that is a success."""
        answer = await self.http.request(method, path, json=body)
        assert answer.is_success, answer.text
        return answer.json()

    async def item_ids(self, **fields: Any) -> list[str]:
        """Return the items that the user "long" is recommended."""
        return [item.item_id for item in (await self.world.recommend("long", **fields)).items]


@pytest.fixture
async def editor(tmp_path: Path) -> AsyncIterator[Editor]:
    """The editor, with a file of one surface."""
    path = tmp_path / "surfaces" / "surfaces.toml"
    path.parent.mkdir()
    path.write_text(CART)
    others = [scope for scope in Scope if scope is not Scope.ADMIN]
    access = keyed_access(tmp_path, stored_key("admin", Scope.ADMIN), stored_key("others", *others))
    async with started_world(tmp_path, surfaces_file=path) as world:
        apps = [create_rest_app(lambda: world.plane, lambda: b"", MAX_BODY_BYTES, access=one) for one in (None, access)]
        for app in apps:
            add_editor(app, lambda: world.plane)
        async with in_process(apps[0]) as http, in_process(apps[1]) as keyed:
            yield Editor(world, http, keyed, path)


@pytest.mark.parametrize(("method", "path", "body"), CALLS)
async def test_every_route_needs_admin_and_each_change_is_audited(
    editor: Editor, method: str, path: str, body: Any
) -> None:
    """All other scopes together are not enough; attempts that are refused are audited too, and no line names the erased user."""
    with capture_logs() as logs:
        answers = [
            await editor.keyed.request(method, path, json=body, headers=bearer(key))
            for key in (None, "others", "admin")
        ]

    audited = [line for line in logs if line["event"] == "audit"]
    assert [answer.status_code for answer in answers[:2]] == [401, 403]
    assert answers[2].status_code not in {401, 403}
    assert len(audited) == (0 if method == "GET" else 3)
    assert "user_id" not in str(audited)
    assert "long" not in str(audited)


@pytest.mark.parametrize(("method", "path", "body"), CALLS)
async def test_another_sites_page_is_refused(editor: Editor, method: str, path: str, body: Any) -> None:
    """Where no keys are set up a browser would do it for any page; nothing is changed."""
    before = (await editor.item_ids(), editor.path.read_text())
    answers = [
        await editor.http.request(method, path, json=body, headers=headers)
        for headers in ({"sec-fetch-site": "cross-site"}, {"origin": "https://elsewhere.example"})
    ]

    assert [answer.status_code for answer in answers] == [422, 422]
    assert (await editor.item_ids(), editor.path.read_text()) == before


@pytest.mark.parametrize(("method", "path", "sent"), CHANGES)
async def test_a_body_of_a_wrong_shape_is_refused_by_field(editor: Editor, method: str, path: str, sent: Any) -> None:
    """No JSON, no object, a field too many, one too few, one of a wrong type."""
    name = next(iter(sent))
    wrong = (b"{", b"[]", b"null")
    bodies = [
        *({"content": one} for one in wrong),
        {"json": {**sent, "more": 1}},
        {"json": {}},
        {"json": {**sent, name: []}},
    ]
    answers = [await editor.http.request(method, path, **one) for one in bodies]

    assert {answer.status_code for answer in answers} == {422}
    assert [answer.json()["error"]["field"] for answer in answers] == ["body", "body", "body", "more", name, name]


async def test_a_hidden_item_is_found_gone_and_comes_back(editor: Editor) -> None:
    """By its id, the beginning of it, or words of the title in any case."""
    first = (await editor.item_ids())[0]
    await editor.send("PATCH", f"/console/items/{first}", {"available": False})
    hidden = await editor.item_ids()
    found = await editor.send("GET", f"/console/items?find={first}")
    await editor.send("PATCH", f"/console/items/{first}", {"available": True})

    assert found["items"][0] | {"categories": None} == {
        "item_id": first, "title": f"Item {int(first[1:])}", "categories": None, "available": False, "is_shown": False,
    }  # fmt: skip
    assert first not in hidden
    assert (await editor.item_ids())[0] == first


async def test_a_search_returns_the_exact_id_first_and_ends_at_the_limit(editor: Editor) -> None:
    """Deleted items are not found, those of the live catalogue alone are."""
    await editor.world.plane.items.put_one("item 7", {"title": "Another"})
    await editor.world.plane.items.delete(["i07"])
    ids = {
        text: [one["item_id"] for one in (await editor.send("GET", f"/console/items?find={text}"))["items"]]
        for text in ("item 7", "ITEM 1", "i0", "nothing", "i")
    }
    empty = await editor.http.get("/console/items?find=%20")

    assert ids["item 7"] == ["item 7"]
    assert ids["ITEM 1"] == ["i01", *(f"i{number}" for number in range(10, 20))]
    assert ids["i0"] == [f"i0{number}" for number in range(10) if number != 7]
    assert ids["nothing"] == []
    assert len(ids["i"]) == 20
    assert empty.json()["error"]["field"] == "find"


async def test_hiding_an_unknown_item_is_refused(editor: Editor) -> None:
    """It is not found; nothing is recorded."""
    answer = await editor.http.patch("/console/items/nowhere", json={"available": False})

    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    assert not editor.world.items.records


async def test_a_draft_is_tried_and_nothing_is_recorded(editor: Editor) -> None:
    """Both lists are those of ordinary requests, with what the rules moved; the file, impressions, explanations and counts stay as they were."""
    now = await editor.item_ids(k=None, surface="cart")
    pinned = now[-1]
    draft = f"{CART}[cart.rules]\npins = [{{ item_id = '{pinned}', position = 1 }}]\n"
    tried = await editor.send(
        "POST", "/console/surfaces:preview", {"text": draft, "surface": "cart", "user_id": "long"}
    )
    before, after = ([item["item_id"] for item in tried[side]["items"]] for side in ("before", "after"))

    assert before == now
    assert after == [pinned, *now[:-1]]
    assert tried["before"]["ruled"] == []
    moved = {one["item_id"]: (one["before"], one["after"], one["rules"]) for one in tried["after"]["ruled"]}
    assert moved[pinned] == (len(now), 1, ["pins"])
    assert editor.world.metric("tailrace_surface_answers_total", surface="cart", tier="student") == 1
    assert editor.path.read_text() == CART
    assert await editor.item_ids(k=None, surface="cart") == now
    assert {json.loads(value)["request_id"] for _, value in editor.world.impressions.records} == {"r"}


async def test_a_new_surface_is_tried_beside_none(editor: Editor) -> None:
    """What is in force at a place that has no surface yet is what a request without one gets."""
    draft = {"text": f"{CART}[home]\nk = 2\n", "surface": "home", "user_id": "long"}
    tried = await editor.send("POST", "/console/surfaces:preview", draft)

    assert [item["item_id"] for item in tried["before"]["items"]] == await editor.item_ids(k=None)
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
async def test_a_bad_draft_is_neither_tried_nor_saved(editor: Editor, changed: dict[str, str], field: str) -> None:
    """The error names the path, as it would for a request."""
    draft = {"text": CART, "surface": "cart", "user_id": "long", **changed}
    tried = await editor.http.post("/console/surfaces:preview", json=draft)

    assert (tried.status_code, tried.json()["error"]["field"]) == (422, field)
    if "text" in changed:
        sha256 = (await editor.send("GET", "/console/surfaces"))["sha256"]
        saved = await editor.http.put("/console/surfaces", json={"text": changed["text"], "sha256": sha256})
        assert (saved.status_code, saved.json()["error"]["field"]) == (422, field)
    assert editor.path.read_text() == CART


async def test_a_boost_is_drafted_tried_and_saved(editor: Editor) -> None:
    """The item rises in the surface's answers after the save, and an edit of the text before it is refused then."""
    now, read = await editor.item_ids(k=None, surface="cart"), await editor.send("GET", "/console/surfaces")
    boosted = {"text": read["text"], "surface": "cart", "item_id": now[-1], "factor": 100.0}
    text = (await editor.send("POST", "/console/surfaces:boost", boosted))["text"]
    unsaved = await editor.item_ids(k=None, surface="cart")
    saved = await editor.send("PUT", "/console/surfaces", {"text": text, "sha256": read["sha256"]})
    late = await editor.http.put("/console/surfaces", json={"text": CART, "sha256": read["sha256"]})

    assert unsaved == now
    assert (await editor.item_ids(k=None, surface="cart"))[0] == now[-1]
    assert (saved["text"], saved["names"], editor.path.read_text()) == (text, ["cart"], text)
    assert (late.status_code, late.json()["error"]["field"]) == (422, "sha256")


async def test_boosting_an_unknown_item_is_refused(editor: Editor) -> None:
    """A typing error would have no effect, and nobody would notice."""
    answer = await editor.http.post("/console/surfaces:boost", json={**CALLS[4][2], "item_id": "nowhere"})

    assert answer.status_code == 404


async def test_a_user_is_erased_with_a_receipt(editor: Editor) -> None:
    """As by `DELETE /v1/users/{id}`: the event is the same, and the receipt can be read here."""
    accepted = await editor.send("POST", "/console/erasures", {"user_id": "long"})
    receipt = await editor.send("GET", f"/console/erasures/{accepted['erasure_id']}")
    refused = await editor.http.post("/console/erasures", json={"user_id": ""})
    (key, _), *_ = editor.world.events.records

    assert key == b"long"
    assert receipt == accepted
    assert not accepted["is_done_online"]
    assert refused.json()["error"]["field"] == "user_id"


async def test_found_states_are_those_of_the_catalogue(editor: Editor) -> None:
    """An item whose time has not come is available, and not shown."""
    await editor.world.plane.items.put_one("soon", {"published_ms": 1_900_000_000_000})
    (found,) = (await editor.send("GET", "/console/items?find=soon"))["items"]

    assert (found["available"], found["is_shown"]) == (ItemState(item_id="soon").available, False)
