"""Names whose bundles are adapters of one decoder share its engine, its thread and its memory."""

import asyncio
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from models.registry.bundle import Bundle
from models.registry.canary import CanaryStage
from models.registry.store import BundleStore
from services.contracts.rank import RankRequest, RankResult
from services.llm.engine.config import EngineConfig
from services.llm.engine.engine import Engine
from services.llm.ranking.deployment import LlmDeployment, engine_config
from services.llm.ranking.model import load_bundle
from services.llm.ranking.shared_engines import RunningBundle, engine_for
from services.llm.serving.reply import Refusal, RefusalKind
from services.llm.serving.streams import FinishedRequest
from services.residency.state import Eviction, Residency
from services.settings.settings import Settings
from tests.support.training.bundles import publish_adapter, publish_bundle
from tests.support.wait import until, until_answer

NAMES = ("default", "acme.home", "mail", "news")
RANKS = {"acme.home": 2, "mail": 5, "news": 3}


def build_request(name: str, version: str = "") -> RankRequest:
    return RankRequest(
        request_id="r",
        user_id="u",
        name=name,
        bundle_version=version or f"v-{name}",
        history_item_ids=("i1", "i2", "i3"),
        k=8,
        budget_ms=30_000.0,
    )


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Settings of a replica with one live parent, and an adapter of it under each other name. Torch runs."""
    root = tmp_path / "bundles"
    parent = publish_bundle(root, "v-default", seed=0)
    for seed, (name, rank) in enumerate(RANKS.items()):
        publish_adapter(root, f"v-{name}", parent, seed, rank, name)
    return Settings(
        state_dir=tmp_path,
        names=",".join(NAMES),
        bundle_poll_s=0.02,
        kv_num_blocks=64,
        kv_kind="int8",
        llm_memory_gib=1.0,
        llm_min_stay_s=0.0,
    )


async def ranked(replica: LlmDeployment, name: str, version: str = "") -> RankResult:
    """Rank with a name until its model is loaded."""
    request = build_request(name, version)
    reply = await until_answer(lambda: replica.rank(request), lambda reply: isinstance(reply, RankResult))
    assert isinstance(reply, RankResult)
    return reply


def running(replica: LlmDeployment, name: str, version: str = "") -> RunningBundle:
    """Return the running bundle of a loaded name."""
    engines = replica._models.peek(name)
    assert engines is not None
    return engines.of(version or f"v-{name}")


def open_bundle(settings: Settings, name: str) -> Bundle:
    return BundleStore(settings.bundle_root).open(f"v-{name}")


def rank_merged(settings: Settings, name: str) -> RankResult:
    """Rank with an engine of its own, whose weights have the adapter merged in."""
    loaded = load_bundle(open_bundle(settings, name), engine_config(settings), torch.float32, "cpu")
    loaded.engine_call(build_request(name), 10.0)(loaded.engine, "x", 1.0)
    outcomes = []
    while not outcomes:
        outcomes = loaded.engine.step(2.0)
    return loaded.result_of(FinishedRequest(outcomes[0], 2.5, loaded.engine.load()))


async def test_all_names_of_a_decoder_rank_as_merged_weights_on_one_engine(replica, settings) -> None:
    """Parent and adapters, also at once, rank as weights of their own would, in one engine and thread."""
    alone = {name: await ranked(replica, name) for name in NAMES}
    together = dict(zip(NAMES, await asyncio.gather(*(ranked(replica, name) for name in NAMES)), strict=True))

    for name in NAMES:
        expected = rank_merged(settings, name)
        for ranking in (alone[name], together[name]):
            assert (ranking.bundle_version, ranking.item_ids) == (f"v-{name}", expected.item_ids)
            np.testing.assert_allclose(ranking.scores, expected.scores, atol=2e-2)  # keys and values are int8
    assert len({ranking.item_ids for ranking in alone.values()}) == len(NAMES)
    assert len({id(running(replica, name).bundle.engine) for name in NAMES}) == 1
    assert len({id(running(replica, name).thread) for name in NAMES}) == 1


async def test_the_memory_of_a_decoder_counts_once(replica, settings) -> None:
    """Each further adapter takes its own bytes and its catalogue's; the last name of the decoder frees it."""
    sizes = {name: engine_for(open_bundle(settings, name), engine_config(settings), 4).size for name in NAMES}
    table, taken = replica._models._table, []
    for name in NAMES:
        await ranked(replica, name)
        taken.append(table.num_bytes)
    decoder, slots = sizes["mail"].shared.values()

    own = np.cumsum([sizes[name].own for name in NAMES])
    assert taken == [decoder + own[0], *(decoder + slots + own[1:])]
    assert table.bytes_by_name() == {name: sizes[name].own for name in NAMES}
    assert table.shared_bytes == decoder + slots
    assert sizes["mail"].own < decoder < sizes["default"].total


async def evicted(replica: LlmDeployment, name: str) -> None:
    """Unload a name as for room, and wait until it is absent."""
    with replica._models._changed:
        replica._models._table._drain(name, Eviction.ROOM, 0.0)
        replica._models._act()
    await until(lambda: replica._models.state(name) is Residency.ABSENT)


