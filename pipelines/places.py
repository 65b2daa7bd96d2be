"""Folders, addresses and limits of a pipeline run."""

from dataclasses import dataclass
from pathlib import Path

from services.contracts.event_roles import DEFAULT_ROLES, EventRoles, read_event_roles
from services.features.repo import RepoAddress
from services.settings.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Folders, addresses and limits of a run."""

    state_dir: Path
    cache_dir: Path
    bundle_root: Path
    offline_log_dir: Path
    feature_repo: RepoAddress
    history_max_items: int
    keep_bundles: int
    event_roles: EventRoles = DEFAULT_ROLES
    bundle_store: str = ""
    bundle_cache_gib: float = 20.0
    text_url: str = ""
    text_model: str = ""
    text_key_file: Path | None = None

    @classmethod
    def from_settings(cls, settings: Settings) -> "Places":
        """Return a run's places from the settings; paths stay as they are. Raises ConfigError for a bad events file."""
        return cls(
            state_dir=settings.state_dir,
            cache_dir=settings.cache_dir,
            bundle_root=settings.bundle_root,
            offline_log_dir=settings.offline_log_dir,
            feature_repo=RepoAddress(settings.feature_repo_dir, settings.redis_address),
            history_max_items=settings.history_max_items,
            keep_bundles=settings.keep_bundles,
            event_roles=read_event_roles(settings.events_file),
            bundle_store=settings.bundle_store,
            bundle_cache_gib=settings.bundle_cache_gib,
            text_url=settings.text_url,
            text_model=settings.text_model,
            text_key_file=settings.text_url_key_file,
        )

    @property
    def stages_dir(self) -> Path:
        return self.state_dir / "pipeline"
