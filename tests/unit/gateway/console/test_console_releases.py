"""The console's changes of model names: their effects in the store and their rejections."""

import json
from typing import Any

import pytest

from models.registry.release_report import GuardReport, ReleaseReport
from tests.unit.gateway.console.conftest import LEAD_S, NEXT, Console
from tests.unit.gateway.world import NOW_S, VERSION

OF_NEXT = f"/console/names/default/versions/{NEXT}"
SHARES = (0.01, 0.05, 1)
RELEASED = {"stages": [{"share": share, "hold_s": 60} for share in SHARES], "by_hand": True}


async def move(console: Console, path: str, **body: Any) -> Any:
    """Return the default name after a change."""
    return (await console.send("POST", path, **body))["names"][0]


async def test_a_release_goes_through_its_stages_and_ends(console: Console) -> None:
    """A release writes its canary, the caller, and the start of each stage to the store's record."""
    begun = (await move(console, f"{OF_NEXT}:release", **RELEASED))["canary"]
    canary = console.store.record().canary
    moved = (await move(console, f"{OF_NEXT}:stage", seen=begun["id"], stage=1))["canary"]
    outdated = [
        await console.refused("POST", f"{OF_NEXT}:stage", seen=begun["id"], stage=2),
        await console.refused("POST", f"{OF_NEXT}:stop", seen=begun["id"], withdraw=True),
    ]
    ended = await move(console, f"{OF_NEXT}:stop", seen=moved["id"], withdraw=False, reason="enough")

    assert canary is not None
    assert (begun["version"], begun["share"], begun["by"]) == (NEXT, 0.0, "anonymous (console)")
    assert canary.since_ms == (NOW_S + LEAD_S) * 1_000
    assert tuple(stage.share for stage in canary.stages) == SHARES
    assert (moved["stage"], moved["share"]) == (1, 0.01)
    assert [error["field"] for error in outdated] == ["seen", "seen"]
    assert ended["canary"] is None
    assert console.store.record().canary is None
    assert [(move["act"], move["by"]) for move in ended["history"][:3]] == [
        (act, "anonymous (console)") for act in ("end", "share", "release")
    ]


async def test_a_release_that_is_withdrawn_does_not_come_back(console: Console) -> None:
    """A withdrawn version is recorded with its reason and cannot be released or promoted again."""
    seen = (await move(console, f"{OF_NEXT}:release", **RELEASED))["canary"]["id"]

    withdrawn = (await move(console, f"{OF_NEXT}:stop", seen=seen, withdraw=True, reason="bad lists"))["withdrawn"]

    assert [(one["version"], one["reason"]) for one in withdrawn] == [(NEXT, "bad lists")]
    for error in (
        await console.refused("POST", f"{OF_NEXT}:release", **RELEASED),
        await console.refused("POST", f"{OF_NEXT}:promote", seen=VERSION),
    ):
        assert "withdrawn by anonymous (console)" in error["message"]


async def test_a_promotion_and_the_way_back(console: Console) -> None:
    """Promotion and rollback must name the current live version; otherwise the error names it."""
    promoted = await move(console, f"{OF_NEXT}:promote", seen=VERSION)
    late = await console.refused("POST", f"/console/names/default/versions/{VERSION}:promote", seen=VERSION)
    late_back = await console.refused("POST", "/console/names/default:rollback", seen=VERSION)
    back = await move(console, "/console/names/default:rollback", seen=NEXT, reason="worse")

    assert (promoted["live"], promoted["previous"]) == (NEXT, VERSION)
    assert NEXT in late["message"]
    assert (late_back["field"], NEXT in late_back["message"]) == ("seen", True)
    assert (back["live"], back["withdrawn"][0]["version"]) == (VERSION, NEXT)


async def test_the_last_look_is_shown(console: Console) -> None:
    """The last report is shown by its fields, plain text as its reason; before the first analysis it is null."""
    guard = GuardReport(name="errors", state="open", worse_by=None, low=None, high=None, lacks="users")
    report = ReleaseReport(act="stay", outcome="continue", reason="too few", users=(9, 800), guards=(guard,))
    found = [(await move(console, f"{OF_NEXT}:release", **RELEASED))["canary"]]
    for text in (report.encode(), "looks fine"):
        console.store.report_canary(NEXT, text, 1_234)
        found.append((await console.send("GET", "/console/names"))["names"][0]["canary"])

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
async def test_stages_that_are_none_are_refused(
    console: Console, stages: list[tuple[float, float]], field: str
) -> None:
    """Traffic fractions grow from above 0 to at most 1, leave a control group, and each stage has a duration."""
    sent = [{"share": share, "hold_s": hold_s} for share, hold_s in stages]

    assert (await console.refused("POST", f"{OF_NEXT}:release", stages=sent, by_hand=False))["field"] == field
    assert console.store.record().canary is None


async def test_what_is_not_there_is_named(console: Console) -> None:
    """An unknown name, version or stage, and a release that is not active, are rejected."""
    unknown = await console.refused("POST", "/console/names/mail/versions/v2:promote", seen=None)
    no_version = await console.refused("POST", "/console/names/default/versions/v9:promote", seen=VERSION)
    no_release = await console.refused("POST", f"{OF_NEXT}:stage", seen="", stage=1)
    seen = (await move(console, f"{OF_NEXT}:release", **RELEASED))["canary"]["id"]
    no_stage = await console.refused("POST", f"{OF_NEXT}:stage", seen=seen, stage=3)

    assert "the names are default" in json.dumps(unknown)
    assert "no bundle v9" in no_version["message"]
    assert no_release["field"] == "seen"
    assert no_stage["field"] == "stage"
    assert console.store.names() == ["default"]
