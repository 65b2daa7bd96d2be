"""The listening sockets of a running stack, and its browser protection: `pytest tests/e2e/test_listening.py`."""

import ipaddress
from contextlib import suppress

import psutil

from tests.support.stacks.stack import Stack, error_of, new_user_id


def listening(stack: Stack) -> dict[tuple[str, int], str]:
    """Return every listening TCP socket of the stack's processes, with the process' name."""
    listeners = {}
    for process in stack.processes():
        with suppress(psutil.NoSuchProcess):
            for connection in process.net_connections(kind="tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    listeners[connection.laddr.ip, connection.laddr.port] = process.name()
    return listeners


def test_only_loopback_listens(stack: Stack) -> None:
    """Every server of the stack, including Ray's and its HAProxy, listens only on this host."""
    listeners = listening(stack)
    settings = stack.settings
    doors = {settings.http_port, settings.grpc_port, settings.inner_http_port, settings.inner_grpc_port}

    assert doors <= {port for _, port in listeners}
    assert {"gcs_server", "raylet", "haproxy"} <= set(listeners.values())
    beyond = {
        f"{name} {ip}:{port}"
        for (ip, port), name in listeners.items()
        if not ipaddress.ip_address(ip.removeprefix("::ffff:")).is_loopback
    }
    assert beyond == set()


def test_a_page_of_another_site_records_no_event(stack: Stack) -> None:
    """Events from a rebound host or a cross-site form are rejected; without a browser the same event is accepted."""
    event = {"user_id": new_user_id(), "item_id": "50"}
    for field, value in (("host", "evil.example"), ("origin", "http://evil.example"), ("sec-fetch-site", "cross-site")):
        refused = stack.rest.post("/v1/events", json=event, headers={field: value})

        assert (refused.status_code, error_of(refused)["field"]) == (422, field)
    assert stack.rest.post("/v1/events", json=event).status_code == 200
