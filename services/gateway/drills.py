"""Drills: switch the LLM or the feature store off on purpose, to see the lower tiers take over.

A drill wraps a port and raises DependencyUnavailable, so everything behind the port behaves as in a real outage. All
gateway replicas of a node follow one small shared file; a drill ends by itself after a few minutes.
"""

import asyncio
import fcntl
import json
import time
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Protocol

import structlog

from models.files import Stamp, stamp_of, write_durably
from services.contracts.features import RecentPopularity, UserFeatures
from services.contracts.rank import RankRequest, RankResult
from services.errors import DependencyUnavailable
from services.gateway.periodic_task import PeriodicTask
from services.gateway.request.context import Features
from services.gateway.tiers.llm import Llm
from services.gateway.tiers.popular import PopularityWindows

log = structlog.get_logger()

HOLD_S = 300.0
"""Duration after which a drill ends by itself."""

_POLL_S = 1.0
_RETRY_AFTER_S = 0.5


class DrillTarget(StrEnum):
    """A dependency that a drill can switch off."""

    LLM = "llm"
    FEATURES = "features"


class Drills:
    """The dependencies that are off, and their end times. One per process; start it in the serving loop."""

    def __init__(self, path: Path, wall_clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._wall_clock = wall_clock
        self._until: Mapping[DrillTarget, float] = {}
        self._followed: Stamp | None = None
        self._following = PeriodicTask("drills", self._refresh_if_changed, _POLL_S)

    def is_off(self, target: DrillTarget) -> bool:
        """Whether this dependency is switched off now. Costs one dict lookup while no drill runs."""
        return bool(self._until) and _is_running(self._until.get(target, 0.0), self._wall_clock())

    def remaining_s(self) -> dict[DrillTarget, float]:
        """Return the dependencies that are off, with the remaining seconds of each drill."""
        now_s = self._wall_clock()
        return {
            target: round(until_s - now_s, 1) for target, until_s in self._until.items() if _is_running(until_s, now_s)
        }

    async def switch(self, wanted: Mapping[DrillTarget, bool]) -> None:
        """Switch dependencies off (True) or on (False): here at once, elsewhere within a second."""
        self._until = await asyncio.to_thread(self._switch_locked, wanted)

    async def start(self) -> None:
        """Start following the file."""
        await self.refresh()
        self._following.start()

    async def stop(self) -> None:
        """Stop following the file; running drills stay in force in other processes."""
        await self._following.stop()

    async def refresh(self) -> None:
        self._until = await asyncio.to_thread(read_drills, self._path)

    async def _refresh_if_changed(self) -> None:
        """Read the file, in a thread, only if it was replaced."""
        if (stamp := stamp_of(self._path)) != self._followed:
            self._followed = stamp
            await self.refresh()

    def _switch_locked(self, wanted: Mapping[DrillTarget, bool]) -> dict[DrillTarget, float]:
        """Read, change and replace the file under a lock shared by all processes."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return self._rewrite(wanted)

    def _rewrite(self, wanted: Mapping[DrillTarget, bool]) -> dict[DrillTarget, float]:
        now_s = self._wall_clock()
        until = {target: until_s for target, until_s in read_drills(self._path).items() if _is_running(until_s, now_s)}
        for target, is_off in wanted.items():
            until.pop(target, None)
            if is_off:
                until[target] = now_s + HOLD_S
        write_durably(self._path, json.dumps(until).encode())
        return until


def _is_running(until_s: float, now_s: float) -> bool:
    """Whether a drill runs; if the clock is set back, it ends instead of lasting longer."""
    return now_s < until_s <= now_s + HOLD_S


def read_drills(path: Path) -> dict[DrillTarget, float]:
    """Read the end of each drill (Unix seconds); empty if the file is missing or unreadable."""
    try:
        return {DrillTarget(name): float(until_s) for name, until_s in json.loads(path.read_text()).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        log.warning("drills_unreadable", path=str(path), error=repr(error))
        return {}


class DrillableStore(Features, PopularityWindows, Protocol):
    """The feature store, as the data plane and the console use it."""

    async def sample_user_ids(self, limit: int, timeout_s: float) -> list[str]:
        """Return some user ids from the store; may contain duplicates. Raises DependencyUnavailable."""
        ...


class DrilledLlm:
    """The LLM, unavailable during a drill."""

    def __init__(self, llm: Llm, drills: Drills) -> None:
        self._llm = llm
        self._drills = drills

    def replicas(self) -> Sequence[str]:
        return self._llm.replicas()

    async def rank(self, request: RankRequest, timeout_s: float) -> RankResult:
        """Rank. Raises DependencyUnavailable during a drill."""
        if self._drills.is_off(DrillTarget.LLM):
            raise DependencyUnavailable("llm", _RETRY_AFTER_S)
        return await self._llm.rank(request, timeout_s)


class DrilledStore:
    """The feature store, unavailable during a drill."""

    def __init__(self, store: DrillableStore, drills: Drills) -> None:
        self._store = store
        self._drills = drills

    async def read(self, user_id: str, bundle_version: str, timeout_s: float) -> UserFeatures:
        """Read a user. Raises DependencyUnavailable during a drill."""
        self._check()
        return await self._store.read(user_id, bundle_version, timeout_s)

    async def read_many(
        self, user_ids: Sequence[str], bundle_version: str, timeout_s: float
    ) -> Mapping[str, UserFeatures]:
        """Read several users. Raises DependencyUnavailable during a drill."""
        self._check()
        return await self._store.read_many(user_ids, bundle_version, timeout_s)

    async def read_popular(self, timeout_s: float) -> RecentPopularity:
        """Read the popularity windows. Raises DependencyUnavailable during a drill."""
        self._check()
        return await self._store.read_popular(timeout_s)

    async def sample_user_ids(self, limit: int, timeout_s: float) -> list[str]:
        """Return some user ids. Raises DependencyUnavailable during a drill."""
        self._check()
        return await self._store.sample_user_ids(limit, timeout_s)

    def _check(self) -> None:
        if self._drills.is_off(DrillTarget.FEATURES):
            raise DependencyUnavailable("features", _RETRY_AFTER_S)
