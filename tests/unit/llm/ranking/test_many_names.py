"""A replica of many names: models are loaded when they are asked for, within a budget of memory."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from models.registry.bundle import Bundle
from models.registry.store import BundleStore
from services.contracts.rank import RankRequest, RankResult
from services.errors import BundleIncomplete
from services.llm.engine.config import EngineConfig
from services.llm.ranking.deployment import LlmDeployment
from services.llm.ranking.engines import Engines
from services.llm.ranking.shared_engines import engine_for
from services.llm.serving.reply import Refusal, RefusalKind
from services.residency.state import Residency
from services.settings.settings import Settings
from tests.support.training.bundles import publish_bundle
from tests.support.wait import until, until_answer

NAMES = ("default", "mail", "news")


def build_request(name: str, version: str) -> RankRequest:
    return RankRequest(
        request_id="r",
        user_id="u",
        name=name,
        bundle_version=version,
        history_item_ids=("i1", "i2"),
        k=5,
        budget_ms=30_000.0,
    )


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Settings with room for two of three models; version vN is live under the N-th name."""
    for index, name in enumerate(NAMES):
        bundle = publish_bundle(tmp_path / "bundles", f"v{index}", seed=index)
        BundleStore(tmp_path / "bundles", name).promote(f"v{index}")
    BundleStore(tmp_path / "bundles").promote("v0")
    return Settings(
        state_dir=tmp_path,
        names=",".join(NAMES),
        bundle_poll_s=0.02,
        kv_num_blocks=64,
        kv_kind="int8",
        llm_memory_gib=2.5 * engine_for(bundle, EngineConfig(), 4).size.total / 2**30,
        llm_min_stay_s=0.0,
    )


async def ranked(replica: LlmDeployment, index: int) -> RankResult:
    """Rank with a name until its model is loaded."""
    request = build_request(NAMES[index], f"v{index}")
    reply = await until_answer(lambda: replica.rank(request), lambda reply: isinstance(reply, RankResult))
    assert isinstance(reply, RankResult)
    return reply


def states(replica: LlmDeployment) -> list[Residency]:
    return [replica._models.state(name) for name in NAMES]


async def test_a_model_is_loaded_once_when_it_is_first_asked_for(replica: LlmDeployment) -> None:
    """No model is loaded at the start; a hundred simultaneous first calls are refused at once and start one load."""
    assert states(replica) == [Residency.ABSENT] * 3

    replies = await asyncio.gather(*(replica.rank(build_request("mail", "v1")) for _ in range(100)))
    result = await ranked(replica, 1)

    assert set(replies) == {Refusal(RefusalKind.LOADING, ("mail",))}
    assert result.bundle_version == "v1"
    assert states(replica) == [Residency.ABSENT, Residency.RESIDENT, Residency.ABSENT]


async def test_the_least_recently_used_model_is_unloaded_for_room(replica: LlmDeployment) -> None:
    """The third model displaces the least recently used model; rankings do not depend on who shares the memory."""
    alone = [(await ranked(replica, index)).item_ids for index in range(2)]
    await ranked(replica, 0)
    await ranked(replica, 2)
    await until(lambda: replica._models.state("mail") is Residency.ABSENT)

    assert states(replica) == [Residency.RESIDENT, Residency.ABSENT, Residency.RESIDENT]
    assert [(await ranked(replica, index)).item_ids for index in range(2)] == alone


async def test_a_loaded_name_follows_its_record(replica: LlmDeployment, settings: Settings) -> None:
    """A promotion of a resident name loads the new version next to the old version, within the budget."""
    await ranked(replica, 1)
    BundleStore(settings.bundle_root, "mail").promote("v0")

    request = build_request("mail", "v0")
    reply = await until_answer(lambda: replica.rank(request), lambda reply: isinstance(reply, RankResult))

    assert isinstance(reply, RankResult)
    assert await replica.rank(build_request("mail", "v1")) == Refusal(RefusalKind.OTHER_BUNDLE, ("v1", "v0"))


def test_a_version_that_cannot_be_loaded_keeps_no_memory(settings: Settings) -> None:
    """The memory of a refused version is given back: only the versions that serve are counted."""
    reserved, store = list[list[str]](), BundleStore(settings.bundle_root)

    def reserve(bundles: Sequence[Bundle]) -> bool:
        reserved.append(sorted(bundle.version for bundle in bundles))
        return True

    def start(bundle: Bundle) -> None:
        if bundle.version == "v1":
            raise BundleIncomplete("v1: refused")

    engines = Engines(store, start, lambda serving: None, reserve)
    store.promote("v1")
    engines.refresh()

    assert engines.is_broken
    assert reserved[0] == ["v0"]
    assert reserved[-2:] == [["v0", "v1"], ["v0"]]


async def test_a_name_that_is_not_served_is_refused(replica: LlmDeployment) -> None:
    """An unknown name is refused and loads nothing."""
    assert await replica.rank(build_request("other", "v0")) == Refusal(RefusalKind.NO_BUNDLE)


async def test_engines_of_many_names_share_one_kv_pool(replica: LlmDeployment) -> None:
    """Engines of one KV layout hold blocks of the same pool."""
    for index in (0, 1):
        await ranked(replica, index)
    memories = [replica._models.peek(name).of(f"v{index}").bundle.engine.memory for index, name in enumerate(NAMES[:2])]

    assert memories[0] is memories[1]
