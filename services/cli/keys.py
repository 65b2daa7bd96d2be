"""`tailrace keys`: make, list, rotate and revoke API keys in the keys file. A key is printed once and kept nowhere.

Gateways read the file again within a second or two; nothing is restarted.
"""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from services.cli.audit_file import audited
from services.contracts.access import Priority, Scope
from services.errors import ConfigError

keys_app = typer.Typer(no_args_is_help=True, help=__doc__)

_MAX_DAYS = 36_500

_OPTIONS = {
    "id": "--id",
    "rate_per_s": "--rate",
    "burst": "--burst",
    "daily_quota": "--daily-quota",
    "max_k": "--max-k",
}
"""Under which option a key's field is given."""

KeyId = Annotated[str, typer.Argument(help="The key's id.", show_default=False)]


class PriorityName(StrEnum):
    """Priorities as they are typed."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


@keys_app.command()
def new(
    key_id: Annotated[str, typer.Option("--id", help="Names the key in logs; no secret.", show_default=False)],
    scope: Annotated[list[Scope], typer.Option(help="What the key allows; may be repeated.", show_default=False)],
    priority: Annotated[PriorityName, typer.Option(help="Who is served first under load.")] = PriorityName.NORMAL,
    rate: Annotated[float | None, typer.Option(help="Calls a second, over all replicas.")] = None,
    burst: Annotated[float | None, typer.Option(help="Calls at once; by default a second's worth.")] = None,
    daily_quota: Annotated[int | None, typer.Option(help="Calls a day (UTC).")] = None,
    max_k: Annotated[int | None, typer.Option(help="Items per answer.")] = None,
    expires_in_days: Annotated[
        float | None, typer.Option(min=0.001, max=_MAX_DAYS, help="When the key ends by itself.")
    ] = None,
) -> None:
    """Make a key, print it once, and write its hash into the keys file."""
    from pydantic import ValidationError

    from services.gateway.access.keys import KeysFile, StoredHash, StoredKey, hash_of, make_key, read_keys, write_keys

    state_dir, path = _places()
    key = make_key()
    with audited(state_dir, "keys new", key_id=key_id), _alone(path):
        expires_at = None if expires_in_days is None else datetime.now(UTC) + timedelta(days=expires_in_days)
        try:
            stored = StoredKey(
                id=key_id,
                hashes=(StoredHash(sha256=hash_of(key), expires_at=expires_at),),
                scopes=frozenset(scope),
                priority=Priority[priority.name],
                rate_per_s=rate,
                burst=burst,
                daily_quota=daily_quota,
                max_k=max_k,
            )
        except ValidationError as error:
            first = error.errors()[0]
            field = next((str(part) for part in first["loc"]), "rate_per_s")
            raise ConfigError(f"{_OPTIONS.get(field, field)}: {first['msg'].removeprefix('Value error, ')}") from None
        write_keys(path, (read_keys(path) if path.exists() else KeysFile()).with_new(stored))
    _show_once(key)


@keys_app.command("list")
def list_() -> None:
    """Show the keys' ids and what they allow."""
    from rich.console import Console
    from rich.table import Table

    from services.gateway.access.keys import StoredKey, read_keys

    def limits(key: StoredKey) -> list[str]:
        given = (key.rate_per_s, key.burst, key.daily_quota, key.max_k)
        return ["-" if value is None else f"{value:g}" for value in given]

    def hashes(key: StoredKey) -> str:
        ends = ("" if one.expires_at is None else f" until {one.expires_at:%Y-%m-%d %H:%M}Z" for one in key.hashes)
        return ", ".join(f"{one.sha256[:8]}{end}" for one, end in zip(key.hashes, ends, strict=True))

    _, path = _places()
    table = Table("id", "scopes", "priority", "rate/s", "burst", "a day", "max k", "hashes", box=None)
    for key in read_keys(path).keys:
        table.add_row(key.id, " ".join(sorted(key.scopes)), key.priority.name.lower(), *limits(key), hashes(key))
    Console(highlight=False, soft_wrap=True).print(table if table.row_count else f"no keys in {path}")


@keys_app.command()
def rotate(
    key_id: KeyId,
    overlap_hours: Annotated[
        float, typer.Option(min=0, max=24 * _MAX_DAYS, help="How long the old key still holds.")
    ] = 24.0,
    expires_in_days: Annotated[
        float | None,
        typer.Option(min=0.001, max=_MAX_DAYS, help="When the new key ends; by default as the old one was to."),
    ] = None,
) -> None:
    """Return an id a new key, printed once; the old one holds for a while, so that callers can change over."""
    from services.gateway.access.keys import hash_of, make_key, read_keys, write_keys

    state_dir, path = _places()
    key = make_key()
    with audited(state_dir, "keys rotate", key_id=key_id), _alone(path):
        now, overlap = datetime.now(UTC), timedelta(hours=overlap_hours)
        expires_at = None if expires_in_days is None else now + timedelta(days=expires_in_days)
        write_keys(path, read_keys(path).rotated(key_id, hash_of(key), now, overlap, expires_at))
    _show_once(key)


@keys_app.command()
def revoke(key_id: KeyId) -> None:
    """Take a key out of the file; gateways refuse it a second or two later."""
    from services.gateway.access.keys import read_keys, write_keys

    state_dir, path = _places()
    with audited(state_dir, "keys revoke", key_id=key_id), _alone(path):
        write_keys(path, read_keys(path).without(key_id))
    typer.echo(f"{key_id} is revoked")


def _places() -> tuple[Path, Path]:
    """Return the state folder and the keys file. Raises ConfigError when none is set."""
    from services.settings.settings import load_settings

    settings = load_settings()
    if settings.api_keys_file is None:
        raise ConfigError("TAILRACE_API_KEYS_FILE: not set; say where the keys file is or shall be")
    return settings.state_dir, settings.api_keys_file


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold off other commands while the file is read, changed and replaced."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(f".{path.name}.lock").open("w")
    except OSError as error:
        raise ConfigError(f"keys file {path}: {error.strerror}; make the change where it can be written") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _show_once(key: str) -> None:
    """Print the key alone to stdout, so that it can be piped into a secret store, and the advice to stderr."""
    typer.echo(key)
    typer.echo("this key is shown once and kept nowhere; callers send it as `authorization: Bearer KEY`", err=True)
