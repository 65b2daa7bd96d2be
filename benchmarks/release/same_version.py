"""The same user gets the same version: at both doors, from whichever gateway, at the standby, and after all of them have started again."""

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import grpc

from benchmarks.faults.processes import StackProcesses
from benchmarks.load.clients import GrpcClient, RestClient
from infra.local.commands.status import inspect_stack
from models.canary import Canary, Stage
from models.registry import BundleStore
from services.contracts import recommend_pb2 as pb
from services.contracts.batch import MAX_BATCH
from services.contracts.experiments import place_of
from services.settings.settings import Settings

_AT_ONCE = 4
_DEADLINE_MS = 5_000
_TRIES = 20
_RETRY_S = 1.0
Versions = list[str]
Ask = Callable[[list[str]], Any]


async def measure(settings: Settings, store: BundleStore, version: str, num_users: int) -> Mapping[str, Any]:
    """Release a version to half of the users and ask for all of them, in calls of a hundred, at each door; then kill the gateways and ask again."""
    since_ms = time.time_ns() // 1_000_000
    canary = store.release(version, (Stage(0.5, 3_600.0),), since_ms, by="benchmark", by_hand=True)
    await asyncio.sleep(5 * settings.bundle_poll_s + 10)
    live = store.live_version()
    assert live is not None
    users = [f"same-{number}" for number in range(num_users)]
    right = [_right(canary, live, user) for user in users]
    changes: dict[str, int] = {}
    async with (
        RestClient(settings.http_host, settings.http_port) as rest,
        GrpcClient(settings.grpc_address) as rpc,
    ):
        changes["rest"] = _num_changed(right, await _ask_all(users, _over_rest(rest)))
        changes["grpc"] = _num_changed(right, await _ask_all(users, _over_grpc(rpc.stub)))
    async with RestClient(settings.inner_host, settings.standby_http_port) as standby:
        changes["standby"] = _num_changed(right, await _ask_all(users, _over_rest(standby)))
    StackProcesses(settings.state_dir).kill("serve")
    await _until_healthy(settings)
    async with RestClient(settings.http_host, settings.http_port) as rest:
        changes["rest_after_restart"] = _num_changed(right, await _ask_all(users, _over_rest(rest)))
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
    """Return the version that a user must have, by the hash alone."""
    return canary.version if place_of(canary.salt, user_id) < canary.stages[0].share else live


def _num_changed(right: Versions, found: Versions) -> int:
    return sum(one != other for one, other in zip(right, found, strict=True))


async def _ask_all(users: list[str], ask: Ask) -> Versions:
    """Return the version that answered each user, some calls at a time."""
    places = asyncio.Semaphore(_AT_ONCE)

    async def answered(part: list[str]) -> Versions:
        async with places:
            for _ in range(_TRIES):
                found: Versions | None = await ask(part)
                if found is not None:
                    return found
                await asyncio.sleep(_RETRY_S)
            raise SystemExit(f"error: no answer for {part[0]} and those after in {_TRIES} tries")

    parts = [users[start : start + MAX_BATCH] for start in range(0, len(users), MAX_BATCH)]
    return [one for found in await asyncio.gather(*map(answered, parts)) for one in found]


def _over_rest(rest: RestClient) -> Ask:
    async def ask(users: list[str]) -> Versions | None:
        body = {"requests": [{"user_id": user, "k": 1} for user in users], "deadline_ms": _DEADLINE_MS}
        status, text = await rest.call(b"POST", b"/v1/recommendations:batch", json.dumps(body).encode())
        if status != 200:
            return None
        answers = json.loads(text)["answers"]
        return [one["bundle_version"] for one in answers] if all("bundle_version" in one for one in answers) else None

    return ask


def _over_grpc(rpc: Any) -> Ask:
    async def ask(users: list[str]) -> Versions | None:
        requests = [pb.RecommendRequest(user_id=user, k=1) for user in users]
        try:
            found = await rpc.RecommendBatch(
                pb.RecommendBatchRequest(requests=requests, deadline_ms=_DEADLINE_MS),
                metadata=(("x-batch-size", str(len(users))),),
            )
        except grpc.aio.AioRpcError:
            return None
        if any(one.HasField("error") for one in found.answers):
            return None
        return [one.recommendation.bundle_version for one in found.answers]

    return ask
