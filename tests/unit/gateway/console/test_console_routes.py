"""Every route of the console: required scopes, cross-site calls, and invalid bodies."""

from typing import Any

import pytest
from structlog.testing import capture_logs

from services.contracts.access import Scope
from tests.support.gateway.keys import bearer
from tests.unit.gateway.console.conftest import CART, NEXT, Console
from tests.unit.gateway.world import VERSION

OF_NEXT = f"/console/names/default/versions/{NEXT}"
DRILL = ("POST", "/console/drills", {"llm": "off"}, Scope.ADMIN)
CHANGES = (
    ("PATCH", "/console/items/i01", {"available": False}, Scope.ITEMS),
    ("PUT", "/console/surfaces", {"text": "[cart]\n", "sha256": "0"}, Scope.ADMIN),
    (
        "POST",
        "/console/surfaces:boost",
        {"text": CART, "surface": "cart", "item_id": "i01", "factor": 2.0},
        Scope.ADMIN,
    ),
    ("POST", "/console/surfaces:form", {"text": CART, "surface": "cart"}, Scope.ADMIN),
    ("POST", "/console/surfaces:set", {"text": CART, "surface": "cart", "fields": {"k": 6}}, Scope.ADMIN),
    ("POST", "/console/surfaces:preview", {"text": CART, "surface": "cart", "user_id": "long"}, Scope.ADMIN),
    ("POST", "/console/erasures", {"user_id": "long"}, Scope.ERASE),
    ("POST", "/console/names/default:rollback", {"seen": VERSION}, Scope.ADMIN),
    ("POST", f"{OF_NEXT}:promote", {"seen": VERSION}, Scope.ADMIN),
    ("POST", f"{OF_NEXT}:release", {"stages": [{"share": 0.5, "hold_s": 60}], "by_hand": True}, Scope.ADMIN),
    ("POST", f"{OF_NEXT}:stage", {"seen": "", "stage": 1}, Scope.ADMIN),
    ("POST", f"{OF_NEXT}:stop", {"seen": "", "withdraw": False}, Scope.ADMIN),
)
READS = (
    ("GET", "/", None, None),
    ("GET", "/console/live", None, Scope.RECOMMEND),
    ("GET", "/console/bundle", None, Scope.RECOMMEND),
    ("GET", "/console/models", None, Scope.ADMIN),
    ("GET", "/console/users", None, Scope.ADMIN),
    ("GET", "/console/history?user_id=long", None, Scope.ADMIN),
    ("GET", "/console/items?find=i01", None, Scope.ITEMS),
    ("GET", "/console/surfaces", None, Scope.ADMIN),
    ("GET", "/console/erasures/none", None, Scope.ERASE),
    ("GET", "/console/names", None, Scope.ADMIN),
)  # fmt: skip


@pytest.mark.parametrize(("method", "path", "body", "scope"), [*READS, DRILL, *CHANGES])
async def test_every_route_needs_its_scope_and_each_change_is_audited(
    console: Console, method: str, path: str, body: Any, scope: Scope | None
) -> None:
    """The page is open, each route needs one scope, and every change is audited, without the erased user's id."""
    admitted = {
        None: {None, "reader", "others", "admin"},
        Scope.RECOMMEND: {"reader", "others"},
        Scope.ITEMS: {"others"},
        Scope.ERASE: {"others"},
        Scope.ADMIN: {"admin"},
    }
    with capture_logs() as logs:
        answers = {
            key: await console.keyed.request(method, path, json=body, headers=bearer(key))
            for key in (None, "reader", "others", "admin")
        }

    refused = {key: 401 if key is None else 403 for key in answers.keys() - admitted[scope]}
    audited = [(line["act"], line["who"]) for line in logs if line["event"] == "audit"]
    callers = () if method == "GET" else ("unauthenticated", "reader", "others", "admin")
    assert {key: answer.status_code for key, answer in answers.items() if answer.status_code in {401, 403}} == refused
    assert audited == [(f"{method} {path}", who) for who in callers]
    assert "long" not in str(audited)


@pytest.mark.parametrize(
    ("method", "path", "body", "scope"),
    [route for route in (*READS, DRILL, *CHANGES) if route[3] not in (None, Scope.RECOMMEND)],
)
async def test_another_sites_page_is_refused(console: Console, method: str, path: str, body: Any, scope: Scope) -> None:
    """Without keys, browser headers that name another site are rejected, and nothing changes."""

    async def state() -> object:
        """Read all state that a route may change."""
        return (
            await console.item_ids(),
            console.surfaces.read_text(),
            console.store.record(),
            console.drills.remaining_s(),
        )

    before = await state()
    answers = [
        await console.http.request(method, path, json=body, headers=headers)
        for headers in ({"sec-fetch-site": "cross-site"}, {"origin": "https://elsewhere.example"})
    ]

    assert [answer.status_code for answer in answers] == [422, 422]
    assert [answer.json()["error"]["field"] for answer in answers] == ["sec-fetch-site", "origin"]
    assert await state() == before


@pytest.mark.parametrize(("method", "path", "sent", "_scope"), CHANGES)
async def test_a_body_of_a_wrong_shape_is_refused_by_field(
    console: Console, method: str, path: str, sent: Any, _scope: Scope
) -> None:
    """Invalid JSON, non-objects, unknown, missing and mistyped fields are rejected."""
    name = next(iter(sent))
    bodies = [
        *({"content": content} for content in (b"{", b"[]", b"null")),
        *({"json": document} for document in ({**sent, "more": 1}, {}, {**sent, name: {}})),
    ]
    answers = [await console.http.request(method, path, **body) for body in bodies]

    assert {answer.status_code for answer in answers} == {422}
    assert [answer.json()["error"]["field"] for answer in answers] == ["body", "body", "body", "more", name, name]
