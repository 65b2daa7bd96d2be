"""The key ring: lookup and expiry of keys, and changes and failures of the keys file."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import structlog

from services.contracts.access import Priority, Scope
from services.errors import ConfigError
from services.gateway.access.keyring import POLL_S, KeyRing, KeysState
from services.gateway.access.keys import KeysFile, hash_of, make_key, write_keys
from tests.support.gateway.keys import stored_key
from tests.support.wait import until

NOW = datetime(2026, 11, 21, tzinfo=UTC)
NOW_S = NOW.timestamp()


def write_key(path: Path, key: str, expires_at: datetime | None = None, **fields: Any) -> None:
    write_keys(path, KeysFile(keys=(stored_key("shop", Scope.RECOMMEND, hashes={key: expires_at}, **fields),)))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def test_a_key_has_its_holder_with_limits_until_it_expires(path: Path) -> None:
    """A holder has its priority, scopes, the smaller max_k and its rate, until the second of its expiry."""
    key = make_key()
    limits = {"priority": Priority.HIGH, "rate_per_s": 10, "burst": 20, "max_k": 50}
    write_key(path, key, expires_at=NOW + timedelta(seconds=10), **limits)
    ring = KeyRing(path, max_k=100)

    holder = ring.find(key, NOW_S + 9.9)

    assert holder is not None
    caller, allowance = holder.caller, holder.allowance
    assert (caller.key_id, caller.priority, caller.max_k) == ("shop", Priority.HIGH, 50)
    assert caller.scopes == {Scope.RECOMMEND}
    assert (allowance.rate_per_s, allowance.burst) == (10.0, 20.0)
    assert ring.find(key, NOW_S + 10) is None


def test_a_nearly_right_key_has_no_holder(path: Path) -> None:
    """Only the exact key is accepted: no text of another length, no changed character, not the hash."""
    key = make_key()
    write_key(path, key)
    ring = KeyRing(path, max_k=100)

    nearly = key[:-1] + ("a" if key[-1] != "a" else "b")
    for wrong in ("", "trk_", "x" * 100_000, "\udcff", "ключ", nearly, hash_of(key)):
        assert ring.find(wrong, NOW_S) is None


def test_a_secret_replaced_behind_its_link_is_read_again(tmp_path: Path) -> None:
    """Kubernetes points `..data` to another folder, whose file has the same name, size and time."""
    old, new = make_key(), make_key()
    for version, key in (("v1", old), ("v2", new)):
        (tmp_path / version).mkdir()
        write_key(tmp_path / version / "keys.json", key)
    (tmp_path / "..data").symlink_to("v1")
    (tmp_path / "keys.json").symlink_to("..data/keys.json")
    ring = KeyRing(tmp_path / "keys.json", max_k=100)

    (tmp_path / "..new").symlink_to("v2")
    (tmp_path / "..new").replace(tmp_path / "..data")
    ring.refresh()

    assert ring.find(new, NOW_S) is not None
    assert ring.find(old, NOW_S) is None


@pytest.mark.parametrize("broken", ["", "{", '{"keys": [{"id": "a"}]}', None])
def test_a_broken_file_keeps_the_old_keys_and_is_reported_once(path: Path, broken: str | None) -> None:
    """After a partial edit or a read error the old keys stay valid; a repaired file brings the new keys."""
    old, new = make_key(), make_key()
    write_key(path, old)
    states: list[KeysState] = []
    ring = KeyRing(path, max_k=100, on_state=states.append)

    if broken is None:
        path.unlink()
        path.mkdir()
    else:
        path.write_text(broken)
    with structlog.testing.capture_logs() as logs:
        ring.refresh()
        ring.refresh()
    kept = ring.find(old, NOW_S)
    if broken is None:
        path.rmdir()
    write_key(path, new)
    ring.refresh()

    assert kept is not None
    assert states == [KeysState.CURRENT, KeysState.OUTDATED, KeysState.CURRENT]
    assert [(line["event"], line["log_level"]) for line in logs] == [("keys_refused", "error")]
    assert ring.find(new, NOW_S) is not None


def test_a_file_that_is_gone_leaves_no_key_valid(path: Path) -> None:
    """If the keys file is deleted, no key is valid from the second poll on; a restored file is read again."""
    key = make_key()
    write_key(path, key)
    states: list[KeysState] = []
    ring = KeyRing(path, max_k=100, on_state=states.append)

    path.rename(path.with_suffix(".away"))
    with structlog.testing.capture_logs() as logs:
        validity = []
        for _ in range(3):
            ring.refresh()
            validity.append(ring.find(key, NOW_S) is not None)
    path.with_suffix(".away").rename(path)
    ring.refresh()

    assert validity == [True, False, False]
    assert [(line["event"], line["log_level"]) for line in logs] == [("keys_gone", "error")]
    assert ring.find(key, NOW_S) is not None
    assert states == [KeysState.CURRENT, KeysState.GONE, KeysState.CURRENT]


def test_the_first_file_must_be_right(path: Path) -> None:
    """A gateway without a keys file fails at startup and names the reason."""
    with pytest.raises(ConfigError, match="TAILRACE_API_KEYS_FILE"):
        KeyRing(path, max_k=100)


async def test_a_started_ring_follows_its_file(path: Path) -> None:
    """A changed file takes effect within a few polls, without a restart."""
    old, new = make_key(), make_key()
    write_key(path, old)
    ring = KeyRing(path, max_k=100)
    await ring.start()

    write_key(path, new)
    await until(lambda: ring.find(new, NOW_S), 20 * POLL_S)
    await ring.stop()

    assert ring.find(old, NOW_S) is None
