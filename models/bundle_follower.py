"""When a version that the live pointer names is to be loaded, for all who follow the pointer. Pure."""

from typing import TypeGuard


class PointerNews:
    """Remembers the version last tried: one that broke is tried again when the pointer has moved meanwhile, or nothing else serves."""

    def __init__(self) -> None:
        self.tried: str | None = None

    def is_to_load(self, version: str | None, serving: str | None) -> TypeGuard[str]:
        """Whether to load the version that the pointer names (None: none), while `serving` serves (None: nothing does)."""
        if serving is None:
            self.tried = version
            return version is not None
        if version in {None, serving}:
            self.tried = None
            return False
        is_news = version != self.tried
        self.tried = version
        return is_news
