"""The keys file: parsing, rejection of invalid files, and the effect of each command."""

import json
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from services.contracts.access import Priority, Scope
from services.errors import ConfigError
from services.gateway.access.keys import KeysFile, StoredHash, StoredKey, hash_of, make_key, read_keys, write_keys
from tests.support.gateway.keys import stored_key

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)


def stored(key_id: str, *hashes: StoredHash, **fields: Any) -> StoredKey:
    """Build a key with scope recommend, and these hashes if any."""
    made = stored_key(key_id, Scope.RECOMMEND, **fields)
    return made.model_copy(update={"hashes": hashes}) if hashes else made


def test_a_new_key_is_long_random_and_known_by_its_start() -> None:
    """A key has 256 bits, is unique, and has a prefix that secret scanners recognise."""
    keys = {make_key() for _ in range(100)}

    assert len(keys) == 100
    assert all(key.startswith("trk_") and len(key) == 47 for key in keys)


@pytest.mark.parametrize("is_linked", [False, True])
def test_what_is_written_is_read_again_and_holds_no_key(tmp_path: Path, is_linked: bool) -> None:
    """The file names priorities and scopes, has mode 0600 and only hashes; a symbolic link is preserved."""
    path, key = tmp_path / "deep" / "keys.json", make_key()
    limits = {"rate_per_s": 50.0, "burst": 100.0, "daily_quota": 10_000, "max_k": 100}
    keys = KeysFile(keys=(stored("shop", StoredHash(sha256=hash_of(key)), priority=Priority.HIGH, **limits),))
    if is_linked:
        write_keys(tmp_path / "real.json", KeysFile())
        path.parent.mkdir()
        path.symlink_to(tmp_path / "real.json")

    write_keys(path, keys)

    text = path.read_text()
    assert read_keys(path) == keys
    assert json.loads(text)["keys"][0]["priority"] == "high"
    assert key not in text
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.name for file in path.parent.iterdir()] == ["keys.json"]
    assert path.is_symlink() is is_linked


GOOD: dict[str, Any] = {"id": "a", "hashes": [{"sha256": "0" * 64}], "scopes": ["recommend"]}


def with_one(**changed: Any) -> dict[str, Any]:
    return {"keys": [{**GOOD, **changed}]}


BAD_FILES: list[tuple[str, Any, str]] = [
    ("absent", None, "tailrace keys new"),
    ("no JSON", "{", "keys.json: not JSON"),
    ("another shape", {"key": []}, "key"),
    ("unknown field", with_one(scope="admin"), "keys.0.scope"),
    ("unknown scope", with_one(scopes=["root"]), "keys.0.scopes"),
    ("no scope", with_one(scopes=[]), "keys.0.scopes"),
    ("no hash", with_one(hashes=[]), "keys.0.hashes"),
    ("a key instead of its hash", with_one(hashes=[{"sha256": "trk_secret"}]), "keys.0.hashes.0.sha256"),
    ("no zone", with_one(hashes=[{"sha256": "0" * 64, "expires_at": "2026-01-01T00:00:00"}]), "expires_at"),
    ("bad id", with_one(id="a b"), "keys.0.id"),
    ("unknown priority", with_one(priority="urgent"), "unknown priority urgent; give high"),
    ("rate of nothing", with_one(rate_per_s=0), "rate_per_s"),
    ("burst alone", with_one(burst=5), "burst needs rate_per_s"),
    ("an id twice", {"keys": [GOOD, {**GOOD, "hashes": [{"sha256": "1" * 64}]}]}, "twice"),
    ("a hash twice", {"keys": [GOOD, {**GOOD, "id": "b"}]}, "twice"),
]


@pytest.mark.parametrize(("content", "words"), [case[1:] for case in BAD_FILES], ids=[case[0] for case in BAD_FILES])
def test_a_bad_file_is_refused_by_its_place_without_its_values(tmp_path: Path, content: Any, words: str) -> None:
    """The error names the location but no value, which may be a key; for a missing file it names the command."""
    path = tmp_path / "keys.json"
    if content is not None:
        path.write_text(content if isinstance(content, str) else json.dumps(content))

    with pytest.raises(ConfigError, match=words) as refused:
        read_keys(path)

    assert "trk_secret" not in str(refused.value)


def test_rotation_leaves_two_valid_hashes_for_a_while() -> None:
    """The old hash expires after the overlap or at its own earlier expiry; expired hashes are dropped."""
    soon, past = NOW + timedelta(hours=1), NOW - timedelta(hours=1)
    hashes = (
        StoredHash(sha256="a" * 64),
        StoredHash(sha256="b" * 64, expires_at=soon),
        StoredHash(sha256="c" * 64, expires_at=past),
    )
    keys = KeysFile(keys=(stored("other"), stored("shop", *hashes)))

    rotated = keys.rotated("shop", "d" * 64, NOW, timedelta(hours=24))

    shop = rotated.find("shop")
    assert shop is not None
    assert [(key_hash.sha256[0], key_hash.expires_at) for key_hash in shop.hashes] == [
        ("a", NOW + timedelta(hours=24)),
        ("b", soon),
        ("d", None),
    ]
    assert rotated.find("other") == keys.find("other")


def test_a_key_with_an_end_keeps_its_expiry_when_rotated() -> None:
    """The new hash keeps the key's expiry unless a new expiry is given; an expired key requires a new expiry."""
    end, later = NOW + timedelta(days=3), NOW + timedelta(days=90)
    hashes = (StoredHash(sha256="a" * 64, expires_at=NOW), StoredHash(sha256="b" * 64, expires_at=end))
    keys = KeysFile(keys=(stored("shop", *hashes),))

    for expires_at, expected in ((None, end), (later, later)):
        shop = keys.rotated("shop", "d" * 64, NOW, timedelta(hours=24), expires_at).find("shop")

        assert shop is not None
        assert shop.ends_at == expected
    with pytest.raises(ConfigError, match=r"key shop: it ended on .*--expires-in-days"):
        keys.rotated("shop", "d" * 64, end, timedelta(hours=24))
    assert keys.rotated("shop", "d" * 64, end, timedelta(hours=24), later) != keys
