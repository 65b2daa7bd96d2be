"""The console's moves of names: what they change in the store, what they refuse, and who may make them."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from models.registry import BundleStore
from models.release_report import GuardReport, ReleaseReport
from services.contracts.access import Scope
from services.gateway.console.releases import add_releases
from services.gateway.rest.door import create_rest_app
from tests.support.gateway.keys import bearer, stored_key
from tests.unit.gateway.clients import in_process
from tests.unit.gateway.world import MAX_BODY_BYTES, NOW_S, VERSION, World, keyed_access, started_world

NEXT = "v2"
LEAD_S = 10.0
OF_NEXT = f"/console/names/default/versions/{NEXT}"
SHARES = (0.01, 0.05, 1)
RELEASED = {"stages": [{"share": share, "hold_s": 60} for share in SHARES], "by_hand": True}
CALLS = (
    ("GET", "/console/names", None),
    ("POST", "/console/names/default:rollback", {"seen": VERSION}),
    ("POST", f"{OF_NEXT}:promote", {"seen": VERSION}),
    ("POST", f"{OF_NEXT}:release", RELEASED),
    ("POST", f"{OF_NEXT}:stage", {"stage": 1}),
    ("POST", f"{OF_NEXT}:stop", {"withdraw": False}),
)
CHANGES = [call for call in CALLS if call[0] != "GET"]


@dataclass
class Desk:
    """The routes on a store of two versions, the first of which is live: `http` without keys, `keyed` with the keys `admin` and `others`."""

    world: World
    http: httpx.AsyncClient
    keyed: httpx.AsyncClient
    store: BundleStore

    async def move(self, path: str, **body: Any) -> Any:
        """Return what a move answers, which is a success: the default name."""
        answer = await self.http.post(path, json=body)
        assert answer.is_success, answer.text
        return answer.json()["names"][0]

    async def refused(self, path: str, **body: Any) -> Any:
        """Return the error of a move that is refused."""
        answer = await self.http.post(path, json=body)
        assert answer.status_code in {404, 422}
        return answer.json()["error"]


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    """The desk."""
    others = [scope for scope in Scope if scope is not Scope.ADMIN]
    access = keyed_access(tmp_path, stored_key("admin", Scope.ADMIN), stored_key("others", *others))
    async with started_world(tmp_path) as world:
        store = BundleStore(tmp_path / "bundles")
        store.publish(store.open(VERSION).path, NEXT, {"dataset": "toy"})
        apps = [create_rest_app(lambda: world.plane, lambda: b"", MAX_BODY_BYTES, access=one) for one in (None, access)]
        for app in apps:
            add_releases(app, store, LEAD_S, lambda: NOW_S)
        async with in_process(apps[0]) as http, in_process(apps[1]) as keyed:
            yield Desk(world, http, keyed, store)


@pytest.mark.parametrize(("method", "path", "body"), CALLS)
async def test_every_route_needs_admin_and_each_move_is_audited(desk: Desk, method: str, path: str, body: Any) -> None:
    """All other scopes together are not enough; the line of a move names what was moved."""
    with capture_logs() as logs:
        answers = [
            await desk.keyed.request(method, path, json=body, headers=bearer(key)) for key in (None, "others", "admin")
        ]

    audited = [line for line in logs if line["event"] == "audit"]
    assert [answer.status_code for answer in answers[:2]] == [401, 403]
    assert answers[2].status_code not in {401, 403}
    assert [(line["act"], line["who"]) for line in audited[2:]] == (
        [] if method == "GET" else [(f"POST {path}", "admin")]
    )


@pytest.mark.parametrize(("_method", "path", "body"), CHANGES)
async def test_another_sites_page_moves_nothing(desk: Desk, _method: str, path: str, body: Any) -> None:
    """Where no keys are set up a browser would do it for any page."""
    before = desk.store.record()

    answer = await desk.http.post(path, json=body, headers={"sec-fetch-site": "cross-site"})

    assert (answer.status_code, desk.store.record()) == (422, before)


@pytest.mark.parametrize(("_method", "path", "body"), CHANGES)
async def test_a_body_of_a_wrong_shape_is_refused_by_field(desk: Desk, _method: str, path: str, body: Any) -> None:
    """No JSON, a field too many, one too few, one of a wrong type."""
    name = next(iter(body))

    answers = [await desk.http.post(path, json=one) for one in ([], {**body, "more": 1}, {}, {**body, name: {}})]

    assert [answer.status_code for answer in answers] == [422] * 4
    assert [answer.json()["error"]["field"] for answer in answers] == ["body", "more", name, name]


async def test_a_release_goes_through_its_stages_and_ends(desk: Desk) -> None:
    """It is the store's record that is moved: with the salted canary, by whom, and from when a stage holds."""
    begun = (await desk.move(f"{OF_NEXT}:release", **RELEASED))["canary"]
    canary = desk.store.record().canary
    moved = (await desk.move(f"{OF_NEXT}:stage", stage=1))["canary"]
    ended = await desk.move(f"{OF_NEXT}:stop", withdraw=False, reason="enough")

    assert canary is not None
    assert (begun["version"], begun["share"], begun["by"]) == (NEXT, 0.0, "anonymous (console)")
    assert canary.since_ms == (NOW_S + LEAD_S) * 1_000
    assert tuple(stage.share for stage in canary.stages) == SHARES
    assert (moved["stage"], moved["share"]) == (1, 0.01)
    assert ended["canary"] is None
    assert desk.store.record().canary is None
    assert [(move["act"], move["by"]) for move in ended["history"][:3]] == [
        (act, "anonymous (console)") for act in ("end", "share", "release")
    ]


