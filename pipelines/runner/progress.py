"""How a stage tells how far it is. Knows neither stages nor terminals."""

from collections.abc import Callable

Progress = Callable[[int, int, str], None]
"""Called with how much is done, how much there is, and a few words on how it goes."""


def silent(_done: int, _total: int, _words: str) -> None:
    """Show no progress."""
