"""A user gets the same version at both doors, from any gateway, at the standby, and after all have restarted."""

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from benchmarks.faults.processes import StackProcesses
from infra.local.commands.status import inspect_stack
from models.canary import Canary, CanaryStage
from models.registry import BundleStore
from services.contracts.batch import MAX_BATCH
from services.contracts.experiments import place_of
from services.settings.settings import Settings
from tailrace_client import AsyncClient, Recommendation, TailraceError

_AT_ONCE = 4
_DEADLINE_MS = 5_000
_TRIES = 20
_RETRY_S = 1.0


async def measure(settings: Settings, store: BundleStore, version: str, num_users: int) -> Mapping[str, Any]:
    """Release a version to half of the users, request for all at each door in batches, kill the gateways, repeat."""
    since_ms = time.time_ns() // 1_000_000
    canary = store.release(version, (CanaryStage(0.5, 3_600.0),), since_ms, by="benchmark", by_hand=True)
    await asyncio.sleep(5 * settings.bundle_poll_s + 10)
    live = store.live_version()
    assert live is not None
    users = [f"same-{number}" for number in range(num_users)]
    right = [_right(canary, live, user) for user in users]
    rest = f"http://{settings.http_host}:{settings.http_port}"
    doors = {
        "rest": rest,
        "grpc": f"grpc://{settings.grpc_address}",
        "standby": f"http://{settings.inner_host}:{settings.standby_http_port}",
    }
    changes = {door: _num_changed(right, await _versions_at(address, users)) for door, address in doors.items()}
    StackProcesses(settings.state_dir).kill("serve")
    await _until_healthy(settings)
    changes["rest_after_restart"] = _num_changed(right, await _versions_at(rest, users))
    store.end_canary(version, by="benchmark", note="measured")
    shares = sum(one == version for one in right) / num_users
    return {
        "num_users": num_users,
        "num_changes": sum(changes.values()),
        "changes": changes,
        "share": 0.5,
        "share_found": round(shares, 4),
    }


async def _until_healthy(settings: Settings) -> None:
    """Wait until the stack, which was just seen to be unhealthy, is healthy again."""
    for is_wanted in (False, True):
        while all(part.is_healthy for part in await asyncio.to_thread(inspect_stack, settings)) is not is_wanted:  # noqa: ASYNC110 - the stack is outside of this event loop
            await asyncio.sleep(_RETRY_S / 5)


def _right(canary: Canary, live: str, user_id: str) -> str:
    """Return the version that a user must have, by the hash only."""
    return canary.version if place_of(canary.salt, user_id) < canary.stages[0].share else live


def _num_changed(right: list[str], found: list[str]) -> int:
    return sum(one != other for one, other in zip(right, found, strict=True))


async def _versions_at(address: str, users: list[str]) -> list[str]:
    """Return the version that answered each user at a door, with several concurrent calls."""
    places = asyncio.Semaphore(_AT_ONCE)
    async with AsyncClient(address) as client:

        async def answered(part: list[str]) -> list[str]:
            async with places:
                for _ in range(_TRIES):
                    with suppress(TailraceError):
                        answers = await client.recommend_batch(part, k=1, deadline_ms=_DEADLINE_MS)
                        found = [one.bundle_version for one in answers if isinstance(one, Recommendation)]
                        if len(found) == len(part):
                            return found
                    await asyncio.sleep(_RETRY_S)
                raise SystemExit(f"error: no answer for {part[0]} and those after in {_TRIES} tries")

        parts = [users[start : start + MAX_BATCH] for start in range(0, len(users), MAX_BATCH)]
        return [one for found in await asyncio.gather(*map(answered, parts)) for one in found]
