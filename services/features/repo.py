"""The Feast repository of one stack: copies it to the state folder, applies it, and opens the store.

The definitions are in `feature_repo/` at the top of the source tree; a stack has its own copy, because Feast keeps
absolute paths of the offline tables. Each process opens the store with the address of its own settings.
"""

import importlib.util
import json
import runpy
import shutil
import sys
import tempfile
import threading
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from string import Template
from types import ModuleType
from typing import TYPE_CHECKING, Any

import yaml
from prometheus_client import values

from models.files import rename_durably, scratch_of
from services.errors import EnvironmentFault
from services.settings.addresses import RedisAddress
from services.settings.settings import environment_kept

if TYPE_CHECKING:
    from feast import FeatureStore

_SOURCE = Path(__file__).resolve().parents[2] / "feature_repo"
_IMPORTING = threading.Lock()


@dataclass(frozen=True, slots=True)
class RepoAddress:
    """The location of a stack's feature store. `socket_timeout_s` bounds each exchange with Redis."""

    repo_dir: Path
    redis: RedisAddress
    socket_timeout_s: float = 5.0

    def table_path(self, view: str) -> Path:
        return self.repo_dir / "data" / f"{view}.parquet"

    @property
    def registry_path(self) -> Path:
        """The file of Feast's registry of applied definitions."""
        return self.repo_dir / "registry.db"

    @property
    def definitions_path(self) -> Path:
        """The stack's copy of the definitions that the registry was made from."""
        return self.repo_dir / "features.py"

    def render(self) -> str:
        """Return the text of this stack's feature_store.yaml, without a password."""
        template = Template((_SOURCE / "feature_store.yaml").read_text())
        redis = json.dumps(self._with_timeouts(self.redis.feast_string()))
        return template.substitute(FEATURES_DIR=self.repo_dir.absolute(), REDIS=redis)

    def _with_timeouts(self, redis: str) -> str:
        return f"{redis},socket_timeout={self.socket_timeout_s},socket_connect_timeout={self.socket_timeout_s}"


def open_store(address: RepoAddress) -> "FeatureStore":
    """Open the store and read its registry once. Raises EnvironmentFault when no features were applied."""
    _require_applied(address)
    store = _store(address, address.registry_path)
    store.refresh_registry()  # type: ignore[no-untyped-call]
    return store


def project_of(address: RepoAddress) -> str:
    """Return the name of the applied project. Raises EnvironmentFault when no features were applied."""
    _require_applied(address)
    return str(yaml.safe_load(address.render())["project"])


def served_features(address: RepoAddress, service: str) -> dict[str, list[str]]:
    """Return the features of an applied feature service, by view. Raises EnvironmentFault as `project_of`."""
    _require_applied(address)
    feast_parts()
    from feast.protos.feast.core.Registry_pb2 import Registry

    registry = Registry.FromString(address.registry_path.read_bytes())
    (served,) = (entry.spec.features for entry in registry.feature_services if entry.spec.name == service)
    return {view.feature_view_name: [feature.name for feature in view.feature_columns] for view in served}


def _require_applied(address: RepoAddress) -> None:
    if not address.registry_path.exists():
        raise EnvironmentFault(f"no feature registry at {address.registry_path}; run `tailrace pipeline` first")


def apply_repo(address: RepoAddress) -> None:
    """Create the repository below the state folder and register everything in it. May be repeated.

    Feast writes its registry in place, empty at first, so a new registry is made in a scratch folder and renamed when
    it is complete. A process that opens the store meanwhile, or after a crash here, finds the previous definitions;
    views that are no longer defined disappear. The definitions are written last: if they exist, the registry is
    complete and on disk.
    """
    (address.repo_dir / "data").mkdir(parents=True, exist_ok=True)
    (address.repo_dir / "feature_store.yaml").write_text(address.render())
    definitions, registry = map(scratch_of, _applied(address))
    try:
        shutil.copyfile(_SOURCE / "features.py", definitions)
        _apply(address, definitions, registry)
        rename_durably(registry, address.registry_path)
        rename_durably(definitions, address.definitions_path)
    finally:
        for scratch in (definitions, registry):
            scratch.unlink(missing_ok=True)


