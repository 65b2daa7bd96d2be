"""What the embedded stack needs for access before it starts: files that are there and right, and Valkey's own password.

Valkey is told who may sign in by a file that its owner alone can read, never by an argument.
"""

import os
from pathlib import Path

from infra.local.edge.config import check_files
from services.errors import ConfigError
from services.gateway.access.keys import read_keys
from services.settings.secret_file import read_secret
from services.settings.settings import Settings


def check_access(settings: Settings) -> None:
    """Refuse files that a part would break at later. Raises ConfigError naming the file."""
    if settings.api_keys_file is not None:
        read_keys(settings.api_keys_file)
    if settings.tls_dir is not None:
        check_files(settings.tls_dir, settings.tls_client_ca_file)
    if settings.redis_tls_ca_file is not None:
        raise ConfigError("TAILRACE_REDIS_TLS_CA_FILE: the embedded store speaks no TLS; unset it here")
    if settings.redis_password_file is not None:
        valkey_access(settings.redis_username, read_secret(settings.redis_password_file))


def valkey_access_file(settings: Settings) -> Path:
    """Name the file that tells the embedded Valkey who may sign in."""
    return settings.state_dir / "valkey" / "access.conf"


def prepare_valkey(settings: Settings) -> None:
    """Make Valkey's folder, and the file that says who may sign in when there is a password."""
    path = valkey_access_file(settings)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    if settings.redis_password_file is not None:
        text = valkey_access(settings.redis_username, read_secret(settings.redis_password_file))
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            out.write(text)


def valkey_access(username: str, password: str) -> str:
    """Say in Valkey's words that one user may do everything and nobody else anything. Raises ConfigError."""
    if set(username + password) & set(" \t\r\n'\""):
        raise ConfigError(
            "TAILRACE_REDIS_PASSWORD_FILE: the embedded store takes no user or password with quotes or blanks; choose another"
        )
    if not username:
        return f"requirepass {password}\n"
    return f"user default off\nuser {username} on >{password} ~* &* +@all\n"
