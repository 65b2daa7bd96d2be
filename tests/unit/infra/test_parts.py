"""The parts of the stack: `pytest tests/unit/infra/test_parts.py`."""

from pathlib import Path

import pytest

from infra.local.commands.doctor import examine
from infra.local.commands.guide import grpc_call, rest_call
from infra.local.servers.access import check_access
from infra.local.servers.serve import _num_processes
from infra.local.supervisor.parts import broker_address, stack_parts
from services.errors import ConfigError
from services.settings.settings import Settings


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Default settings in a folder of their own."""
    return Settings(state_dir=tmp_path)


def test_needs_come_before_their_users(settings: Settings) -> None:
    """Every need is an earlier part, so a start from left to right always ends."""
    earlier: set[str] = set()
    for part in stack_parts(settings):
        assert set(part.needs) <= earlier
        earlier.add(part.name)


def test_every_part_is_asked_and_every_port_has_its_setting(settings: Settings) -> None:
    """No part is believed without a question, and a taken port can be moved by a setting that exists."""
    known = {f"TAILRACE_{name.upper()}" for name in Settings.model_fields}

    for part in stack_parts(settings):
        assert part.probes
        assert {name for port in part.ports for name in (port.setting, port.host_setting)} <= known


@pytest.mark.parametrize(
    ("update", "words"),
    [
        ({"grpc_port": 8000}, "TAILRACE_GRPC_PORT: 8000 is TAILRACE_HTTP_PORT's already"),
        ({"metrics_port": 6379}, "TAILRACE_METRICS_PORT: 6379 is TAILRACE_REDIS_PORT's already"),
        ({"http_host": "0.0.0.0", "http_port": 9092}, "TAILRACE_HTTP_PORT: 9092 is TAILRACE_KAFKA_BOOTSTRAP's already"),
    ],
)
def test_one_port_for_two_is_refused(settings: Settings, update: dict[str, object], words: str) -> None:
    """Each of them is free as long as nothing runs, and the second would never come up."""
    with pytest.raises(ConfigError, match=words):
        stack_parts(settings.model_copy(update=update))


@pytest.mark.parametrize("bootstrap", ["", "kafka", "kafka:", "kafka:port", "a:1,b:2", "kafka:0", "kafka:70000"])
def test_an_embedded_broker_needs_one_address(bootstrap: str) -> None:
    """Anything but host:port is refused by the setting's name."""
    with pytest.raises(ConfigError, match="TAILRACE_KAFKA_BOOTSTRAP"):
        broker_address(bootstrap)


def test_the_printed_calls_bring_a_key_and_trust_where_that_is_needed(settings: Settings, tmp_path: Path) -> None:
    """The key comes from the caller's environment, the authority from beside the certificate."""
    (tmp_path / "ca.crt").touch()
    secured = settings.model_copy(update={"api_keys_file": tmp_path / "keys.json", "tls_dir": tmp_path})

    rest, rpc = rest_call(secured, "u7"), grpc_call(secured, "u7", "python")

    assert f"--cacert {tmp_path}/ca.crt https://127.0.0.1:8000/" in rest
    assert '-H "authorization: Bearer $TAILRACE_KEY"' in rest
    assert "secure_channel('127.0.0.1:9000', grpc.ssl_channel_credentials(open" in rpc
    assert "('authorization', 'Bearer $TAILRACE_KEY')" in rpc


def test_the_edge_alone_has_the_public_ports(settings: Settings) -> None:
    """Ray's ingress and the standby listen behind it on loopback, and neither waits for the other; the standby is optional."""
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
        ({"kafka_tls_ca_file": Path("ca.pem")}, "embedded broker"),
        ({"kafka_username": "u", "kafka_password_file": Path("p")}, "embedded broker"),
    ],
)
def test_the_embedded_broker_says_what_it_cannot(settings: Settings, update: dict[str, object], words: str) -> None:
    """Rather than standing open where a password was asked for."""
    with pytest.raises(ConfigError, match=words):
        stack_parts(settings.model_copy(update=update))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("api_keys_file", "none.json", "none.json"),
        ("tls_dir", "none", "TAILRACE_TLS_DIR"),
        ("redis_tls_ca_file", "ca.pem", "TAILRACE_REDIS_TLS_CA_FILE"),
        ("redis_password_file", "none.password", "none.password"),
    ],
)
def test_files_that_a_part_would_break_at_are_refused_before_the_start(
    settings: Settings, tmp_path: Path, name: str, value: str, words: str
) -> None:
    """By the setting's or the file's name."""
    with pytest.raises(ConfigError, match=words):
        check_access(settings.model_copy(update={name: tmp_path / value}))


@pytest.mark.parametrize("name", ["api_keys_file", "tls_dir", "redis_password_file"])
def test_the_doctor_finds_what_the_start_would_refuse(settings: Settings, tmp_path: Path, name: str) -> None:
    """A file of access that is not there is found by the doctor too, and named."""
    missing = tmp_path / "missing"

    (found,) = [one for one in examine(settings.model_copy(update={name: missing})) if one.what == "access"]

    assert not found.is_ok
    assert str(missing) in found.found


def test_ray_starts_no_more_workers_than_there_is_work_for(settings: Settings) -> None:
    """It starts one ahead for each CPU that it is told of: controller, proxy and replicas, however many cores a host has."""
    assert _num_processes(settings) == 2 + settings.gateway_replicas + settings.llm_replicas
    assert _num_processes(settings.model_copy(update={"text_path": "x", "text_replicas": 3})) == 2 + 2 + 1 + 3
