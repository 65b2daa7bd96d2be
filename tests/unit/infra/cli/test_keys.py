"""`tailrace keys` and the audit file."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from infra.cli.main import app
from infra.cli.session import AUDIT_FILE, audited
from services.contracts.access import Priority, Scope
from services.errors import ConfigError
from services.gateway.access.keys import hash_of, read_keys
from tests.unit.gateway.world import add_version, catalogue_of, publish

SHOP = ("keys", "new", "--id", "shop", "--scope", "recommend")
OTHER = ("keys", "new", "--scope", "admin", "--id")


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of a keys file that does not exist yet."""
    monkeypatch.setenv("TAILRACE_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("TAILRACE_API_KEYS_FILE", str(tmp_path / "secrets" / "keys.json"))
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path / "secrets" / "keys.json"


def tailrace(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def key_of(result: Result) -> str:
    """Return the key that a command printed as its only output on stdout."""
    assert result.exit_code == 0, result.output
    assert re.fullmatch(r"trk_[A-Za-z0-9_-]{43}\n", result.stdout)
    return result.stdout.strip()


def acts(state_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (state_dir / AUDIT_FILE).read_text().splitlines()]


def test_nothing_is_done_that_leaves_no_line(path: Path, tmp_path: Path) -> None:
    """If the audit file cannot be written, keys are neither created nor revoked."""
    key_of(tailrace(*SHOP))
    kept = path.read_bytes()
    (tmp_path / AUDIT_FILE).unlink()
    (tmp_path / AUDIT_FILE).mkdir()

    for act in ((*OTHER, "ops"), ("keys", "revoke", "shop")):
        assert tailrace(*act).exit_code == 1
        assert path.read_bytes() == kept


def test_a_new_key_is_printed_once_and_only_its_hash_is_kept(path: Path) -> None:
    """The keys file stores the hash and all limits; the list shows the limits and the start of the hash."""
    limits = ("--rate", "50", "--burst", "100", "--daily-quota", "9", "--max-k", "20", "--expires-in-days", "30")
    key = key_of(tailrace(*SHOP, "--scope", "events", "--priority", "high", *limits))
    listed = tailrace("keys", "list")

    stored = read_keys(path).find("shop")
    assert stored is not None
    assert (stored.scopes, stored.priority) == ({Scope.RECOMMEND, Scope.EVENTS}, Priority.HIGH)
    assert (stored.rate_per_s, stored.burst, stored.daily_quota, stored.max_k) == (50, 100, 9, 20)
    assert [key_hash.sha256 for key_hash in stored.hashes] == [hash_of(key)]
    assert stored.hashes[0].expires_at is not None
    assert re.search(rf"shop\s+events recommend\s+high\s+50\s.*{hash_of(key)[:8]}", listed.stdout), listed.stdout
    assert key not in path.read_text() + listed.output


@pytest.mark.parametrize("days", ["0", "-1", "nan", "inf", "1e12"])
def test_a_key_that_could_never_be_valid_is_refused(path: Path, days: str) -> None:
    """An expiry that is not positive or beyond the calendar is rejected with the option's name."""
    new = tailrace(*SHOP, "--expires-in-days", days)
    key_of(tailrace(*SHOP))
    rotated = tailrace("keys", "rotate", "shop", "--overlap-hours", days)

    assert (new.exit_code, new.stdout) == (2, "")
    assert "--expires-in-days" in new.stderr
    assert rotated.exit_code == (0 if days == "0" else 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("keys", "revoke", "nobody"), "key nobody: unknown; "),
        (("keys", "rotate", "nobody"), "key nobody: unknown; "),
        (SHOP, "the id is taken; "),
        ((*OTHER, "a b"), "--id: 'a b' is not of the right form; give up to 64 of a to z"),
        ((*OTHER, "b", "--rate", "0"), "--rate: 0.0 is out of range; give more than 0"),
        ((*OTHER, "b", "--burst", "5"), "--rate: burst needs rate_per_s; give both"),
    ],
)
def test_a_refused_change_changes_nothing(path: Path, arguments: tuple[str, ...], words: str) -> None:
    """A rejected change is reported and audited, and leaves the file unchanged."""
    key_of(tailrace(*SHOP))
    before = path.read_bytes()

    refused = tailrace(*arguments)

    assert isinstance(refused.exception, ConfigError)
    assert words in str(refused.exception)
    assert path.read_bytes() == before
    assert acts(path.parents[1])[-1]["outcome"] == "ConfigError"


def test_every_act_leaves_one_line_without_a_secret(path: Path, tmp_path: Path) -> None:
    """The audit file records time, user, act, origin and outcome of each command, including interrupted commands."""
    publish(tmp_path / "bundles", "v1", catalogue_of())
    add_version(tmp_path / "bundles", "v2", catalogue_of())
    keys = [key_of(tailrace(*SHOP)), key_of(tailrace("keys", "rotate", "shop"))]
    for command in (("keys", "revoke", "shop"), ("promote", "v2"), ("rollback",), ("promote", "none")):
        tailrace(*command)
    with pytest.raises(KeyboardInterrupt), audited(tmp_path, "down"):
        raise KeyboardInterrupt

    lines = acts(tmp_path)
    assert [(line["act"], line["outcome"]) for line in lines] == [
        *((act, "ok") for act in ("keys new", "keys rotate", "keys revoke", "promote", "rollback")),
        ("promote", "BundleNotFound"),
        ("down", "KeyboardInterrupt"),
    ]
    assert all({"time", "event", "act", "who", "origin", "outcome"} <= line.keys() for line in lines)
    assert [lines[0]["key_id"], lines[3]["version"]] == ["shop", "v2"]
    assert not any(key in (tmp_path / AUDIT_FILE).read_text() for key in keys)


def test_keys_need_no_more_than_a_few_small_packages(path: Path) -> None:
    """`python -m infra.cli.keys` needs only typer, rich, msgspec and pydantic-settings."""
    allowed = {"typer", "rich", "pydantic", "pydantic_core", "pydantic_settings", "annotated_doc", "annotated_types"}
    allowed |= {"msgspec", "dotenv", "shellingham", "typing_extensions", "typing_inspection"}
    allowed |= {"infra", "models", "services", "sitecustomize"}  # the last: Debian's own start of Python
    code = (
        "import runpy, sys\n"
        "sys.argv = ['keys', 'new', '--id', 'a', '--scope', 'recommend']\n"
        "try: runpy.run_module('infra.cli.keys', run_name='__main__')\n"
        "except SystemExit as end: assert end.code == 0\n"
        "sys.stderr.write('\\n' + ' '.join({name.split('.')[0] for name in sys.modules} - "
        "set(sys.stdlib_module_names)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name for name in done.stderr.splitlines()[-1].split() if not name.startswith("_")}

    assert done.stdout.startswith("trk_")
    assert loaded <= allowed
    assert path.exists()
