"""Container roles: secrets, health checks, a process with its metrics endpoint."""

import hashlib
import stat
import sys
import time
from pathlib import Path

import pytest

from infra.docker.__main__ import run_beside_metrics
from infra.docker.credentials import OPERATOR, make_missing, operator_key
from infra.docker.healthy import probe_of
from services.contracts.access import Scope
from services.gateway.access.keys import hash_of, read_keys
from services.settings.settings import Settings
from tests.support.servers import free_port


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The empty volumes."""
    for folder in ("redis", "kafka", "doors", "keys", "grafana"):
        (tmp_path / folder).mkdir()
    return tmp_path


def test_secrets_are_made_once(root: Path) -> None:
    """A second run changes nothing."""
    made = {path: path.read_text() for path in make_missing(root)}
    again = list(make_missing(root))

    assert len(made) == 7
    assert again == []
    assert {path: path.read_text() for path in made} == made


def test_server_files_match_client_files(root: Path) -> None:
    """Redis has the password's hash, the broker the password, the doors the hash of the operator's key, which its owner alone may read."""
    list(make_missing(root))
    password = (root / "redis" / "password").read_text()
    key = operator_key(root)
    (stored,) = read_keys(root / "doors" / "keys.json").keys

    assert f"#{hashlib.sha256(password.encode()).hexdigest()} " in (root / "redis" / "users.acl").read_text()
    assert password not in (root / "redis" / "users.acl").read_text()
    assert f'user_tailrace="{(root / "kafka" / "password").read_text()}";' in (root / "kafka" / "jaas.conf").read_text()
    assert (stored.id, stored.scopes) == (OPERATOR, frozenset(Scope))
    assert [one.sha256 for one in stored.hashes] == [hash_of(key)]
    assert key not in (root / "doors" / "keys.json").read_text()
    assert stat.S_IMODE((root / "keys" / "operator.key").stat().st_mode) == 0o600


def test_health_probes_by_word(tmp_path: Path) -> None:
    """A closed port and a missing heartbeat are unhealthy, a fresh heartbeat is healthy, an unknown kind is refused."""
    closed, beat = free_port(), tmp_path / "worker-0.beat"

    assert not probe_of(f"tcp:{closed}")()
    assert not probe_of(f"http:{closed}/healthz")()
    assert not probe_of(f"beat:{beat}")()
    beat.touch()
    assert probe_of(f"beat:{beat}")()
    with pytest.raises(ValueError, match="none of"):
        probe_of("ping:1")


def test_a_role_runs_beside_its_metrics(tmp_path: Path) -> None:
    """The process has its metrics folder in its environment and the endpoint is open; its exit code is returned."""
    port = free_port()
    settings = Settings(state_dir=tmp_path, metrics_port=port)
    script = (
        "import os, sys, urllib.request\n"
        f"answer = urllib.request.urlopen('http://127.0.0.1:{port}/healthz').read()\n"
        "sys.exit(7 if answer == b'ok\\n' and os.environ['PROMETHEUS_MULTIPROC_DIR'] == os.environ['WANTED'] else 1)\n"
    )
    began = time.monotonic()

    code = run_beside_metrics((sys.executable, "-c", script), {"WANTED": str(settings.metrics_dir)}, settings)

    assert code == 7
    assert time.monotonic() - began < 60
    assert settings.metrics_dir.is_dir()


def test_the_log_file_of_a_role_is_copied_to_its_output(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Lines come through from before and after the file's rotation, the process's last words included, and none that the process printed."""
    settings, log_file = Settings(state_dir=tmp_path, metrics_port=free_port()), tmp_path / "gateway.log"
    script = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "log = Path(sys.argv[1])\n"
        "log.write_text('first words\\n')\n"
        "log.rename(f'{log}.old')\n"
        "log.write_text('last words\\n')\n"
        "print('(raylet) A worker died', flush=True)\n"
        "os._exit(7)\n"
    )

    code = run_beside_metrics((sys.executable, "-c", script, str(log_file)), {}, settings, log_file)

    assert code == 7
    shown = capfd.readouterr()
    assert shown.out.splitlines() == ["first words", "last words"]
    assert "(raylet) A worker died" in shown.err
