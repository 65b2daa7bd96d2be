"""The Feast repository of a stack. Run: pytest tests/integration/test_features_repo.py."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from services.features.repo import RepoAddress, ensure_applied, import_feast, open_store
from services.settings.addresses import RedisAddress
from tests.support.disk import noted
from tests.support.servers import HOST, Server

pytestmark = pytest.mark.integration
VIEWS = {"user_history", "user_recommendations", "popularity"}


def address_in(tmp_path: Path, valkey: Server) -> RepoAddress:
    """Name a repository that does not exist yet."""
    return RepoAddress(tmp_path / "state" / "features", RedisAddress(host=HOST, port=valkey.port))


def test_parts_that_start_at_once_apply_once(tmp_path: Path, valkey: Server) -> None:
    """Worker and gateway both ensure that the features are applied; whoever comes second finds them all at once."""
    address = address_in(tmp_path, valkey)

    def start(_part: int) -> tuple[set[str], list[str]]:
        ensure_applied(address)
        store = open_store(address)
        return {view.name for view in store.list_feature_views()}, [one.name for one in store.list_feature_services()]

    with ThreadPoolExecutor(3) as parts:
        found = list(parts.map(start, range(3)))

    assert found == [(VIEWS, ["recommend_v1"])] * 3
    assert not list(address.repo_dir.glob("*.tmp"))


def test_what_died_while_applying_is_applied_by_the_next(
    tmp_path: Path, valkey: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Feast begins with an empty registry: nobody must take that for one to which the features were applied."""
    address = address_in(tmp_path, valkey)

    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(import_feast().FeatureStore, "apply", die)
    with pytest.raises(KeyboardInterrupt):
        ensure_applied(address)
    monkeypatch.undo()

    ensure_applied(address)

    assert {view.name for view in open_store(address).list_feature_views()} == VIEWS


def test_what_was_applied_is_on_disk_before_it_counts(
    tmp_path: Path, valkey: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Definitions mean that they were applied, so that after a loss of power they must not be there without the registry."""
    address, calls = address_in(tmp_path, valkey), noted(monkeypatch)

    ensure_applied(address)

    named = [place for place, call in enumerate(calls) if call.endswith(("-> registry.db", "-> features.py"))]
    assert [calls[place].split(" -> ")[1] for place in named] == ["registry.db", "features.py"]
    assert all(calls[place - 1] == calls[place].split(" -> ")[0] for place in named)


def test_other_definitions_are_applied_anew(tmp_path: Path, valkey: Server) -> None:
    """A stack that is started with a newer source tree knows its features, without a run of the pipeline."""
    address = address_in(tmp_path, valkey)
    ensure_applied(address)
    now = address.definitions_path.read_text()
    address.definitions_path.write_text("# what an older version applied")

    ensure_applied(address)

    assert address.definitions_path.read_text() == now


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
