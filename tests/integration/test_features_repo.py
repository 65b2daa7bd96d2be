"""The Feast repository of a stack. Run: pytest tests/integration/test_features_repo.py."""

import threading
from pathlib import Path

import pytest

from services.features.light_feast import import_feast
from services.features.repo import RepoAddress, ensure_applied, open_store
from services.redis_address import RedisAddress
from tests.servers import HOST, Server

pytestmark = pytest.mark.integration
VIEWS = {"user_history", "user_profile", "item_stats", "user_recommendations", "popularity"}


def address_in(tmp_path: Path, valkey: Server) -> RepoAddress:
    """Name a repository that does not exist yet."""
    return RepoAddress(tmp_path / "state" / "features", RedisAddress(host=HOST, port=valkey.port))


def test_parts_that_start_at_once_apply_once(tmp_path: Path, valkey: Server) -> None:
    """Worker and gateway both ensure that the features are applied; whoever comes second finds them."""
    address = address_in(tmp_path, valkey)
    threads = [threading.Thread(target=ensure_applied, args=(address,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    store = open_store(address)

    assert {view.name for view in store.list_feature_views()} == VIEWS
    assert [service.name for service in store.list_feature_services()] == ["recommend_v1"]


def test_lock_of_a_dead_process_is_taken_over(tmp_path: Path, valkey: Server) -> None:
    """Whoever died while applying keeps nobody from it for longer than the wait."""
    address = address_in(tmp_path, valkey)
    address.repo_dir.mkdir(parents=True)
    (address.repo_dir / ".applying").touch()

    ensure_applied(address, wait_s=0.2)

    assert address.registry_path.exists()


def test_operators_can_use_feast_on_the_state_folder(tmp_path: Path, valkey: Server) -> None:
    """The rendered folder is an ordinary Feast repository: Feast's own loader opens it."""
    address = address_in(tmp_path, valkey)
    ensure_applied(address)

    store = import_feast().FeatureStore(repo_path=str(address.repo_dir))

    assert {view.name for view in store.list_feature_views()} == VIEWS
    assert store.config.online_store.connection_string.startswith(f"{HOST}:{valkey.port},")
