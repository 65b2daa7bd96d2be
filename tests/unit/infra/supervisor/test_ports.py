"""Free and taken ports."""

import os
import socket

import pytest

from infra.local.supervisor.ports import Port, check_free, free_window
from services.errors import EnvironmentFault


def test_a_taken_port_names_holder_and_setting() -> None:
    """The error names the port, the process that has it, and the setting to change."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = Port("127.0.0.1", server.getsockname()[1], "TAILRACE_REDIS_PORT")

        with pytest.raises(EnvironmentFault) as refused:
            check_free(port)

    assert f"port {port.number} is taken by" in str(refused.value)
    assert f"pid {os.getpid()}" in str(refused.value)
    assert "TAILRACE_REDIS_PORT" in str(refused.value)


@pytest.mark.parametrize("host", ["203.0.113.1", "::1"])
def test_a_foreign_address_names_the_host_s_setting(host: str) -> None:
    """An address of another machine is refused with the setting of the host, since no other port would help."""
    with pytest.raises(EnvironmentFault, match="change TAILRACE_REDIS_HOST"):
        check_free(Port(host, 8000, "TAILRACE_REDIS_PORT", "TAILRACE_REDIS_HOST"))


def test_a_window_avoids_what_is_reserved() -> None:
    """A window never contains the reserved port of a part that starts later."""
    first = free_window(8, seed="a")

    other = free_window(8, seed="a", reserved={first + 3})

    assert not other <= first + 3 < other + 8
