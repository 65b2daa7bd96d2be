"""The Feast repository of a stack."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from services.contracts.features import UserFeatures
from services.features.repo import RepoAddress, ensure_applied, import_feast, open_store
from services.features.schema import SERVICE, VIEWS, user_features
from services.settings.addresses import RedisAddress
from tests.support.disk import noted
from tests.support.servers import HOST, Server

NAMES = {view.name for view in VIEWS}


@pytest.fixture
def address(tmp_path: Path, valkey: Server) -> RepoAddress:
    return RepoAddress(tmp_path / "state" / "features", RedisAddress(host=HOST, port=valkey.port))


def test_parts_that_start_at_once_apply_once(address: RepoAddress) -> None:
    """Concurrent processes each ensure that the features are applied; one applies, the rest find them."""

    def start(_part: int) -> tuple[set[str], list[str]]:
        ensure_applied(address)
        store = open_store(address)
        return {view.name for view in store.list_feature_views()}, [
            service.name for service in store.list_feature_services()
        ]

    with ThreadPoolExecutor(3) as parts:
        applied = list(parts.map(start, range(3)))

    assert applied == [(NAMES, [SERVICE])] * 3
    assert not list(address.repo_dir.glob("*.tmp"))


def test_definitions_and_schema_agree(address: RepoAddress) -> None:
    """feature_repo/features.py repeats the schema, which it cannot import; Feast's own loader opens the folder."""
    ensure_applied(address)
    store = import_feast().FeatureStore(repo_path=str(address.repo_dir))

    applied = {
        view.name: {field.name: str(field.dtype) for field in view.schema} for view in store.list_feature_views()
    }
    keys = {view.name: [column.name for column in view.entity_columns] for view in store.list_feature_views()}
    served = {
        feature for view in store.get_feature_service(SERVICE).feature_view_projections for feature in view.features
    }

    assert applied == {view.name: {column.name: str(column.type) for column in view.columns} for view in VIEWS}
    assert keys == {view.name: [key.name for key in view.keys] for view in VIEWS}
    assert user_features({feature.name: None for feature in served}, listed_at_s=None) == UserFeatures()
    assert store.config.online_store.connection_string.startswith(f"{HOST}:{address.redis.port},")


def test_an_interrupted_apply_is_done_by_the_next_process(
    address: RepoAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Feast's initial empty registry does not count as applied."""

    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(import_feast().FeatureStore, "apply", die)
    with pytest.raises(KeyboardInterrupt):
        ensure_applied(address)
    monkeypatch.undo()

    ensure_applied(address)

    assert {view.name for view in open_store(address).list_feature_views()} == NAMES


def test_what_was_applied_is_on_disk_before_it_counts(address: RepoAddress, monkeypatch: pytest.MonkeyPatch) -> None:
    """The definitions mark the repository as applied, so they are written durably only after the registry."""
    calls = noted(monkeypatch)

    ensure_applied(address)

    named = [index for index, call in enumerate(calls) if call.endswith(("-> registry.db", "-> features.py"))]
    assert [calls[index].split(" -> ")[1] for index in named] == ["registry.db", "features.py"]
    assert all(calls[index - 1] == calls[index].split(" -> ")[0] for index in named)


def test_lock_of_a_dead_process_is_taken_over(address: RepoAddress) -> None:
    """A process that dies while applying delays other processes no longer than the timeout."""
    address.repo_dir.mkdir(parents=True)
    (address.repo_dir / ".applying").touch()

    ensure_applied(address, wait_s=0.2)

    assert address.registry_path.exists()


SHARED, REQUESTED = "PROMETHEUS_MULTIPROC_DIR", "PROMETHEUS_MULTIPROCESS_DIR"
PROGRAM = """
import json, os, sys
from prometheus_client import Counter
from services.features.repo import import_feast
import_feast()
import kafka  # reads its schemas by a function that is deprecated
Counter("ours", "made afterwards").inc()
names = [os.environ.get(name) for name in sys.argv[1:]]
print(json.dumps({"torch": "torch" in sys.modules, "names": names}), flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("is_sharing", [True, pytest.param(False, marks=pytest.mark.grid)])
def test_importing_feast_leaves_nothing_behind(tmp_path: Path, is_sharing: bool) -> None:
    """import_feast loads no torch, sets no variable, leaves no file even if killed, and hides no warnings."""
    temporary, shared = tmp_path / "tmp", tmp_path / "shared"
    temporary.mkdir()
    shared.mkdir()
    unset = {name: value for name, value in os.environ.items() if name not in (SHARED, REQUESTED)}
    environment = unset | {"TMPDIR": str(temporary)} | ({SHARED: str(shared)} if is_sharing else {})

    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, SHARED, REQUESTED], env=environment, capture_output=True, text=True, check=False
    )

    assert (done.stderr, bool(done.stdout)) == ("", True)
    assert json.loads(done.stdout) == {"torch": False, "names": [str(shared) if is_sharing else None, None]}
    assert list(temporary.iterdir()) == []
    assert [path.name.split("_")[0] for path in shared.iterdir()] == (["counter"] if is_sharing else [])


LEAN = """
import sys
from pathlib import Path
from services.features.reader import FeatureReader
from services.features.repo import RepoAddress
from services.settings.addresses import RedisAddress
FeatureReader(RepoAddress(Path(sys.argv[1]), RedisAddress(port=1)), num_partitions=4)
before = "pandas" in sys.modules
import feast
print(before, feast.FeatureStore.__module__, feast.protos.__name__, "pandas" in sys.modules)
"""


def test_a_reader_of_features_does_not_load_the_whole_of_feast(address: RepoAddress) -> None:
    """A gateway's process loads no pandas for its features, and the first use of the package loads the package."""
    ensure_applied(address)

    done = subprocess.run(
        [sys.executable, "-c", LEAN, str(address.repo_dir)], capture_output=True, text=True, check=False
    )

    assert (done.stderr, done.stdout.split()) == ("", ["False", "feast.feature_store", "feast.protos", "True"])
