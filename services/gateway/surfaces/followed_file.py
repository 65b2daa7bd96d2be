"""A file of settings in force, read again when it changes. Does not know what it holds.

A file that is broken, cannot be read or is gone changes nothing: what was in force before stays, a log line says what is wrong, and a metric says so
until it is mended. What a file names may come and go by itself (an item, a surface), so that is looked at again at every poll.
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
    """What is in force, as the metric says it."""

    CURRENT = 0
    """What the file has."""
    OUTDATED = 1
    """What the last file had that was right: the present one is refused, or gone."""


class FollowedFile(Generic[T]):
    """The entries of a file by name; without a file `in_force` is what was given as `none`."""

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
            what: It holds, for the log's events.
            read: Raises ConfigError for a file that is wrong by itself.
            none: What holds without a file.
            check: Raises ConfigError for what names something that does not exist. Called at `start` and at each poll.
            on_state: Called with the state at construction and at each change of it.
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
        """Whether the present file is refused, or gone."""
        return self._refused_for is not None

    async def start(self) -> None:
        """Check what is in force, and follow the file from now on. Call in the serving loop."""
        if self.path is not None:
            try:
                self._check(self.in_force)
            except (
                ConfigError
            ) as error:  # it was in force before a restart, and what is missing must not keep a gateway from starting
                self._refuse(error)
            self._following.start()

    async def stop(self) -> None:
        """Stop following; what is in force stays."""
        await self._following.stop()

    def refresh(self) -> None:
        """Read the file again if it has changed or was refused, and check what is in force; log each reason for a refusal once. An error that is no refusal is raised at each poll."""
        if self.path is None:
            return
        stamp = stamp_of(self.path)
        is_read = stamp != self._stamp or self._refused_for is not None
        self._stamp = stamp
        try:
            found = self._read(self.path) if is_read else self.in_force
            self._check(found)
        except ConfigError as error:
            self._refuse(error)
            return
        except Exception as error:
            if self._refused_for is None:
                self._on_state(FileState.OUTDATED)
            self._refused_for = repr(error)  # so that it is read at the next poll too
            raise
        if is_read:
            self.in_force, self._refused_for = found, None
            log.info(f"{self._what}_read", num_entries=len(found))
            self._on_state(FileState.CURRENT)

    def _refuse(self, error: ConfigError) -> None:
        if str(error) != self._refused_for:
            self._refused_for = str(error)
            log.error(f"{self._what}_refused", error=str(error), kept=sorted(self.in_force))
            self._on_state(FileState.OUTDATED)
