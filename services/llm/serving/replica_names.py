"""The names of a deployment's running replicas known to this process: written by its router, read by its handle.

Module state, since Ray Serve creates the router in a separate thread and offers no access to it from a handle. The
module is separate from the router's, because Ray copies the router's class by value, with the globals of its module.
The tuple is replaced as a whole, so a reader in another thread sees the old names or the new names.
"""

from collections.abc import Iterable

_running: dict[str, tuple[str, ...]] = {}


def set_running(deployment: str, names: Iterable[str]) -> None:
    _running[deployment] = tuple(sorted(names))


def running(deployment: str) -> tuple[str, ...]:
    """Return the running replicas; empty until the first is known."""
    return _running.get(deployment, ())
