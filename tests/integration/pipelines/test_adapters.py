"""Adapters from the pipeline to a replica, on a real object store: training, publication, canary and shared serving."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from models.registry.bundle import Bundle
from models.registry.canary import CanaryStage
from models.registry.store import BundleStore
from pipelines.options import PipelineOptions
from pipelines.places import Places
from pipelines.training.options import AdapterOptions
from services.contracts.rank import RankRequest, RankResult
from services.items.live_items import LiveItems
from services.items.snapshot import Positions, write_snapshot
from services.llm.ranking.deployment import LlmDeployment
from services.settings.settings import Settings, environment_set
from tests.integration.pipelines.conftest import run
from tests.support.servers import HOST, Server, object_environment
from tests.support.wait import until_answer

TENANT_NAME = "acme.home"


@pytest.fixture(scope="module")
def objects(object_store: Server) -> Iterator[str]:
    """The URL of a bucket's folder, with the credentials in the environment."""
    with environment_set(**object_environment(object_store)):
        yield "s3://bundles/adapters"


def settings_of(folder: Path, objects: str, store: Server) -> Settings:
    """Settings of a machine of its own, with these objects."""
    return Settings(
        state_dir=folder,
        bundle_store=objects,
        names=f"default,{TENANT_NAME}",
        redis_host=HOST,
        redis_port=store.port,
        history_max_items=100,
        keep_bundles=5,
        bundle_poll_s=0.05,
        kv_num_blocks=256,
        kv_kind="int8",
        llm_memory_gib=1.0,
    )


@pytest.fixture(scope="module")
def published(
    tmp_path_factory: pytest.TempPathFactory, objects: str, store: Server, options: PipelineOptions
) -> tuple[Bundle, Bundle]:
    """A parent without a refit, live under the default name, and a tenant's adapter of it."""
    places = Places.from_settings(settings_of(tmp_path_factory.mktemp("trainer"), objects, store))
    run(replace(options, refit=False), places)
    parent = BundleStore.of(places).live()
    adapter = AdapterOptions(adapter_of=parent.version, adapter_rank=2)
    run(replace(options, adapter=adapter, model_name=TENANT_NAME, force=True), places)
    return parent, BundleStore.of(places, TENANT_NAME).live()


def test_an_adapter_of_a_parent_without_refit_keeps_its_decoder(published) -> None:
    """The child has the parent's decoder and codes by content, an adapter of its own, and names its parent."""
    parent, child = published

    assert child.manifest["adapter"]["of"] == parent.version
    assert child.base_prefix_version == parent.base_prefix_version == parent.prefix_version
    assert child.adapter_version
    assert not parent.adapter_version
    child.verify()


async def test_another_machine_serves_parent_adapter_and_canary_on_one_engine(
    published, objects: str, store: Server, tmp_path: Path
) -> None:
    """A replica that downloads the bundles ranks for the tenant's name, and for a canary of the adapter."""
    parent, child = published
    settings = settings_of(tmp_path / "replica", objects, store)
    write_snapshot(settings.items_snapshot, LiveItems(), Positions("", {}))
    replica = await asyncio.to_thread(LlmDeployment, settings, settings.served_names)
    items = parent.catalogue().item_ids[:3]

    async def ranked(name: str, version: str) -> RankResult:
        request = RankRequest(
            request_id="r",
            user_id="u",
            name=name,
            bundle_version=version,
            history_item_ids=items,
            k=5,
            budget_ms=30_000.0,
        )
        reply = await until_answer(lambda: replica.rank(request), lambda reply: isinstance(reply, RankResult))
        assert isinstance(reply, RankResult)
        return reply

    results = {
        (name, bundle.version): await ranked(name, bundle.version)
        for name, bundle in zip(settings.served_names, published, strict=True)
    }
    BundleStore.of(settings).release(child.version, [CanaryStage(0.5, 0.0)], 0)
    canary = await ranked("default", child.version)
    engines = {
        replica._models.peek(name).of(version).bundle.engine for name, version in (*results, ("default", child.version))
    }
    await asyncio.to_thread(replica.__del__)

    assert len(engines) == 1
    assert canary.scores == results[TENANT_NAME, child.version].scores != results["default", parent.version].scores
