"""A separate feature store for a run, so that its users' histories do not mix with a running stack's."""

from pathlib import Path

from infra.local.supervisor.ports import free_window
from services.settings.settings import Settings


def with_own_store(settings: Settings, state_dir: Path | None) -> Settings:
    """Return the settings with a state folder and a separate embedded store: a stack's store may hold other users."""
    own = (state_dir or settings.state_dir / "quality").absolute()
    address = {"redis_host": "127.0.0.1", "redis_port": free_window(1, seed=str(own)), "redis_tls_ca_file": None}
    return settings.model_copy(update={"state_dir": own, "cache_dir": settings.cache_dir.absolute()} | address)
