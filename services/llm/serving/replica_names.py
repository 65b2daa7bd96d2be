"""The names of a deployment's running replicas, as this process knows them: written by its router, read by its handle.

Module state, since Ray Serve makes the router itself, in a thread of its own, and gives no way from a handle to it. A module apart from the
router's, because Ray copies the router's class by value, with the globals of its module. A tuple is replaced as a whole, so a reader in another
thread sees the old names or the new ones.
"""

from collections.abc import Iterable

_running: dict[str, tuple[str, ...]] = {}


def set_running(deployment: str, names: Iterable[str]) -> None:
    """Record the replicas that run now."""
    _running[deployment] = tuple(sorted(names))


def running(deployment: str) -> tuple[str, ...]:
    """Return the replicas that run; empty while none is known."""
    return _running.get(deployment, ())
