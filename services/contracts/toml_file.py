"""Reads a TOML file as a message."""

import tomllib
from pathlib import Path

from services.contracts.message import M, convert
from services.errors import ConfigError, InvalidRequest


def read_toml(kind: type[M], path: Path, source: str) -> M:
    """Read the file that the setting or option `source` names. Raises ConfigError naming source, file and entry."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = getattr(error, "strerror", None) or error
        raise ConfigError(f"{source}: {path} cannot be read ({problem}); name a TOML file in UTF-8") from error
    return parse_toml(kind, text, f"{source}: {path}")


def parse_toml(kind: type[M], text: str, source: str) -> M:
    """Read the text of a file. Raises ConfigError naming source and entry."""
    try:
        return convert(kind, tomllib.loads(text))
    except InvalidRequest as error:
        raise ConfigError(f"{source}: {error.summary}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: not TOML ({error}); correct the text there") from error
