"""A settings file in force, reloaded when it changes. Does not know its contents.

A broken, unreadable or missing file changes nothing: the previous settings stay in force, a log line states the error,
and a metric reports it until the file is fixed. Names in the file may refer to things that come and go (an item, a
surface), so every poll checks them again.
"""

import asyncio
from collections.abc import Callable, Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any, Generic, TypeVar

import structlog

from models.files import stamp_of
from services.errors import ConfigError
from services.gateway.periodic_task import PeriodicTask

log = structlog.get_logger()

POLL_S = 1.0
T = TypeVar("T", bound=Mapping[str, Any])


class FileState(IntEnum):
    """State of the settings in force, as the metric reports it."""

    CURRENT = 0
    """The current file is in force."""
    OUTDATED = 1
    """The last valid file is in force: the current one is rejected or missing."""


class FollowedFile(Generic[T]):
    """The entries of a file by name; without a file, `in_force` is `none`."""

    def __init__(
        self,
        path: Path | None,
        what: str,
        read: Callable[[Path], T],
        none: T,
        check: Callable[[T], None] = lambda _: None,
        on_state: Callable[[FileState], None] = lambda _: None,
    ) -> None:
        """Read the file. Raises ConfigError.

        Args:
            path: The file.
            what: Name of the contents, for log events.
            read: Raises ConfigError for an invalid file.
            none: The settings without a file.
            check: Raises ConfigError for unknown names. Called at `start` and at each poll.
            on_state: Called with the state at construction and at each change.
        """
        self.path = path
        self._what = what
        self._read = read
        self._check = check
        self._on_state = on_state
        self._stamp = None if path is None else stamp_of(path)
        self._refused_for: str | None = None
        self.in_force: T = none if path is None else read(path)
        self._on_state(FileState.CURRENT)
        self._following = PeriodicTask(what, lambda: asyncio.to_thread(self.refresh), POLL_S)

    @property
    def is_outdated(self) -> bool:
        """Whether the current file is rejected or missing."""
        return self._refused_for is not None

    async def start(self) -> None:
        """Check the settings in force and start following. Call in the serving loop, once a bundle may be loaded."""
        if self.path is not None:
            try:
                self._check(self.in_force)
            except ConfigError as error:  # in force before a restart: a missing name must not prevent the start
                self._refuse(error)
            self._following.start()

    async def stop(self) -> None:
        """Stop following; the settings stay in force."""
        await self._following.stop()

    def refresh(self) -> None:
        """Read the file again if it changed or was rejected, and check the settings in force.

        Each reason for a rejection is logged once. Other errors are raised at each poll.
        """
        if self.path is None:
            return
        stamp = stamp_of(self.path)
        is_read = stamp != self._stamp or self._refused_for is not None
        self._stamp = stamp
        try:
            settings = self._read(self.path) if is_read else self.in_force
            self._check(settings)
        except ConfigError as error:
            self._refuse(error)
            return
        except Exception as error:
            if self._refused_for is None:
                self._on_state(FileState.OUTDATED)
            self._refused_for = repr(error)  # so that the next poll reads it again
            raise
        if is_read:
            self.in_force, self._refused_for = settings, None
            log.info(f"{self._what}_read", num_entries=len(settings))
            self._on_state(FileState.CURRENT)

    def _refuse(self, error: ConfigError) -> None:
        if str(error) != self._refused_for:
            self._refused_for = str(error)
            log.error(f"{self._what}_refused", error=str(error), kept=sorted(self.in_force))
            self._on_state(FileState.OUTDATED)
