"""The deployment class without Ray: versions, deadlines, errors, and changes of the live bundle."""

import asyncio
import gc
import threading
import time
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from models.registry.canary import Canary, CanaryStage
from models.registry.store import BundleStore
from services.contracts.rank import RankRequest, RankResult
from services.items.live_items import Knowledge
from services.llm.engine.kv.cache import KvCache
from services.llm.ranking import deployment
from services.llm.ranking.deployment import LlmDeployment
from services.llm.ranking.engines import Engines
from services.llm.serving.engine_thread import EngineThread
from services.llm.serving.reply import Refusal, RefusalKind
from services.settings.settings import Settings
from tests.support.training.bundles import point_to, publish_bundle
from tests.support.wait import until


def build_request(version: str, **changes) -> RankRequest:
    """Build a request with a deadline in half a minute."""
    fields = {"request_id": "r", "user_id": "u", "history_item_ids": ("i1", "i2"), "k": 5}
    return RankRequest(**{**fields, "bundle_version": version, "budget_ms": 30_000.0, **changes})


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Settings of a small engine with fast polls. Compiled kernels do not support int8 KV, so torch runs."""
    return Settings(state_dir=tmp_path, bundle_poll_s=0.02, kv_num_blocks=64, max_waiting=16, kv_kind="int8")


def engines_of(replica: LlmDeployment, name: str = "default") -> Engines:
    """Return the engines of a loaded name."""
    engines = replica._models.peek(name)
    assert engines is not None
    return engines


async def served(replica: LlmDeployment, version: str) -> RankResult:
    """Rank until this version is live."""
    give_up_s = time.monotonic() + 60
    while time.monotonic() < give_up_s:
        reply = await replica.rank(build_request(version))
        if isinstance(reply, RankResult):
            return reply
        await asyncio.sleep(0.01)
    raise AssertionError(f"{version} is not live: {reply}")


@pytest.fixture
async def live(replica: LlmDeployment, settings: Settings) -> LlmDeployment:
    """A replica with v1 live."""
    publish_bundle(settings.bundle_root, "v1")
    await served(replica, "v1")
    return replica


async def test_a_request_that_meets_the_end_of_the_old_engine_is_refused_with_the_new_version(
    live, settings, monkeypatch
) -> None:
    """If the version changes before a request is queued and the old thread ends, the refusal names both versions."""
    old = engines_of(live).of("v1")
    publish_bundle(settings.bundle_root, "v2", seed=9)
    await served(live, "v2")
    await asyncio.to_thread(old.thread.join, 5.0)
    seen = iter([old])
    engines, of = engines_of(live), engines_of(live).of
    monkeypatch.setattr(engines, "of", lambda version: next(seen, None) or of(version))

    assert await live.rank(build_request("v1")) == Refusal(RefusalKind.OTHER_BUNDLE, ("v1", "v2"))


def live_kv_bytes() -> int:
    """Return the bytes of the keys and values of all existing engines."""
    gc.unfreeze()
    gc.collect()
    caches = [candidate for candidate in gc.get_objects() if type(candidate) is KvCache]
    slots = [cache.slots(0) for cache in caches]
    tensors = [x for slot in slots for x in (slot.keys, slot.values, slot.key_scales, slot.value_scales)]
    memory = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors if x is not None}
    return sum(memory.values())


async def test_a_swap_under_load_answers_all_from_one_kv_pool(replica, settings, monkeypatch) -> None:
    """During swaps under load, requests get their own version's ranking or a refusal with the other version.

    With both engines present, KV memory is that of one pool: a new engine takes over the old engine's blocks.
    """
    kv_bytes: list[int] = []
    start_thread = deployment.EngineThread

    def measured(*args: object) -> EngineThread:
        """Record the KV bytes and start a new engine's thread while the old engine works."""
        kv_bytes.append(live_kv_bytes())
        return start_thread(*args)

    before = live_kv_bytes()
    monkeypatch.setattr(deployment, "EngineThread", measured)
    publish_bundle(settings.bundle_root, "v0")
    rankings = {"v0": (await served(replica, "v0")).item_ids}
    replies = []

    async def load() -> None:
        """Rank continuously for the live version."""
        version = "v0"
        while version != "v3":
            reply = await replica.rank(build_request(version))
            replies.append(reply)
            if isinstance(reply, Refusal):
                version = reply.details[1]

    async with asyncio.timeout(90):
        loads = [asyncio.create_task(load()) for _ in range(3)]
        for seed in (1, 2, 3):
            await asyncio.to_thread(publish_bundle, settings.bundle_root, f"v{seed}", seed)
            rankings[f"v{seed}"] = (await served(replica, f"v{seed}")).item_ids
        await asyncio.gather(*loads)

    refused = [reply for reply in replies if isinstance(reply, Refusal)]
    assert {reply.kind for reply in refused} <= {RefusalKind.OTHER_BUNDLE}
    assert len(replies) > len(refused) > 0
    ranked = [reply for reply in replies if isinstance(reply, RankResult)]
    assert all(reply.item_ids == rankings[reply.bundle_version] for reply in ranked)
    assert len(set(rankings.values())) == 4
    assert [taken - before for taken in kv_bytes] == [kv_bytes[0] - before] * 4
    assert kv_bytes[0] > before


