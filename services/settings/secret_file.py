"""A secret in a file of its own, as container platforms mount it: read when it is needed, never kept, named by its path."""

from pathlib import Path

from services.errors import ConfigError


def read_secret(path: Path) -> str:
    """Return the file's text without the line's end. Raises ConfigError when it is not there or empty."""
    try:
        secret = path.read_text().rstrip("\r\n")
    except OSError as error:
        raise ConfigError(f"secret file {path}: {error.strerror}; name a file that can be read") from error
    if not secret:
        raise ConfigError(f"secret file {path}: empty; write the secret into it")
    return secret
