"""The Feast repository of one stack: lays it out in the state folder, applies it, and opens the store.

The definitions live in `feature_repo/` at the top of the source tree; a stack has its own copy, because Feast keeps
absolute paths of the offline tables. Each process opens the store with the address of its own settings.
"""

import json
import runpy
import shutil
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

import yaml

from services.errors import EnvironmentFault
from services.features.light_feast import import_feast
from services.redis_address import RedisAddress

if TYPE_CHECKING:
    from feast import FeatureStore

_SOURCE = Path(__file__).resolve().parents[2] / "feature_repo"
USER_HISTORY_TABLE = "user_history"


@dataclass(frozen=True, slots=True)
class RepoAddress:
    """Where a stack's feature store is. `socket_timeout_s` bounds each exchange with Redis."""

    repo_dir: Path
    redis: RedisAddress
    socket_timeout_s: float = 5.0

    def table_path(self, view: str) -> Path:
        """Give the file of a view's offline table."""
        return self.repo_dir / "data" / f"{view}.parquet"

    @property
    def registry_path(self) -> Path:
        """The file in which Feast keeps what was applied."""
        return self.repo_dir / "registry.db"

    def render(self) -> str:
        """Give the text of this stack's feature_store.yaml, which holds no password."""
        template = Template((_SOURCE / "feature_store.yaml").read_text())
        redis = json.dumps(self._with_timeouts(self.redis.feast_public()))
        return template.substitute(FEATURES_DIR=self.repo_dir.absolute(), REDIS=redis)

    def config(self) -> dict[str, Any]:
        """Give the same as values, with the password. Raises ConfigError for a bad password file."""
        config: dict[str, Any] = yaml.safe_load(self.render())
        config["online_store"]["connection_string"] = self._with_timeouts(self.redis.feast_string())
        return config

    def _with_timeouts(self, redis: str) -> str:
        return f"{redis},socket_timeout={self.socket_timeout_s},socket_connect_timeout={self.socket_timeout_s}"


def open_store(address: RepoAddress) -> "FeatureStore":
    """Open the store with its registry read once. Raises EnvironmentFault when nothing was applied yet."""
    if not address.registry_path.exists():
        raise EnvironmentFault(f"no feature registry at {address.registry_path}; run `tailrace pipeline` first")
    store = _store(address)
    store.refresh_registry()  # type: ignore[no-untyped-call]
    return store


def apply_repo(address: RepoAddress) -> None:
    """Lay the repository out below the state folder and register everything in it. May be repeated."""
    (address.repo_dir / "data").mkdir(parents=True, exist_ok=True)
    (address.repo_dir / "feature_store.yaml").write_text(address.render())
    definitions = address.repo_dir / "features.py"
    shutil.copyfile(_SOURCE / "features.py", definitions)
    feast = import_feast()
    kinds = (feast.Entity, feast.FeatureView, feast.FeatureService)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Feast announces its own future at each definition
        found = [value for value in runpy.run_path(str(definitions)).values() if isinstance(value, kinds)]
        _store(address).apply(found)


def ensure_applied(address: RepoAddress, wait_s: float = 10.0) -> None:
    """Apply the repository unless that was done. Of several processes that start at once, one applies, the others wait."""
    address.repo_dir.mkdir(parents=True, exist_ok=True)
    lock = address.repo_dir / ".applying"
    give_up = time.monotonic() + wait_s
    while not address.registry_path.exists():
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


def _store(address: RepoAddress) -> "FeatureStore":
    feast = import_feast()
    from feast.repo_config import RepoConfig

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = RepoConfig(**address.config(), repo_path=address.repo_dir)
    store: FeatureStore = feast.FeatureStore(config=config)
    return store