async def test_a_release_that_is_withdrawn_does_not_come_back(desk: Desk) -> None:
    """Its version is on record with the reason, and neither released nor promoted again; the error says by whom."""
    await desk.move(f"{OF_NEXT}:release", **RELEASED)

    withdrawn = (await desk.move(f"{OF_NEXT}:stop", withdraw=True, reason="bad lists"))["withdrawn"]

    assert [(one["version"], one["reason"]) for one in withdrawn] == [(NEXT, "bad lists")]
    for error in (
        await desk.refused(f"{OF_NEXT}:release", **RELEASED),
        await desk.refused(f"{OF_NEXT}:promote", seen=VERSION),
    ):
        assert "withdrawn by anonymous (console)" in error["message"]


async def test_a_promotion_and_the_way_back(desk: Desk) -> None:
    """Both are moves from what the page showed as live: after another move they are refused, and say what is live."""
    promoted = await desk.move(f"{OF_NEXT}:promote", seen=VERSION)
    late = await desk.refused(f"/console/names/default/versions/{VERSION}:promote", seen=VERSION)
    late_back = await desk.refused("/console/names/default:rollback", seen=VERSION)
    back = await desk.move("/console/names/default:rollback", seen=NEXT, reason="worse")

    assert (promoted["live"], promoted["previous"]) == (NEXT, VERSION)
    assert NEXT in late["message"]
    assert (late_back["field"], NEXT in late_back["message"]) == ("seen", True)
    assert (back["live"], back["withdrawn"][0]["version"]) == (VERSION, NEXT)


async def test_the_last_look_is_shown(desk: Desk) -> None:
    """A report by its fields, one in words as the reason; before the first look there is none."""
    guard = GuardReport(name="errors", state="open", worse_by=None, low=None, high=None, lacks="users")
    report = ReleaseReport(act="stay", outcome="continue", reason="too few", users=(9, 800), guards=(guard,))
    found = [(await desk.move(f"{OF_NEXT}:release", **RELEASED))["canary"]]
    for text in (report.encode(), "looks fine"):
        desk.store.report_canary(NEXT, text, 1_234)
        found.append((await desk.http.get("/console/names")).json()["names"][0]["canary"])

    assert found[0]["verdict"] is None
    assert found[1]["verdict"] == json.loads(report.encode())
    assert (found[2]["verdict"]["reason"], found[2]["verdict"]["guards"]) == ("looks fine", [])
    assert [one["looked_ms"] for one in found] == [None, 1_234, 1_234]


@pytest.mark.parametrize(
    ("stages", "field"),
    [
        ([], "stages"),
        ([(0.0, 60)], "stages[0].share"),
        ([(0.5, 60), (0.5, 60)], "stages[1].share"),
        ([(0.5, 60), (1.5, 60)], "stages[1].share"),
        ([(1, 60)], "stages[0].share"),
        ([(0.1, 60), (0.5, -1)], "stages[1].hold_s"),
    ],
)
async def test_stages_that_are_none_are_refused(desk: Desk, stages: list[tuple[float, float]], field: str) -> None:
    """Shares grow from above 0 to at most 1, some users are left to compare with, and each stage has a time."""
    sent = [{"share": share, "hold_s": hold_s} for share, hold_s in stages]

    assert (await desk.refused(f"{OF_NEXT}:release", stages=sent, by_hand=False))["field"] == field
    assert desk.store.record().canary is None


async def test_what_is_not_there_is_named(desk: Desk) -> None:
    """An unknown name makes no new one; an unknown version, a stage that is none and a release that is not under way are refused."""
    unknown = await desk.refused("/console/names/mail/versions/v2:promote", seen=None)
    no_version = await desk.refused("/console/names/default/versions/v9:promote", seen=VERSION)
    no_release = await desk.refused(f"{OF_NEXT}:stage", stage=1)
    await desk.move(f"{OF_NEXT}:release", **RELEASED)
    no_stage = await desk.refused(f"{OF_NEXT}:stage", stage=3)

    assert "the names are default" in json.dumps(unknown)
    assert "no bundle v9" in no_version["message"]
    assert "no release of v2 is under way" in no_release["message"]
    assert no_stage["field"] == "stage"
    assert desk.store.names() == ["default"]
