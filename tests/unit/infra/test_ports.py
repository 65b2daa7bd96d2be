"""Free and taken ports: `pytest tests/unit/infra/test_ports.py`."""

import os
import socket

import pytest

from infra.local.supervisor.ports import Port, check_free, free_window
from services.errors import EnvironmentFault


def test_a_taken_port_names_holder_and_setting() -> None:
    """The one line says which port, who has it, and what to set."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = Port("127.0.0.1", server.getsockname()[1], "TAILRACE_REDIS_PORT")

        with pytest.raises(EnvironmentFault) as refused:
            check_free(port)

    assert f"port {port.number} is taken by" in str(refused.value)
    assert f"pid {os.getpid()}" in str(refused.value)
    assert "TAILRACE_REDIS_PORT" in str(refused.value)


@pytest.mark.parametrize("host", ["203.0.113.1", "::1"])
def test_a_foreign_address_names_the_host_s_setting(host: str) -> None:
    """An address that is not this machine's is refused with the setting that names it, since no other port would do."""
    with pytest.raises(EnvironmentFault, match="change TAILRACE_REDIS_HOST"):
        check_free(Port(host, 8000, "TAILRACE_REDIS_PORT", "TAILRACE_REDIS_HOST"))


def test_a_window_avoids_what_is_reserved() -> None:
    """A port of a part that starts later is not given away."""
    first = free_window(8, seed="a")

    other = free_window(8, seed="a", reserved={first + 3})

    assert not other <= first + 3 < other + 8
