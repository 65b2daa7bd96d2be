"""What the TLS edge is told: `pytest tests/unit/infra/test_edge_config.py`. What it does is in tests/integration/test_edge.py."""

import subprocess
from pathlib import Path

import pytest
import trustme

from infra.local.edge.config import EdgePlan, Way, check_files
from infra.local.servers.binaries import haproxy_command
from services.errors import ConfigError


def plan(tls_dir: Path, host: str = "127.0.0.1", client_ca_file: Path | None = None) -> EdgePlan:
    """An edge in front of doors on loopback."""
    ways = Way(host, 8000, "127.0.0.1", 18_000), Way(host, 9000, "127.0.0.1", 19_000)
    return EdgePlan(rest=ways[0], grpc=ways[1], tls_dir=tls_dir, client_ca_file=client_ca_file)


@pytest.mark.parametrize("name", ["tls", "a blank", "it's", 'a "quote"', "a$dollar", "back\\slash", "a#hash"])
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1"])
def test_haproxy_understands_every_path_and_host(tmp_path: Path, name: str, host: str) -> None:
    """HAProxy's own check reads the certificates by those names."""
    folder, ca = tmp_path / name, trustme.CA()
    folder.mkdir()
    leaf = ca.issue_cert("localhost")
    leaf.cert_chain_pems[0].write_to_path(folder / "tls.crt")
    leaf.private_key_pem.write_to_path(folder / "tls.key")
    ca.cert_pem.write_to_path(folder / "ca.crt")
    config = tmp_path / "haproxy.cfg"
    config.write_text(plan(folder, host, folder / "ca.crt").render())

    checked = subprocess.run(
        [*haproxy_command(config), "-c"], capture_output=True, text=True, check=False, cwd=tmp_path
    )

    assert checked.returncode == 0, checked.stderr


def test_client_certificates_are_asked_for_where_an_authority_is_named(tmp_path: Path) -> None:
    """At both doors or at none."""
    strict = plan(tmp_path, client_ca_file=tmp_path / "ca.crt").render()

    assert strict.count("verify required") == 2
    assert "verify" not in plan(tmp_path).render()


def test_a_missing_file_is_named_with_its_setting(tmp_path: Path) -> None:
    """Certificate, key and authority."""
    (tmp_path / "tls.crt").touch()

    with pytest.raises(ConfigError, match=r"TAILRACE_TLS_DIR: no file .*tls\.key"):
        check_files(tmp_path, None)
    (tmp_path / "tls.key").touch()
    with pytest.raises(ConfigError, match=r"TAILRACE_TLS_CLIENT_CA_FILE: no file .*ca\.crt"):
        check_files(tmp_path, tmp_path / "ca.crt")
