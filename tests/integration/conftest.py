"""Real servers for the tests of one real dependency."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.features.repo import RepoAddress, apply_repo
from services.redis_address import RedisAddress
from tests.servers import HOST, Server, broker_server, valkey_server


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[Server]:
    """A fresh Valkey."""
    server = valkey_server(tmp_path / "valkey")
    server.start()
    yield server
    server.kill()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Server]:
    """A fresh broker without topics."""
    server = broker_server(tmp_path / "broker")
    server.start()
    yield server
    server.kill()


@pytest.fixture
def features(valkey: Server, tmp_path: Path) -> RepoAddress:
    """An applied feature repository on a fresh Valkey."""
    address = RepoAddress(tmp_path / "features", RedisAddress(host=HOST, port=valkey.port), socket_timeout_s=1.0)
    apply_repo(address)
    return address
