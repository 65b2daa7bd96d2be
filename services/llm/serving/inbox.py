"""What callers in any thread want of an engine, in order, for the one thread that owns it and sleeps while there is nothing.

It does not know what the commands do.
"""

import threading
from collections import deque
from collections.abc import Callable

Command = Callable[[], object]


class Inbox:
    """Open until its owner closes it. A command that was put is either taken, or was put too late and refused."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the three below
        self._commands: deque[Command] = deque()
        self._stopping = False
        self._closed = False
        self._woken = threading.Event()

    def put(self, command: Command) -> bool:
        """Add a command and wake the owner; False if it is closed, where nobody would run it."""
        with self._lock:
            if self._closed:
                return False
            self._commands.append(command)
        self._woken.set()
        return True

    def take(self, *, waits: bool) -> tuple[Command, ...]:
        """Return all there is; where the owner has nothing else to do it `waits` until it is woken."""
        if waits:
            self._woken.wait()
        self._woken.clear()
        with self._lock:
            commands = tuple(self._commands)
            self._commands.clear()
        return commands

    def stop(self) -> None:
        """Ask the owner to close it when all is done."""
        with self._lock:
            self._stopping = True
        self._woken.set()

    def close_if_done(self, *, has_work: bool) -> bool:
        """Close it if that was asked for and neither a command nor other work is left. Gives whether it is closed."""
        with self._lock:
            self._closed = self._stopping and not self._commands and not has_work
            return self._closed

    def close(self) -> None:
        """Take nothing any more, and forget what is there."""
        with self._lock:
            self._closed = True
            self._commands.clear()