async def test_an_evicted_name_leaves_the_others_on_the_engine(replica) -> None:
    """Names rank as before while others come and go; the last adapter frees the slots, the last name the engine."""
    expected = {name: (await ranked(replica, name)).item_ids for name in NAMES}
    engine, thread = running(replica, "mail").bundle.engine, running(replica, "mail").thread

    await evicted(replica, "default")
    await evicted(replica, "mail")
    assert (await ranked(replica, "news")).item_ids == expected["news"]
    assert (await ranked(replica, "mail")).item_ids == expected["mail"]
    assert (await ranked(replica, "default")).item_ids == expected["default"]
    assert running(replica, "mail").bundle.engine is engine
    for name in ("mail", "news", "acme.home"):
        assert engine._adapters.slots is not None
        await evicted(replica, name)
    await until(lambda: engine._adapters.slots is None)
    assert thread.is_alive
    await evicted(replica, "default")
    await until(lambda: not thread.is_alive)

    assert (await ranked(replica, "news")).item_ids == expected["news"]
    assert running(replica, "news").bundle.engine is not engine


async def test_requests_in_flight_of_an_evicted_name_are_answered(replica, monkeypatch) -> None:
    """A name that drains is unloaded after its last request, which ranks with its adapter."""
    expected = {name: (await ranked(replica, name)).item_ids for name in NAMES}
    engine, goes_on = running(replica, "mail").bundle.engine, threading.Event()
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda now_s: (goes_on.wait(60.0), step(now_s))[1])
    asked = [asyncio.create_task(replica.rank(build_request(name))) for name in ("mail", "news")]
    await until(lambda: running(replica, "mail").thread._step_called_s is not None)
    leaving = asyncio.create_task(evicted(replica, "mail"))
    await until(lambda: replica._models.state("mail") is Residency.DRAINING)

    assert await replica.rank(build_request("mail")) == Refusal(RefusalKind.LOADING, ("mail",))
    goes_on.set()
    replies = await asyncio.gather(*asked)
    await leaving
    assert [reply.item_ids for reply in replies] == [expected["mail"], expected["news"]]


async def test_an_adapter_is_released_by_canary_on_the_engine_of_its_parent(replica, settings) -> None:
    """Live parent and canary adapter rank side by side on one engine; an ended canary leaves the parent there."""
    store = BundleStore(settings.bundle_root)
    alone = await ranked(replica, "default")
    engine = running(replica, "default").bundle.engine
    store.release("v-mail", [CanaryStage(0.5, 0.0)], 0)
    canary = await ranked(replica, "default", "v-mail")
    beside = await ranked(replica, "default")
    assert running(replica, "default", "v-mail").bundle.engine is engine
    store.end_canary("v-mail")
    engines = replica._models.peek("default")
    await until(lambda: engines._serving.loaded.keys() == {"v-default"})

    assert beside.item_ids == alone.item_ids != canary.item_ids == rank_merged(settings, "mail").item_ids
    assert (await ranked(replica, "default")).item_ids == alone.item_ids
    assert await replica.rank(build_request("default", "v-mail")) == Refusal(
        RefusalKind.OTHER_BUNDLE, ("v-mail", "v-default")
    )


@pytest.mark.parametrize(
    "limits", [{"adapter_rank": 1}, {"tensor_parallel_size": 2}, {"adapter_rank": 10**6, "adapter_memory_mib": 1}]
)
def test_an_adapter_that_the_engine_cannot_hold_is_merged(settings, limits) -> None:
    """It gets an engine of its own, with the reason by setting; the parent's key does not change."""
    parent, child = open_bundle(settings, "default"), open_bundle(settings, "mail")
    need = engine_for(child, EngineConfig(**limits), 4)

    assert not need.adapter
    assert need.merged_because.split(":")[0] in limits
    assert need.key != engine_for(child, EngineConfig(), 4).key == engine_for(parent, EngineConfig(), 4).key
    assert need.size.total == engine_for(parent, EngineConfig(), 4).size.total


async def test_a_merged_adapter_ranks_as_a_shared_one(settings, start_replica) -> None:
    """With a limit below the adapter's rank the name has weights of its own, and ranks alike."""
    replica = start_replica(settings.model_copy(update={"llm_adapter_rank": 4}))
    rankings = {name: await ranked(replica, name) for name in NAMES}
    engines: dict[str, Engine] = {name: running(replica, name).bundle.engine for name in NAMES}

    assert rankings["mail"].item_ids == rank_merged(settings, "mail").item_ids
    assert engines["mail"] is not engines["news"] is engines["default"]


async def test_an_adapter_with_a_wrong_file_hurts_no_other_name(replica, settings) -> None:
    """A corrupt adapter, also of the first name to load, is refused; the other names load and rank."""
    path = settings.bundle_root / "v-mail" / "decoder" / "adapter" / "adapter_model.safetensors"
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    await replica.rank(build_request("mail"))
    await until(lambda: replica._models.state("mail") is Residency.RESIDENT)

    assert isinstance(await replica.rank(build_request("mail")), Refusal)
    expected = rank_merged(settings, "news").item_ids
    assert (await ranked(replica, "news")).item_ids == expected
