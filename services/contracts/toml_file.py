"""Reads TOML files whose entries are checked one by one: errors name the position in the file."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.errors import ConfigError


def read_toml_text(path: Path, what: str) -> str:
    """Return the text of a file, which `what` names in errors. Raises ConfigError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what} file: {path} cannot be read ({error}); give a TOML file") from error


def entries_of(text: str, file: str, known: tuple[str, ...]) -> dict[str, Any]:
    """Return the entries of a TOML text. Raises ConfigError for an unknown entry."""
    try:
        entries = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: not TOML ({error})") from error
    refuse_unknown(file, entries, known)
    return entries


def table_at(where: str, entry: Any, example: str) -> dict[str, Any]:
    """Return an entry that is a table. Raises ConfigError, with an example of what to write."""
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: {entry!r} is no table; write for example {example}")
    return entry


def refuse_unknown(where: str, entries: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Raise ConfigError for an entry with an unknown name."""
    for key in entries.keys() - set(known):
        raise ConfigError(f"{where}: unknown entry {key!r}; the entries are {', '.join(known)}")
