"""Everything that the console can be asked, behind one object: live numbers, people, the bundle, the drills.

Knows no transport. Built by the composition root from ports; started and stopped with the doors.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from services.contracts.recommend import check_id
from services.gateway.console.quality import Quality, quality_of
from services.gateway.console.slo import Moment, SloStatus, moments, promises
from services.gateway.console.users import EventTimes, History, Person, UserDirectory, choose_people, read_history
from services.gateway.console.watch import Watch
from services.gateway.tiers.drills import Drills, Part
from services.gateway.tiers.live_bundle import LiveBundle
from services.observability.objectives import Objectives

CHART_S = 120.0
STRIP_S = 3_600.0
NUM_PEOPLE = 12
_PEOPLE_KEPT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Now:
    """The live view. `window_s` is the time that the promises are counted over; drills map a part to the seconds left."""

    window_s: float
    promises: list[SloStatus]
    moments: list[Moment]
    drills: dict[Part, float]
    default_deadline_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """The live bundle and what its evaluation found."""

    version: str
    num_items: int
    code_depth: int
    num_parameters: int | None
    multiply_adds: Mapping[str, int]
    quality: Quality


class ConsoleService:
    """Answers the console. One per process."""

    def __init__(
        self,
        *,
        live: LiveBundle,
        people: UserDirectory,
        event_times: EventTimes,
        watch: Watch,
        drills: Drills,
        objectives: Objectives,
        read_report: Callable[[str], Mapping[str, Any]],
        default_deadline_ms: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._live = live
        self._people = people
        self._event_times = event_times
        self._watch = watch
        self._drills = drills
        self._objectives = objectives
        self._read_report = read_report
        self._default_deadline_ms = default_deadline_ms
        self._clock = clock
        self._known: tuple[float, list[Person]] | None = None
        self._about: About | None = None

    async def start(self) -> None:
        """Begin to sample metrics and to follow the drills."""
        await self._drills.start()
        await self._watch.start()

    async def stop(self) -> None:
        """End what runs in the background."""
        await self._watch.stop()
        await self._drills.stop()

    def now(self) -> Now:
        """Return the live view; while it is asked for, metrics are sampled each second."""
        ring = self._watch.look()
        counted = ring.window(STRIP_S)
        return Now(
            window_s=0.0 if counted is None else round(counted.span_s, 1),
            promises=[] if counted is None else promises(self._objectives, counted),
            moments=moments(ring.steps(CHART_S), self._clock()),
            drills=self._drills.remaining_s(),
            default_deadline_ms=self._default_deadline_ms,
        )

    async def people(self) -> list[Person]:
        """Return some users that the store holds, read anew every few seconds. Raises DependencyAway."""
        now_s = self._clock()
        if self._known is None or now_s - self._known[0] > _PEOPLE_KEPT_S:
            self._known = (now_s, await choose_people(self._people, NUM_PEOPLE))
        return self._known[1]

    async def history(self, user_id: str) -> History:
        """Return a user's history with titles. Raises InvalidRequest or DependencyAway."""
        check_id("user_id", user_id)
        return await read_history(self._people, user_id, self._live.current().catalogue, self._event_times)

    async def about(self) -> About:
        """Tell of the live bundle. Raises DependencyAway before the first one, BundleError when its report is gone."""
        live = self._live.current()
        if self._about is None or self._about.version != live.version:
            report = await asyncio.to_thread(self._read_report, live.version)
            self._about = About(
                version=live.version,
                num_items=len(live.catalogue.item_ids),
                code_depth=live.catalogue.depth,
                num_parameters=live.manifest.get("num_parameters"),
                multiply_adds=live.manifest.get("multiply_adds", {}),
                quality=quality_of(report),
            )
        return self._about

    async def switch(self, wanted: Mapping[Part, bool]) -> dict[Part, float]:
        """Switch parts off (True) or on; gives the seconds that each part which is off has left."""
        await self._drills.switch(wanted)
        return self._drills.remaining_s()
