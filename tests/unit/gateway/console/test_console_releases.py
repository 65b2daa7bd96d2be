"""The console's changes of model names: their effects in the store and their rejections."""

import json
from typing import Any

from tests.unit.gateway.console.conftest import LEAD_S, NEXT, Console
from tests.unit.gateway.world import NOW_S, VERSION

OF_NEXT = f"/console/names/default/versions/{NEXT}"
SHARES = (0.01, 0.05, 1)
RELEASED = {"stages": [{"share": share, "hold_s": 60} for share in SHARES], "by_hand": True}


async def move(console: Console, path: str, **body: Any) -> Any:
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
    assert (moved["stage"], moved["share"]) == (1, 0.0)
    assert [error["field"] for error in outdated] == ["seen", "seen"]
    assert ended["canary"] is None
    assert console.store.record().canary is None
    assert [(move["act"], move["by"]) for move in ended["history"][:3]] == [
        (act, "anonymous (console)") for act in ("end", "share", "release")
    ]


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
