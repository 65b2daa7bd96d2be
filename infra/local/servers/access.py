"""Check the files that settings name before the embedded stack starts, and write Valkey's user file.

Valkey reads its user and password from a file that only its owner can read, never from an argument.
"""

import os
from pathlib import Path

from infra.local.edge.config import check_files
from services.contracts.event_roles import read_event_roles
from services.contracts.experiments import read_experiments
from services.errors import ConfigError
from services.gateway.access.keys import read_keys
from services.gateway.access.tenants import read_tenants
from services.gateway.surfaces.surfaces import Surfaces
from services.settings.addresses import REDIS_PASSWORD_FILE, read_secret
from services.settings.settings import Settings, is_loopback


def check_access(settings: Settings) -> None:
    """Raise ConfigError, naming the file, for a missing or invalid file that a part would fail on later."""
    if settings.api_keys_file is not None:
        read_keys(settings.api_keys_file)
    if settings.tenants_file is not None:
        read_tenants(settings.tenants_file)
    read_event_roles(settings.events_file)
    Surfaces(settings.surfaces_file, settings.served_names)
    if settings.experiments_file is not None:
        read_experiments(settings.experiments_file)
    if settings.page_key_file is not None:
        read_secret(settings.page_key_file, "TAILRACE_PAGE_KEY_FILE")
    if settings.tls_dir is not None:
        check_files(settings.tls_dir, settings.tls_client_ca_file)
    if settings.redis_tls_ca_file is not None:
        raise ConfigError("TAILRACE_REDIS_TLS_CA_FILE: the embedded store has no TLS; unset it here")
    for key, host, is_guarded in (
        ("REDIS_HOST", settings.redis_host, settings.redis_password_file is not None),
        ("KAFKA_BOOTSTRAP", settings.kafka_bootstrap.rpartition(":")[0], False),
    ):
        if not (is_guarded or is_loopback(host)):
            raise ConfigError(f"TAILRACE_{key}: other machines could use the embedded server at {host}; set 127.0.0.1")
    if settings.redis_password_file is not None:
        valkey_access(settings.redis_username, read_secret(settings.redis_password_file, REDIS_PASSWORD_FILE))


def valkey_access_file(settings: Settings) -> Path:
    return settings.state_dir / "valkey" / "access.conf"


def prepare_valkey(settings: Settings) -> None:
    """Make Valkey's folder, and its user file if there is a password."""
    path = valkey_access_file(settings)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    if settings.redis_password_file is not None:
        text = valkey_access(settings.redis_username, read_secret(settings.redis_password_file, REDIS_PASSWORD_FILE))
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            out.write(text)


def valkey_access(username: str, password: str) -> str:
    """Return the user file: one user may do everything, all others nothing. Raises ConfigError."""
    if set(username + password) & set(" \t\r\n'\""):
        raise ConfigError(
            "TAILRACE_REDIS_PASSWORD_FILE: the embedded store accepts no quotes or blanks in user or password; "
            "choose another"
        )
    if not username:
        return f"requirepass {password}\n"
    return f"user default off\nuser {username} on >{password} ~* &* +@all\n"