@pytest.mark.parametrize(
    ("name", "content", "is_candidate"),
    [
        ("decoder/config.json", "{}", False),
        ("decoder/config.json", "{}", True),
        ("manifest.json", '{"files": 1}', False),
    ],
)
async def test_a_broken_bundle_harms_nobody(live, settings, name, content, is_candidate) -> None:
    """A corrupt bundle, live or candidate, is rejected with a log line; the previous version keeps ranking."""
    broken = publish_bundle(settings.bundle_root.parent / "elsewhere" / "bundles", "v2")
    broken.path.rename(settings.bundle_root / "v2")
    (settings.bundle_root / "v2" / name).write_text(content)
    canary = Canary(version="v2", salt="s", stages=(CanaryStage(0.5, 0.0),), by="me", at="now")
    with capture_logs() as lines:
        point_to(settings.bundle_root, *(("v1", canary) if is_candidate else ("v2",)))
        await until(lambda: [line["version"] for line in lines if line["event"] == "bundle_refused"] == ["v2"])

    live.check_health()
    assert isinstance(await live.rank(build_request("v1")), RankResult)
    assert await live.rank(build_request("v2")) == Refusal(RefusalKind.OTHER_BUNDLE, ("v2", "v1"))


def test_a_stopped_replica_stops_once(replica: LlmDeployment) -> None:
    """The collector calls `__del__` again at any time, and its line would appear in the output of other code."""
    with capture_logs() as lines:
        replica.__del__()
        replica.__del__()

    assert [line["event"] for line in lines].count("stopping") == 1


async def test_refusals_have_their_kinds(replica, settings) -> None:
    """A missing bundle, a passed deadline and a full queue are refused with their kinds; the replica stays healthy."""
    absent = await replica.rank(build_request("v1"))
    replica.check_health()
    publish_bundle(settings.bundle_root, "v1")
    await served(replica, "v1")

    late = await replica.rank(build_request("v1", budget_ms=0.0))
    replies = await asyncio.gather(*(replica.rank(build_request("v1")) for _ in range(200)))

    assert absent == Refusal(RefusalKind.NO_BUNDLE)
    assert late == Refusal(RefusalKind.LATE)
    assert {reply.kind for reply in replies if isinstance(reply, Refusal)} == {RefusalKind.OVERLOADED}
    assert any(isinstance(reply, RankResult) for reply in replies)


