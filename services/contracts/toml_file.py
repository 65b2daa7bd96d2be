"""Reads a TOML file as a message."""

import tomllib
from pathlib import Path

from services.contracts.message import M, convert
from services.errors import ConfigError, InvalidRequest


def read_toml(kind: type[M], path: Path, what: str) -> M:
    """Read the file of the setting TAILRACE_<what>_FILE. Raises ConfigError naming setting, file or entry."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        setting, problem = f"TAILRACE_{what.upper()}_FILE", getattr(error, "strerror", None) or error
        raise ConfigError(f"{setting}: {path} cannot be read ({problem}); name a TOML file in UTF-8") from error
    return parse_toml(kind, text, path.name)


def parse_toml(kind: type[M], text: str, file: str) -> M:
    """Read the text of a file. Raises ConfigError naming the entry."""
    try:
        return convert(kind, tomllib.loads(text))
    except InvalidRequest as error:
        raise ConfigError(f"{file}: {error.summary}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: not TOML ({error})") from error
