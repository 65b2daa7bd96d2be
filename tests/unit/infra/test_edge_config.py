"""The edge's configuration and reported health; tests/integration/doors covers the running edge."""

import json
import os
import re
import socket
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import trustme

from infra.local.binaries import haproxy_command
from infra.local.edge.admin import count_up, has_ray_up, write_maps
from infra.local.edge.config import TENANT_WEIGHTS, EdgePlan, Upstream, check_files
from services.contracts.access import Scope
from services.contracts.answers import ErrorBody
from services.contracts.message import decode
from services.contracts.tenant import TenantState
from services.errors import ConfigError, ErrorKind
from services.gateway.access.keys import KeysFile, write_keys
from services.gateway.access.tenants import StoredTenant, TenantsFile, write_tenants
from services.gateway.openai.schema import OpenAiErrorBody
from services.gateway.overload.monitor import DOORS
from tests.support.gateway.keys import stored_key
from tests.support.servers import HOST

HEADER = "# pxname,svname,status,check_status\n"


def plan(
    tls_dir: Path | None, host: str = HOST, client_ca_file: Path | None = None, http_fd: int = 3, grpc_fd: int = 4
) -> EdgePlan:
    """Build an edge with an ingress on each of these comma-separated hosts and a standby on the first host."""
    ray = tuple(Upstream(address, 18_000, 19_000) for address in host.split(","))
    standby = Upstream(ray[0].host, 18_001, 19_001)
    return EdgePlan(
        http_fd=http_fd, grpc_fd=grpc_fd, ray=ray, standby=standby, tls_dir=tls_dir, client_ca_file=client_ca_file
    )


@pytest.mark.parametrize(
    ("name", "host"),
    [
        (None, HOST),
        ("tls", "::1"),
        ("a blank and it's", "localhost"),
        ('a "quote" and a#hash', "serve"),
        ("a$dollar and a back\\slash", HOST),
        (None, "10.0.0.1,10.0.0.2,serve"),
    ],
)
def test_haproxy_accepts_every_path_and_host(tmp_path: Path, name: str | None, host: str) -> None:
    """HAProxy's config check accepts paths that need quoting, and all kinds of hosts."""
    folder, config = None if name is None else tmp_path / name, tmp_path / "haproxy.cfg"
    if folder is not None:
        folder.mkdir()
        ca = trustme.CA()
        leaf = ca.issue_cert("localhost")
        leaf.cert_chain_pems[0].write_to_path(folder / "tls.crt")
        leaf.private_key_pem.write_to_path(folder / "tls.key")
        ca.cert_pem.write_to_path(folder / "ca.crt")
    with socket.create_server((HOST, 0)) as http, socket.create_server((HOST, 0)) as rpc:
        descriptors = http.fileno(), rpc.fileno()
        config.write_text(plan(folder, host, folder and folder / "ca.crt", *descriptors).render())

        checked = subprocess.run(
            [*haproxy_command(config), "-c"],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            pass_fds=descriptors,
            env={**os.environ, "RES_OPTIONS": "timeout:1 attempts:1"},  # an unknown name is looked up only once
        )

    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize(
    ("rows", "is_up", "num_up"),
    [
        ("rest,ray,UP,L7OK\ngrpc,ray,UP,L7OK\n", True, 1),
        ("rest,ray,UP,L7OK\ngrpc,ray,DOWN,L4CON\n", False, 0),
        ("rest,ray,UP 1/2,L7OK\ngrpc,ray,UP,L7OK\n", True, 1),
        ("rest,ray1,DOWN,L4CON\nrest,ray2,UP,L7OK\ngrpc,ray1,DOWN,L4CON\ngrpc,ray2,UP,L7OK\n", True, 1),
        ("rest,ray1,UP,L7OK\nrest,ray2,DRAIN,L7OK\ngrpc,ray1,UP,L7OK\ngrpc,ray2,DRAIN,L7OK\n", True, 1),
        ("rest,ray1,MAINT (resolution),\n", False, 0),
        ("rest,ray,UP,INI\ngrpc,ray,DOWN,L4CON\n", None, 0),
        ("rest,standby,UP,L7OK\nrest,BACKEND,UP,\ngrpc,standby,UP,L7OK\n", None, 0),
    ],
)
def test_ray_is_up_when_each_door_has_a_server_that_passes_its_checks(
    rows: str, is_up: bool | None, num_up: int
) -> None:
    """Ray is up if REST and gRPC each have a healthy server, and unknown before the first check has ended."""
    assert has_ray_up(HEADER + rows) is is_up
    assert count_up(HEADER + rows) == num_up


def test_the_edge_s_own_errors_have_the_doors_envelopes() -> None:
    """JSON errors that HAProxy generates have the documented fields, and OpenAI's fields on OpenAI paths."""
    bodies = re.findall(r"application/json.*? lf-string '([^']+)'", plan(None).render())

    assert len(bodies) >= 3
    for body in bodies:
        if "param" in json.loads(body)["error"]:
            decode(OpenAiErrorBody, body.encode())
        else:
            error = decode(ErrorBody, body.encode()).error
            assert (error.code in set(ErrorKind), error.request_id) == (True, "%[var(txn.request_id),json(utf8s)]")


def test_only_tenants_whose_calls_are_admitted_count_in_the_mean_weight(tmp_path: Path) -> None:
    """A deleted or suspended tenant with a large share takes nothing from other tenants' parts."""
    write_keys(tmp_path / "keys.json", KeysFile(keys=(stored_key("shop", Scope.RECOMMEND, tenant="acme"),)))
    tenants = [StoredTenant(id="acme"), StoredTenant(id="bolt", share=3)]
    ended = {"gone": TenantState.DELETED, "paused": TenantState.SUSPENDED}
    tenants += [StoredTenant(id=tenant, state=state, share=1_000) for tenant, state in ended.items()]
    write_tenants(tmp_path / "tenants.json", TenantsFile(tenants=tuple(tenants)))

    weights = write_maps(tmp_path, tmp_path / "keys.json", tmp_path / "tenants.json")[TENANT_WEIGHTS]

    assert weights == "acme 50\nbolt 150\n"


def test_a_missing_file_is_named_with_its_setting(tmp_path: Path) -> None:
    """The error names a missing certificate, key or authority and its setting."""
    (tmp_path / "tls.crt").touch()

    with pytest.raises(ConfigError, match=r"TAILRACE_TLS_DIR: no file .*tls\.key"):
        check_files(tmp_path, None)
    (tmp_path / "tls.key").touch()
    with pytest.raises(ConfigError, match=r"TAILRACE_TLS_CLIENT_CA_FILE: no file .*ca\.crt"):
        check_files(tmp_path, tmp_path / "ca.crt")


def test_a_health_check_replaces_each_limit_in_one_step() -> None:
    """A request between two steps would meet no limit: each of the four limits has one rule."""
    rules = [line for line in plan(None).render().splitlines() if "http-check" in line]

    assert [
        sum(f"(proc.{limit}_{door})" in rule for rule in rules) for limit in ("limit", "fair") for door in DOORS
    ] == [1] * 4


@pytest.mark.parametrize(("max_requests", "maxconn"), [(0, 4_096), (512, 4_096), (16 * 1_024, 16_384)])
def test_the_edge_has_a_connection_for_each_request_that_the_gateways_may_answer(
    max_requests: int, maxconn: int
) -> None:
    """The edge's connection limit follows the gateways' settings."""
    assert f"maxconn {maxconn}\n" in replace(plan(None), max_requests=max_requests).render()
