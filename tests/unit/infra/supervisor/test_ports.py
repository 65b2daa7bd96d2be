"""Free and taken ports."""

from pathlib import Path

import pytest

from infra.local.supervisor.ports import (
    INNER_PORTS,
    PUBLIC_PORTS,
    Port,
    check_free,
    free_window,
    of_running_stack,
    ports_of,
    with_free_ports,
)
from infra.local.supervisor.stackfile import StackFile
from services.errors import EnvironmentFault
from services.settings.settings import Settings
from tests.support.servers import holding


@pytest.mark.parametrize("host", ["203.0.113.1", "::1"])
def test_a_foreign_address_names_the_host_s_setting(host: str) -> None:
    """For an address of another machine, the error names the host's setting, since no other port would help."""
    with pytest.raises(EnvironmentFault, match="change TAILRACE_REDIS_HOST"):
        check_free(Port(host, 8000, "TAILRACE_REDIS_PORT", "TAILRACE_REDIS_HOST"))


def test_inner_ports_are_the_defaults_or_found_free(tmp_path: Path) -> None:
    """Inner ports that are not set move to free ports, so parallel stacks need distinct public ports only."""
    settings = Settings(state_dir=tmp_path, standby_grpc_port=19_001)
    defaults = ports_of(settings)

    with holding(defaults.values()):
        resolved = with_free_ports(settings, {})
        numbers = ports_of(resolved)
        with holding(numbers.values()):
            beside = ports_of(with_free_ports(Settings(state_dir=tmp_path / "beside"), {}))

    assert {name for name in numbers if numbers[name] == defaults[name]} == {*PUBLIC_PORTS, "standby_grpc_port"}
    assert len(set(numbers.values())) == len(numbers)
    assert resolved.kafka_bootstrap == f"127.0.0.1:{numbers['kafka_bootstrap']}"
    assert not {beside[name] for name in INNER_PORTS} & set(numbers.values())


def test_a_stack_takes_its_last_ports_again(tmp_path: Path) -> None:
    """A stack reuses its previous ports if they are free; only taken ports are replaced."""
    settings = Settings(state_dir=tmp_path)
    with holding(ports_of(settings).values()):
        before = ports_of(with_free_ports(settings, {}))

    again = ports_of(with_free_ports(settings, before))
    with holding([before["redis_port"]]):
        moved = ports_of(with_free_ports(settings, before))

    assert again == before
    assert {name for name in before if moved[name] != before[name]} == {"redis_port"}


@pytest.mark.parametrize("given", [{"redis_host": "redis.example"}, {"redis_tls_ca_file": Path("ca.pem")}])
def test_the_port_of_a_certain_store_is_left_alone(tmp_path: Path, given: dict[str, object]) -> None:
    """A host or certificate authority identifies an existing server, so its port is kept."""
    with holding([6379]):
        assert with_free_ports(Settings(state_dir=tmp_path, **given), {}).redis_port == 6379


def test_commands_find_the_ports_of_the_running_stack(tmp_path: Path) -> None:
    """Commands use the ports of the folder's running stack, except for ports set explicitly."""
    stack_file = StackFile(tmp_path)
    settings = Settings(state_dir=tmp_path, grpc_port=9_001)
    stack_file.claim()
    stack_file.write_ports({**ports_of(settings), "http_port": 8_010, "redis_port": 6_390, "grpc_port": 9_010})

    running = of_running_stack(settings)
    stack_file.release()

    assert (running.http_port, running.redis_port, running.grpc_port) == (8_010, 6_390, 9_001)
    assert of_running_stack(settings) == settings


def test_a_window_avoids_what_is_reserved() -> None:
    """A port window never contains a port reserved by a part that starts later."""
    first = free_window(8, seed="a")

    other = free_window(8, seed="a", reserved={first + 3})

    assert not other <= first + 3 < other + 8