def ensure_applied(address: RepoAddress, wait_s: float = 10.0) -> None:
    """Apply the repository unless these definitions are applied already.

    If several processes start at once, one applies and the rest wait.
    """
    address.repo_dir.mkdir(parents=True, exist_ok=True)
    lock = address.repo_dir / ".applying"
    give_up = time.monotonic() + wait_s
    while not _is_applied(address):
        try:
            lock.touch(exist_ok=False)
        except FileExistsError:
            if time.monotonic() > give_up:
                lock.unlink(missing_ok=True)  # its owner died
            time.sleep(0.05)
            continue
        try:
            apply_repo(address)
        finally:
            lock.unlink(missing_ok=True)


def _is_applied(address: RepoAddress) -> bool:
    """Return whether the registry was made of the definitions of this source tree."""
    if not all(path.exists() for path in _applied(address)):
        return False
    return address.definitions_path.read_bytes() == (_SOURCE / "features.py").read_bytes()


def _applied(address: RepoAddress) -> tuple[Path, Path]:
    return address.definitions_path, address.registry_path


def _apply(address: RepoAddress, definitions: Path, registry: Path) -> None:
    feast = import_feast()
    kinds = (feast.Entity, feast.FeatureView, feast.FeatureService)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Feast's FutureWarning at each definition
        objects = [value for value in runpy.run_path(str(definitions)).values() if isinstance(value, kinds)]
        _store(address, registry).apply(objects)


def _store(address: RepoAddress, registry: Path) -> "FeatureStore":
    feast = import_feast()
    from feast.repo_config import RepoConfig

    from services.settings.redis_clients import open_redis

    values = yaml.safe_load(address.render())
    values["registry"]["path"] = str(registry.absolute())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = RepoConfig(**values, repo_path=address.repo_dir)
    store: FeatureStore = feast.FeatureStore(config=config)
    online_store: Any = store._get_provider().online_store
    online_store._client = open_redis(address.redis, address.socket_timeout_s)  # Feast's own keeps its first password
    return store


def import_feast() -> ModuleType:
    """Return the feast package, imported without torch, its own metrics and its warning filters.

    Feast loads torch at import when it is installed, for one conversion: hiding it saves about 180 MB and a second in
    each process that only reads or writes features. Feast's server metrics stay in the process's memory: otherwise they
    would appear among ours in the folder that the processes of a node share, or in a temporary folder per process,
    which remains when the process is killed. Feast sets Python's warning filters such that DeprecationWarnings of all
    later imports are printed into our logs.
    """
    with _IMPORTING:  # a second thread would get a half-initialised module
        package = feast_parts()
        if isinstance(package, _FeastParts):
            _load(package)
        return package


class _FeastParts(ModuleType):
    """The package before its `__init__`, which the first use of an attribute executes."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(import_feast(), name)


def feast_parts() -> ModuleType:
    """Let this process import modules of feast without the whole package, and return the package.

    Feast's `__init__` imports pandas, Dask and more, which takes seconds of processor time and 100 MB in each process.
    Reading and writing rows needs only its messages and the encoding of keys.
    """
    if "feast" not in sys.modules:
        spec = importlib.util.find_spec("feast")
        assert spec is not None, "feast is a locked dependency"
        package = importlib.util.module_from_spec(spec)
        package.__class__ = _FeastParts
        sys.modules["feast"] = package
    return sys.modules["feast"]


def _load(package: ModuleType) -> None:
    """Execute the package's `__init__`."""
    spec = package.__spec__
    assert spec is not None, "feast_parts sets it"
    assert spec.loader is not None, "a package on disk has a loader"
    package.__class__ = ModuleType
    hide_torch = "torch" not in sys.modules
    shared, values.ValueClass = values.ValueClass, values.MutexValue
    if hide_torch:
        sys.modules["torch"] = None  # type: ignore[assignment]  # makes its import fail, as documented
    try:
        with (
            environment_kept(PROMETHEUS_MULTIPROCESS_DIR=tempfile.gettempdir(), PROMETHEUS_MULTIPROC_DIR=None),
            warnings.catch_warnings(),
        ):
            spec.loader.exec_module(package)
    finally:
        values.ValueClass = shared
        if hide_torch:
            del sys.modules["torch"]
