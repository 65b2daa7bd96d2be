"""Exports all data of one user, in a thread, since it reads the offline logs."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from services.errors import DependencyUnavailable, Overloaded

_MAX_AT_ONCE = 2
_RETRY_AFTER_S = 5.0


class ExportUser:
    """Reads one user's data. `read` blocks, and raises DependencyUnavailable or OSError."""

    def __init__(self, read: Callable[[str], Mapping[str, Any]]) -> None:
        self._read = read
        self._num_running = 0

    async def __call__(self, user_id: str) -> Mapping[str, Any]:
        """Return a user's data as plain values; empty for an unknown user.

        Raises Overloaded or DependencyUnavailable.
        """
        if self._num_running >= _MAX_AT_ONCE:
            raise Overloaded("export", _RETRY_AFTER_S)
        self._num_running += 1
        try:
            return await asyncio.to_thread(self._read, user_id)
        except OSError as error:
            raise DependencyUnavailable("offline log", _RETRY_AFTER_S) from error
        finally:
            self._num_running -= 1
