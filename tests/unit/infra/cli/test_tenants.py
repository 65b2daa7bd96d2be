"""`tailrace tenants`, and the keys of a tenant."""

from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from infra.cli.main import app
from services.contracts.tenant import TenantState
from services.gateway.access.keys import read_keys
from services.gateway.access.tenants import read_tenants, write_tenants
from tests.support.servers import free_port


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of a tenants file that does not exist yet, next to a keys file."""
    monkeypatch.setenv("TAILRACE_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("TAILRACE_API_KEYS_FILE", str(tmp_path / "keys.json"))
    monkeypatch.setenv("TAILRACE_TENANTS_FILE", str(tmp_path / "tenants.json"))
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path / "tenants.json"


def tailrace(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def test_a_tenant_is_made_changed_suspended_and_resumed(path: Path, tmp_path: Path) -> None:
    """Each command changes one entry of the file, and leaves an audit line."""
    assert tailrace("tenants", "new", "acme", "--rate", "50", "--share", "2").exit_code == 0
    assert tailrace("tenants", "set", "acme", "--unlimited", "--daily-quota", "9").exit_code == 0
    assert tailrace("tenants", "suspend", "acme").exit_code == 0
    suspended = read_tenants(path).existing("acme")
    listed = tailrace("tenants", "list").stdout
    assert tailrace("tenants", "suspend", "acme", "--resume").exit_code == 0

    assert (suspended.state, suspended.share) == (TenantState.SUSPENDED, 2)
    assert (suspended.rate_per_s, suspended.daily_quota) == (None, 9)
    assert [word in listed for word in ("acme", "suspended")] == [True, True]
    assert read_tenants(path).existing("acme").state is TenantState.ACTIVE
    assert (tmp_path / "audit.log").read_text().count('"tenant": "acme"') == 4


@pytest.mark.parametrize("tenant", ["Acme", "a.b", "-a", "a-", "operator", "default", "a" * 33])
def test_an_id_that_names_could_not_carry_is_refused(path: Path, tenant: str) -> None:
    """An id has lower-case letters, digits and inner hyphens, and does not name the tenant of keys without one."""
    assert tailrace("tenants", "new", "--", tenant).exit_code == 1
    assert not path.exists()


def test_an_id_is_used_once(path: Path) -> None:
    """A second tenant of the same id is refused, and the first stays."""
    tailrace("tenants", "new", "acme", "--max-k", "7")

    assert tailrace("tenants", "new", "acme").exit_code == 1
    assert read_tenants(path).existing("acme").max_k == 7


def test_a_key_is_made_for_a_known_tenant(path: Path, tmp_path: Path) -> None:
    """`--tenant` names a tenant of the file; a key without it belongs to the default tenant."""
    new = ("keys", "new", "--scope", "recommend", "--id")
    unknown = tailrace(*new, "a", "--tenant", "acme")
    tailrace("tenants", "new", "acme")
    made = [tailrace(*new, "a", "--tenant", "acme").exit_code, tailrace(*new, "b").exit_code]

    assert (unknown.exit_code, made) == (1, [0, 0])
    assert [key.tenant for key in read_keys(tmp_path / "keys.json").keys] == ["acme", ""]


def test_a_deleted_tenants_name_is_not_trained(path: Path) -> None:
    """Nobody would delete the outputs and the bundle again."""
    tailrace("tenants", "new", "acme")
    write_tenants(path, read_tenants(path).with_changed("acme", state=TenantState.DELETED))

    refused = tailrace("pipeline", "--name", "acme.default", "--until", "ingest")

    assert refused.exit_code == 1
    assert "acme is deleted" in str(refused.exception or refused.output)


def test_a_deletion_outside_of_the_stack_ends_the_calls_and_says_where_to_repeat_it(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tenant is marked and its keys are revoked before its data is looked for; a repetition changes no file."""
    monkeypatch.setenv("TAILRACE_REDIS_PORT", str(free_port()))
    tailrace("tenants", "new", "acme")
    tailrace("keys", "new", "--id", "a", "--tenant", "acme", "--scope", "recommend")
    files = path, tmp_path / "keys.json"

    outcomes = [
        (tailrace("tenants", "delete", "acme", "--yes"), [file.stat().st_mtime_ns for file in files]) for _ in range(2)
    ]

    assert [(done.exit_code, "repeat it where" in str(done.exception)) for done, _ in outcomes] == [(1, True)] * 2
    assert outcomes[0][1] == outcomes[1][1]
    assert [tenant.state for tenant in read_tenants(path).tenants] == [TenantState.DELETED]
    assert read_keys(tmp_path / "keys.json").keys == ()
