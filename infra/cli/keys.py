"""Make, list, rotate and revoke API keys in the keys file. A key is printed once and stored only as a hash.

Gateways reload the file within two seconds, without a restart.
"""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from infra.cli.session import audited
from services.contracts.access import Priority, Scope
from services.errors import ConfigError

keys_app = typer.Typer(no_args_is_help=True, help=__doc__)

_MAX_DAYS = 36_500

_OPTIONS = {
    "share": "--share",
    "id": "--id",
    "rate_per_s": "--rate",
    "burst": "--burst",
    "daily_quota": "--daily-quota",
    "max_k": "--max-k",
    "tenant": "--tenant",
}
"""The option of each field of a key or a tenant."""

KeyId = Annotated[str, typer.Argument(help="Id of the key.", show_default=False)]


class PriorityName(StrEnum):
    """Priorities on the command line."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


@keys_app.command()
def new(
    key_id: Annotated[str, typer.Option("--id", help="Name of the key in logs; not secret.", show_default=False)],
    scope: Annotated[list[Scope], typer.Option(help="A scope of the key; repeat it.", show_default=False)],
    priority: Annotated[PriorityName, typer.Option(help="Order of service under load.")] = PriorityName.NORMAL,
    rate: Annotated[float | None, typer.Option(help="Maximal calls per second, over all replicas.")] = None,
    burst: Annotated[float | None, typer.Option(help="Maximal calls at once. Default: one second of --rate.")] = None,
    daily_quota: Annotated[int | None, typer.Option(help="Maximal calls per day (UTC).")] = None,
    max_k: Annotated[int | None, typer.Option(help="Maximal items per answer.")] = None,
    expires_in_days: Annotated[
        float | None, typer.Option(min=0.001, max=_MAX_DAYS, help="Days until the key expires. Default: never.")
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="The tenant that owns the key.", show_default=False)] = None,
) -> None:
    """Make a key, print it once, and store its hash in the keys file."""
    from services.gateway.access.keys import KeysFile, StoredHash, StoredKey, hash_of, make_key, read_keys, write_keys

    state_dir, path = changed_file("api_keys_file")
    key = make_key()
    with audited(state_dir, "keys new", key_id=key_id), locked(path):
        expires_at = None if expires_in_days is None else datetime.now(UTC) + timedelta(days=expires_in_days)
        with refused_by_option():
            stored = StoredKey(
                id=key_id,
                tenant=_checked_tenant(tenant),
                hashes=(StoredHash(sha256=hash_of(key), expires_at=expires_at),),
                scopes=frozenset(scope),
                priority=Priority[priority.name],
                rate_per_s=rate,
                burst=burst,
                daily_quota=daily_quota,
                max_k=max_k,
            )
        write_keys(path, (read_keys(path) if path.exists() else KeysFile()).with_new(stored))
    _show_once(key)


@keys_app.command("list")
def list_() -> None:
    """List the keys and their permissions."""
    from rich.console import Console
    from rich.table import Column, Table

    from services.gateway.access.keys import StoredKey, read_keys

    def limits(key: StoredKey) -> list[str]:
        given = (key.rate_per_s, key.burst, key.daily_quota, key.max_k)
        return ["-" if value is None else f"{value:.15g}" for value in given]

    def hashes(key: StoredKey) -> str:
        ends = (
            "" if stored.expires_at is None else f" until {stored.expires_at:%Y-%m-%d %H:%M}Z" for stored in key.hashes
        )
        return ", ".join(f"{stored.sha256[:8]}{end}" for stored, end in zip(key.hashes, ends, strict=True))

    _, path = changed_file("api_keys_file")
    names = ("scopes", "priority", "rate/s", "burst", "a day", "max k", "tenant", "hashes")
    table = Table(Column("id", no_wrap=True), *names, box=None)
    for key in read_keys(path).keys:
        scopes, priority = " ".join(sorted(key.scopes)), key.priority.name.lower()
        table.add_row(key.id, scopes, priority, *limits(key), key.tenant or "-", hashes(key))
    Console(highlight=False, soft_wrap=True).print(table if table.row_count else f"no keys in {path}")


@keys_app.command()
def rotate(
    key_id: KeyId,
    overlap_hours: Annotated[
        float, typer.Option(min=0, max=24 * _MAX_DAYS, help="Hours until the old key becomes invalid.")
    ] = 24.0,
    expires_in_days: Annotated[
        float | None,
        typer.Option(min=0.001, max=_MAX_DAYS, help="Days until the new key expires. Default: as the old key."),
    ] = None,
) -> None:
    """Replace a key. The new key is printed once; the old key remains valid for a while."""
    from services.gateway.access.keys import hash_of, make_key, read_keys, write_keys

    state_dir, path = changed_file("api_keys_file")
    key = make_key()
    with audited(state_dir, "keys rotate", key_id=key_id), locked(path):
        now, overlap = datetime.now(UTC), timedelta(hours=overlap_hours)
        expires_at = None if expires_in_days is None else now + timedelta(days=expires_in_days)
        write_keys(path, read_keys(path).rotated(key_id, hash_of(key), now, overlap, expires_at))
    _show_once(key)


@keys_app.command()
def revoke(key_id: KeyId) -> None:
    """Remove a key. Gateways refuse it within two seconds."""
    from services.gateway.access.keys import read_keys, write_keys

    state_dir, path = changed_file("api_keys_file")
    with audited(state_dir, "keys revoke", key_id=key_id), locked(path):
        write_keys(path, read_keys(path).without(key_id))
    typer.echo(f"{key_id} is revoked")


def _checked_tenant(tenant: str | None) -> str:
    """Return the tenant of a new key. Raises ConfigError if the tenants file lacks it."""
    if tenant is None:
        return ""
    from services.gateway.access.tenants import read_tenants
    from services.settings.settings import load_settings

    path = load_settings().tenants_file
    if path is None:
        raise ConfigError("TAILRACE_TENANTS_FILE: not set; set it to the file that `tailrace tenants new` writes")
    return read_tenants(path).existing(tenant).id


def changed_file(setting: str) -> tuple[Path, Path]:
    """Return the state folder and the file that a setting names. Raises ConfigError if it is not set."""
    from services.settings.settings import load_settings, variable_of

    settings = load_settings()
    path: Path | None = getattr(settings, setting)
    if path is None:
        raise ConfigError(f"{variable_of(setting)}: not set; set it to the path of the file, which may be new")
    return settings.state_dir, path


@contextmanager
def refused_by_option() -> Iterator[None]:
    """Raise ConfigError with the option for a wrong field of a key or a tenant."""
    from pydantic import ValidationError

    from services.gateway.access.keys import FORMS
    from services.settings.refusals import problem_and_fix

    try:
        yield
    except ValidationError as error:
        first = error.errors()[0]
        field = next((str(part) for part in first["loc"]), "rate_per_s")
        raise ConfigError(f"{_OPTIONS.get(field, field)}: {problem_and_fix(first, FORMS)}") from None


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock the keys file, or another file of these commands, against other commands while it is changed."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(f".{path.name}.lock").open("w")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; run the command where the file is writable") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _show_once(key: str) -> None:
    """Print the key to stdout, which can be piped into a secret store, and the advice to stderr."""
    typer.echo(key)
    typer.echo("this key is shown only once and not stored; callers send it as `authorization: Bearer KEY`", err=True)


if __name__ == "__main__":  # needs only typer, rich, msgspec and pydantic-settings
    keys_app()
