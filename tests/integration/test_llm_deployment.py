"""The LLM on a real local Ray: ranking through the handle, a replica that dies, other versions, and session affinity."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from services.contracts.rank import RankRequest, RankResult
from services.errors import BundleMismatch, BundleNotFound, DeadlineExceeded, DependencyAway, TailraceError
from services.settings.settings import Settings
from tests.support.bundles import publish_bundle

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Ray leaves its log files and sockets to the collector
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Ray's own, at start
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # Ray announces its next defaults
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
APP = f"llm-{os.getpid()}"


def build_request(version: str, user_id: str = "u", **fields) -> RankRequest:
    """Build a request of a user with a history of ten items."""
    known = {
        "request_id": "r",
        "user_id": user_id,
        "bundle_version": version,
        "history_item_ids": tuple(f"i{index}" for index in range(10)),
        "k": 5,
        "budget_ms": 5_000.0,
    }
    return RankRequest(**{**known, **fields})


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Settings over a folder of this test."""
    return Settings(state_dir=tmp_path, bundle_poll_s=0.1, kv_num_blocks=64)


@pytest.fixture
async def started(local_ray) -> AsyncIterator:
    """A function that runs the deployment and returns its handle; the deployment is deleted afterwards."""
    from ray import serve

    from services.llm.handles import LlmHandle
    from services.llm.ranking.deployment import build_llm

    def start(settings: Settings):
        """Run it."""
        ray_handle = serve.run(build_llm(settings), name=APP, route_prefix=None)
        return LlmHandle(ray_handle)

    yield start
    await asyncio.to_thread(serve.delete, APP)


async def rank_until_served(handle, version: str, timeout_s: float = 120.0) -> RankResult:
    """Rank until there is a result."""
    give_up_s = time.monotonic() + timeout_s
    while time.monotonic() < give_up_s:
        try:
            return await handle.rank(build_request(version), timeout_s=1.0)
        except TailraceError as error:
            last = error
        await asyncio.sleep(0.05)
    raise AssertionError(f"{version} does not serve within {timeout_s} s: {last!r}")


def replica_pids() -> list[int]:
    """Return the processes of this test's LLM replicas, by their process titles."""
    titles = {process.pid: " ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])}
    return [pid for pid, title in titles.items() if f"ServeReplica:{APP}:" in title]


async def first_failure(handle, within_s: float) -> TailraceError:
    """Rank until a request fails, and return the error."""
    give_up_s = time.monotonic() + within_s
    while time.monotonic() < give_up_s:
        try:
            await handle.rank(build_request("v1"), timeout_s=5.0)
        except TailraceError as error:
            return error
    raise AssertionError(f"nothing failed within {within_s} s")


async def test_a_replica_ranks_dies_and_comes_back(started, settings) -> None:
    """Without a bundle it refuses; then it ranks, refuses other versions, and keeps to timeouts; a killed replica fails at once and is replaced."""
    handle = started(settings)
    with pytest.raises(BundleNotFound):
        await handle.rank(build_request("v1"), timeout_s=5.0)
    publish_bundle(settings.bundle_root, "v1")

    result = await rank_until_served(handle, "v1")

    assert len(result.item_ids) == 5
    assert result.bundle_version == "v1"
    warm = await handle.rank(build_request("v1"), timeout_s=5.0)
    assert warm.item_ids == result.item_ids
    with pytest.raises(BundleMismatch) as mismatch:
        await handle.rank(build_request("v0"), timeout_s=5.0)
    assert (mismatch.value.wanted, mismatch.value.loaded) == ("v0", "v1")

    with pytest.raises(DeadlineExceeded):
        await handle.rank(build_request("v1"), timeout_s=0.0001)
    assert await handle.rank(build_request("v1"), timeout_s=5.0)

    os.kill(replica_pids()[0], signal.SIGKILL)
    for _ in range(2):
        assert isinstance(await first_failure(handle, within_s=5.0), DependencyAway)

    again = await rank_until_served(handle, "v1")
    assert again.item_ids == result.item_ids


async def test_users_stick_to_a_replica(started, settings) -> None:
    """With two replicas a user's next request finds the context of the last one cached, and both replicas are used."""
    publish_bundle(settings.bundle_root, "v1")
    handle = started(settings.model_copy(update={"llm_replicas": 2, "kv_block_tokens": 4}))
    users = [f"user-{index}" for index in range(12)]

    def history_of(user: int) -> tuple[str, ...]:
        """Return each user a history of their own."""
        return tuple(f"i{(user * 7 + place * (user + 2)) % 30}" for place in range(16))

    async def rank(user: int) -> RankResult:
        """Rank for a user."""
        request = build_request("v1", users[user], history_item_ids=history_of(user))
        return await handle.rank(request, timeout_s=5.0)

    cold = [await rank(user) for user in range(12)]
    warm = [await rank(user) for user in range(12) for _ in range(4)]

    assert all(result.num_cached_tokens == 16 for result in warm)
    assert sum(result.num_cached_tokens for result in cold) < 12 * 16
    assert len(replica_pids()) == 2
