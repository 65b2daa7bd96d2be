"""Drills: switched on one replica, followed by all replicas, and ended by a time limit."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.contracts.features import RecentPopularity
from services.contracts.rank import RankRequest
from services.errors import DependencyUnavailable
from services.gateway.drills import HOLD_S, DrilledLlm, DrilledStore, Drills, DrillTarget, read_drills
from tests.support.clock import Clock
from tests.support.gateway.fakes import FakeFeatures, FakeLlm
from tests.support.wait import until
from tests.unit.gateway.world import user


class FakeStore(FakeFeatures):
    """A feature store that can list its user ids."""

    async def sample_user_ids(self, limit: int, timeout_s: float) -> list[str]:
        return list(self.users)[:limit]


REQUEST = RankRequest(request_id="r", user_id=None, bundle_version="v1", history_item_ids=("i00",), k=2, budget_ms=0.0)


async def test_a_drill_reaches_the_other_replica(tmp_path: Path) -> None:
    """A started replica polls the shared file a few times a second."""
    first, other = (Drills(tmp_path / "run" / "drills.json") for _ in range(2))
    await other.start()

    await first.switch({DrillTarget.FEATURES: True})
    await until(lambda: other.is_off(DrillTarget.FEATURES))
    await other.stop()

    assert other.remaining_s().keys() == {DrillTarget.FEATURES}
    assert all(left_s == round(left_s, 1) for left_s in other.remaining_s().values())


async def test_switches_at_the_same_moment_are_all_kept(tmp_path: Path) -> None:
    """Concurrent switches on one or two replicas neither undo each other nor fail."""
    first, other = (Drills(tmp_path / "drills.json") for _ in range(2))

    for at in (first, other) * 5:
        await first.switch(dict.fromkeys(DrillTarget, False))
        await asyncio.gather(
            *(replica.switch({part: True}) for replica, part in zip((first, at), DrillTarget, strict=True))
        )

        assert read_drills(tmp_path / "drills.json").keys() == set(DrillTarget)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "[" * 100_000,
        '{"llm": 1' + "0" * 400 + "}",
        '{"llm": "soon"}',
        '{"moon": 1}',
        '{"llm": null}',
    ],
)
def test_a_broken_file_means_no_drill(tmp_path: Path, text: str) -> None:
    """A malformed file neither breaks the gateway nor switches a part off."""
    path = tmp_path / "drills.json"
    path.write_text(text)

    assert read_drills(path) == {}


async def test_a_drilled_part_is_unavailable_in_every_call_until_the_drill_ends(tmp_path: Path) -> None:
    """During a drill a call fails as for an unavailable part without reaching it; otherwise it is forwarded."""
    drills, inner = Drills(tmp_path / "drills.json"), FakeLlm(["i01", "i02"], "v1")
    llm, store = DrilledLlm(inner, drills), DrilledStore(FakeStore({"u": user("i00")}), drills)
    calls: list[Callable[[], Any]] = [
        lambda: llm.rank(REQUEST, 1.0),
        lambda: store.read("u", "v1", 1.0),
        lambda: store.read_popular(1.0),
        lambda: store.sample_user_ids(5, 1.0),
    ]

    await drills.switch(dict.fromkeys(DrillTarget, True))
    for call, part in zip(calls, ("llm", "features", "features", "features"), strict=True):
        with pytest.raises(DependencyUnavailable, match=part):
            await call()
    await drills.switch(dict.fromkeys(DrillTarget, False))
    ranked, *read = [await call() for call in calls]

    assert (ranked.item_ids, len(inner.requests)) == (("i01", "i02"), 1)
    assert read == [user("i00"), RecentPopularity([]), ["u"]]


async def test_a_drill_ends_by_itself_or_by_a_switch_and_leaves_the_others(tmp_path: Path, clock: Clock) -> None:
    """Each part has its own end on every replica; the next switch removes ended drills from the file."""
    path = tmp_path / "drills.json"
    first, other = Drills(path, clock), Drills(path, clock)

    async def off_at_both() -> set[DrillTarget]:
        """Return the parts that are off; both replicas must agree."""
        for replica in (first, other):
            await replica.refresh()
            assert replica.remaining_s().keys() == {part for part in DrillTarget if replica.is_off(part)}
        assert first.remaining_s() == other.remaining_s()
        return {*first.remaining_s()}

    await first.switch({DrillTarget.LLM: True})
    clock.now_s += HOLD_S / 2
    await other.switch({DrillTarget.FEATURES: True})
    assert await off_at_both() == {*DrillTarget}
    clock.now_s += HOLD_S / 2
    assert await off_at_both() == {DrillTarget.FEATURES}
    await first.switch({DrillTarget.FEATURES: True})
    assert json.loads(path.read_text()) == {"features": clock.now_s + HOLD_S}
    await other.switch({DrillTarget.FEATURES: False})
    assert await off_at_both() == set()


async def test_a_drill_ends_when_the_clock_is_set_back(tmp_path: Path, clock: Clock) -> None:
    """A drill that would now last longer than its limit is over, and a new drill can begin."""
    drills = Drills(tmp_path / "drills.json", wall_clock=clock)
    await drills.switch({DrillTarget.LLM: True})
    assert drills.is_off(DrillTarget.LLM)

    clock.now_s -= 3_600
    assert (drills.is_off(DrillTarget.LLM), drills.remaining_s()) == (False, {})

    await drills.switch({DrillTarget.LLM: True})
    assert drills.is_off(DrillTarget.LLM)
