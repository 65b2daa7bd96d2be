"""Container roles: secrets, health checks, and a process with its metrics endpoint."""

import hashlib
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from infra.docker.__main__ import run_beside_metrics
from infra.docker.credentials import OPERATOR, make_missing, operator_key
from infra.docker.healthy import probe_of
from services.contracts.access import Scope
from services.gateway.access.keys import hash_of, read_keys
from services.gateway.access.tenants import read_tenants
from services.settings.settings import Settings, inherited_environment
from tests.support.servers import free_port


def test_secrets_are_made_once_and_those_of_servers_match_those_of_clients(tmp_path: Path) -> None:
    """Servers get the hash or password of each client secret, and only the owner can read the operator's key."""
    for folder in ("redis", "kafka", "doors", "keys", "grafana"):
        (tmp_path / folder).mkdir()

    made = {str(path.relative_to(tmp_path)): path.read_text() for path in make_missing(tmp_path)}

    assert (len(made), [*make_missing(tmp_path)]) == (8, [])
    assert {path: (tmp_path / path).read_text() for path in made} == made
    (stored,), key = read_keys(tmp_path / "doors" / "keys.json").keys, operator_key(tmp_path)
    password = made["redis/password"]
    assert f"#{hashlib.sha256(password.encode()).hexdigest()} " in made["redis/users.acl"]
    assert password not in made["redis/users.acl"]
    assert f'user_tailrace="{made["kafka/password"]}";' in made["kafka/jaas.conf"]
    assert (stored.id, stored.scopes) == (OPERATOR, frozenset(Scope))
    assert [key_hash.sha256 for key_hash in stored.hashes] == [hash_of(key)]
    assert key not in made["doors/keys.json"]
    assert read_tenants(tmp_path / "doors" / "tenants.json").tenants == ()
    assert stat.S_IMODE((tmp_path / "keys" / "operator.key").stat().st_mode) == 0o600


def test_health_probes_by_word(tmp_path: Path) -> None:
    """A closed port or missing heartbeat is unhealthy, a fresh heartbeat healthy, and an unknown kind an error."""
    closed, beat = free_port(), tmp_path / "worker-0.beat"

    assert not probe_of(f"tcp:{closed}")()
    assert not probe_of(f"http:{closed}/healthz")()
    assert not probe_of(f"beat:{beat}")()
    beat.touch()
    assert probe_of(f"beat:{beat}")()
    with pytest.raises(ValueError, match="unknown; give"):
        probe_of("ping:1")


def test_a_standby_with_a_bad_file_ends_with_one_line(tmp_path: Path) -> None:
    """A standby with an invalid surfaces file exits with 1 and prints one line without a traceback."""
    (tmp_path / "surfaces.toml").write_text("cart = [")
    given = {"TAILRACE_STATE_DIR": str(tmp_path), "TAILRACE_SURFACES_FILE": str(tmp_path / "surfaces.toml")}
    command = [sys.executable, "-m", "infra.local.standby"]
    ended = subprocess.run(
        command, env={**inherited_environment(), **given}, capture_output=True, text=True, check=False
    )

    assert ended.returncode == 1
    assert ended.stderr.startswith(f"TAILRACE_SURFACES_FILE: {tmp_path}/surfaces.toml: text: not TOML")
    assert len(ended.stderr.splitlines()) == 1


def test_a_role_runs_beside_its_metrics_and_its_log_is_copied(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The process has a metrics folder and endpoint, its exit code is returned, and its rotated log is copied."""
    port, log_file = free_port(), tmp_path / "gateway.log"
    settings = Settings(state_dir=tmp_path, metrics_port=port)
    script = f"""
import os, sys, urllib.request
from pathlib import Path
assert urllib.request.urlopen("http://127.0.0.1:{port}/healthz").read() == b"ok\\n"
assert os.environ["PROMETHEUS_MULTIPROC_DIR"] == os.environ["WANTED"]
log = Path(sys.argv[1])
log.write_text("first words\\n")
log.rename(f"{{log}}.old")
log.write_text("last words\\n")
print("(raylet) A worker died", flush=True)
os._exit(7)
"""
    command, variables = (sys.executable, "-c", script, str(log_file)), {"WANTED": str(settings.metrics_dir)}

    assert run_beside_metrics(command, variables, settings, log_file) == 7
    assert run_beside_metrics((sys.executable, "-c", "exit(3)"), {}, settings) == 3
    shown = capfd.readouterr()
    assert shown.out.splitlines() == ["first words", "last words"]
    assert "(raylet) A worker died" in shown.err
