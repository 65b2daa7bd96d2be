"""Real servers for the integration tests."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis

from benchmarks.load.local_ray import local_ray
from services.features.repo import RepoAddress, apply_repo
from services.settings.addresses import RedisAddress
from services.settings.settings import Settings
from tests.support.gateway.rows import declare_whole
from tests.support.servers import HOST, Server, broker_server, object_server, valkey_server
from tests.support.stream.stream_rig import Rig

_KAFKA = ("ignore:unclosed <s:ResourceWarning", "ignore:.*socket:pytest.PytestUnraisableExceptionWarning")
_FEAST = ("ignore::DeprecationWarning", "ignore::FutureWarning")
IGNORED = {
    "stream": _KAFKA,
    "items": _KAFKA,
    "release": _KAFKA,
    "observability": _KAFKA,
    "features": (*_KAFKA, *_FEAST),
    "pipelines": _FEAST,
    "serving": (*_FEAST, "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
}
"""Harmless warnings by folder.

kafka-python leaves sockets of pending connections, Feast, ibis, pandas and Ray announce future defaults, and Ray leaves
its log files and sockets to the collector.
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "integration" in item.path.parts:
            for warning in IGNORED.get(item.path.parent.name, ()):
                item.add_marker(pytest.mark.filterwarnings(warning))


@pytest.fixture(autouse=True)
def _collected(request: pytest.FixtureRequest) -> Iterator[None]:
    """Collect the sockets that kafka-python leaves, while their warnings are ignored."""
    yield
    if request.path.parent.name in {"stream", "items", "observability", "release"}:
        gc.collect()


@pytest.fixture(scope="session")
def shared_valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The Valkey of all tests, which may kill it."""
    with valkey_server(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture
def valkey(shared_valkey: Server) -> Server:
    """A running and empty Valkey."""
    shared_valkey.ensure_running()
    with Redis(host=HOST, port=shared_valkey.port) as client:
        client.flushall()
    return shared_valkey


@pytest.fixture
def features(valkey: Server, tmp_path: Path) -> RepoAddress:
    """An applied feature repository on the empty Valkey, which covers the empty log of eight partitions."""
    with Redis(host=HOST, port=valkey.port) as client:
        declare_whole(client)
    address = RepoAddress(tmp_path / "features", RedisAddress(host=HOST, port=valkey.port), socket_timeout_s=1.0)
    apply_repo(address)
    return address


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Server]:
    """A fresh broker without topics."""
    with broker_server(tmp_path / "broker") as server:
        yield server


@pytest.fixture(scope="module")
def object_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An object store with a bucket, which tests may kill."""
    with object_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def rig(features: RepoAddress, broker: Server, tmp_path: Path) -> Iterator[Rig]:
    """Start everything except the worker."""
    settings = Settings(
        state_dir=tmp_path,
        redis_port=features.redis.port,
        kafka_bootstrap=broker.address,
        worker_batch_events=7,
        history_max_items=30,
    )
    rig = Rig(settings, features, broker)
    yield rig
    rig.stop_worker()


@pytest.fixture(scope="module")
def running_ray() -> Iterator[None]:
    """A local Ray whose routers wait 5 s, instead of 0.1, for a replica's load.

    While Ray's processes still start, a user's first request would otherwise go to another replica than later requests.
    """
    with local_ray(), pytest.MonkeyPatch.context() as patch:
        from ray.serve._private.request_router.request_router import RequestRouter

        patch.setattr(RequestRouter, "queue_len_response_deadline_s", 5.0)
        yield
