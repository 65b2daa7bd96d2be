"""Make every secret of a compose deployment once, in folders that are separate volumes.

    redis/password, redis/users.acl     the password, and the server's user file with its hash
    kafka/password, kafka/jaas.conf     the password, and the broker's configuration with it
    doors/keys.json                     hashes of the API keys, for the doors
    doors/tenants.json                  no tenants, for the doors with TAILRACE_TENANTS_FILE
    keys/operator.key                   the operator's API key itself; no server mounts it
    grafana/password                    of Grafana's user admin

Existing files are kept, so repeated runs are safe. Folders are mounted only where they are needed, so the servers'
files may be readable by any user there.
"""

import hashlib
import secrets
from collections.abc import Iterator
from pathlib import Path

from services.contracts.access import Priority, Scope
from services.errors import ConfigError
from services.gateway.access.keys import KeysFile, StoredHash, StoredKey, hash_of, make_key, write_keys
from services.gateway.access.tenants import TenantsFile, write_tenants

KAFKA_USER = "tailrace"
OPERATOR = "operator"
_OWNER_ONLY = 0o600
_FOR_THE_SERVER = 0o444


def make_missing(root: Path) -> Iterator[Path]:
    """Make missing secrets below `root`. Yields each file made."""
    yield from _redis(root / "redis")
    yield from _kafka(root / "kafka")
    yield from _doors(root / "doors" / "keys.json", root / "keys" / "operator.key")
    if not (tenants := root / "doors" / "tenants.json").exists():
        write_tenants(tenants, TenantsFile())
        yield tenants
    yield from _write(root / "grafana" / "password", secrets.token_urlsafe(24), _FOR_THE_SERVER)


def operator_key(root: Path) -> str:
    """Return the operator's API key. Raises ConfigError if it has not been made yet."""
    try:
        return (root / "keys" / "operator.key").read_text().strip()
    except FileNotFoundError as error:
        raise ConfigError("the operator's key does not exist yet; start the stack once") from error


def _redis(folder: Path) -> Iterator[Path]:
    password = folder / "password"
    yield from _write(password, secrets.token_urlsafe(32), _FOR_THE_SERVER)
    digest = hashlib.sha256(password.read_bytes()).hexdigest()
    yield from _write(
        folder / "users.acl", f"user default on #{digest} ~* &* +@all -@admin +bgrewriteaof\n", _FOR_THE_SERVER
    )


def _kafka(folder: Path) -> Iterator[Path]:
    password = folder / "password"
    yield from _write(password, secrets.token_urlsafe(32), _FOR_THE_SERVER)
    module = "org.apache.kafka.common.security.plain.PlainLoginModule"
    users = f'user_{KAFKA_USER}="{password.read_text()}"'
    yield from _write(folder / "jaas.conf", f"KafkaServer {{\n  {module} required\n  {users};\n}};\n", _FOR_THE_SERVER)


def _doors(hashes: Path, plain: Path) -> Iterator[Path]:
    if hashes.exists():
        return
    key = make_key()
    stored = StoredKey(
        id=OPERATOR,
        hashes=(StoredHash(sha256=hash_of(key)),),
        scopes=frozenset(Scope),
        priority=Priority.HIGH,
    )
    plain.unlink(missing_ok=True)
    yield from _write(plain, key, _OWNER_ONLY)
    write_keys(hashes, KeysFile(keys=(stored,)))
    yield hashes


def _write(path: Path, text: str, mode: int) -> Iterator[Path]:
    if not path.exists():
        scratch = path.with_name(f".{path.name}")
        scratch.write_text(text)
        scratch.chmod(mode)
        scratch.replace(path)
        yield path
