"""How errors name a place in a JSON body, the same at every door. Pure."""

from collections.abc import Iterable


def field_path(location: Iterable[int | str]) -> str:
    """Write the names and places that lead to a field as a caller would: `messages[0].content`."""
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return path.removeprefix(".")