async def test_a_replica_without_item_states_refuses(live) -> None:
    """A replica that read neither topic nor snapshot ranks nothing: hidden items are unknown to it."""
    live._items.knowledge = Knowledge.NONE
    refused = await live.rank(build_request("v1"))
    live._items.knowledge = Knowledge.SNAPSHOT

    assert refused == Refusal(RefusalKind.BROKEN)
    assert isinstance(await live.rank(build_request("v1")), RankResult)
    live.check_health()


async def test_health_fails_when_the_engine_died(live, monkeypatch) -> None:
    """Requests to a failed engine are refused as broken; after three, the replica is unhealthy."""
    serving = engines_of(live).of("v1")
    monkeypatch.setattr(serving.bundle.engine._runner, "submit", lambda plan: 1 / 0)

    for _ in range(3):
        live.check_health()
        assert await live.rank(build_request("v1")) == Refusal(RefusalKind.BROKEN)
    serving.thread.join(5.0)
    with pytest.raises(RuntimeError, match="engine thread died"):
        live.check_health()


async def test_health_fails_while_a_step_exceeds_its_bound(live, settings, monkeypatch) -> None:
    """A hanging step makes the replica unhealthy, and its end makes it healthy again."""
    engine, goes_on = engines_of(live).of("v1").bundle.engine, threading.Event()
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda now_s: (goes_on.wait(60.0), step(now_s))[1])
    asked = asyncio.create_task(live.rank(build_request("v1")))

    await until(lambda: engines_of(live).of("v1").thread._step_called_s is not None)
    live.check_health()
    engine.expected_step_s = 0.0
    monkeypatch.setattr(live, "_settings", settings.model_copy(update={"engine_max_step_s": 1e-9}))
    with pytest.raises(RuntimeError, match="a step of the engine"):
        live.check_health()
    goes_on.set()
    assert isinstance(await asked, RankResult)
    live.check_health()


async def test_a_bundle_without_models_is_waited_out(live: LlmDeployment, settings: Settings) -> None:
    """With a bundle without models, requests are refused and health checks pass until a trained bundle is live."""
    store, source = BundleStore(settings.bundle_root), settings.state_dir / "items-only"
    source.mkdir()
    (source / "report.json").write_text("{}")
    store.publish(source, "items-only", {"trained": False})
    with capture_logs() as logs:
        store.promote("items-only")
        await until(lambda: engines_of(live)._serving.loaded == {"items-only": None})
        reply = await live.rank(build_request("v1"))
        publish_bundle(settings.bundle_root, "v2", seed=9)
        await served(live, "v2")

    assert isinstance(reply, Refusal)
    assert not [log for log in logs if log["log_level"] in ("error", "warning")]
    live.check_health()


async def test_a_canary_is_ranked_beside_the_live_version(live: LlmDeployment, settings: Settings) -> None:
    """Live version and canary rank from a single KV pool; promotion keeps the engine, an ended canary is refused."""
    store = BundleStore(settings.bundle_root)
    publish_bundle(settings.bundle_root, "v2", seed=9)
    store.promote("v1")
    alone = await served(live, "v1")

    store.release("v2", [CanaryStage(0.5, 0.0)], 0)
    await until(lambda: engines_of(live)._serving.loaded.keys() == {"v1", "v2"})
    candidate = await served(live, "v2")
    beside = await served(live, "v1")
    engines = [engines_of(live).of(version).bundle.engine for version in ("v1", "v2")]
    store.promote("v2")
    await until(lambda: engines_of(live)._serving.loaded.keys() == {"v2"})
    promoted = await served(live, "v2")
    store.release("v1", [CanaryStage(0.5, 0.0)], 0)
    again = await served(live, "v1")
    store.end_canary("v1")
    await until(lambda: engines_of(live)._serving.loaded.keys() == {"v2"})

    assert beside.item_ids == again.item_ids == alone.item_ids != candidate.item_ids == promoted.item_ids
    assert engines[0].memory is engines[1].memory
    assert engines_of(live).of("v2").bundle.engine is engines[1]
    assert await live.rank(build_request("v1")) == Refusal(RefusalKind.OTHER_BUNDLE, ("v1", "v2"))
