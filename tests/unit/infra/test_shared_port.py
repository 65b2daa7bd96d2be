"""Several listeners on one port, and who gets a connection: `pytest tests/unit/infra/test_shared_port.py`."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.local.standby.shared_port import SharedPort, can_share
from tests.support.servers import HOST, free_port

pytestmark = pytest.mark.skipif(not can_share(), reason="this kernel does not lead connections")
TRIES = 12


@contextmanager
def other_on(port: int) -> Iterator[socket.socket]:
    """Another listener as HAProxy is one."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind((HOST, port))
        other.listen()
        yield other


@contextmanager
def ours_on(port: int) -> Iterator[SharedPort]:
    """Our side of it."""
    shared = SharedPort(HOST, port)
    with shared.socket:
        yield shared


def come_to(port: int, listener: socket.socket) -> int:
    """How many of some new connections come to this listener."""
    listener.settimeout(0)
    num_come = 0
    for _ in range(TRIES):
        with socket.create_connection((HOST, port)):
            try:
                listener.accept()[0].close()
                num_come += 1
            except BlockingIOError:
                continue
    return num_come


@pytest.mark.parametrize("we_are_first", [True, False])
def test_connections_go_where_they_are_led(we_are_first: bool) -> None:
    """All of them, whoever listened first, and as often as the lead changes."""
    port = free_port()
    first, second = (ours_on, other_on) if we_are_first else (other_on, ours_on)
    with first(port) as one, second(port) as two:
        ours = one if isinstance(one, SharedPort) else two
        assert isinstance(ours, SharedPort)

        for to_us in (True, False, True, False):
            ours.lead(to_us=to_us)
            assert come_to(port, ours.socket) == (TRIES if to_us else 0)


@pytest.mark.parametrize("we_are_first", [True, False])
def test_when_the_other_dies_the_very_next_connection_is_ours(we_are_first: bool) -> None:
    """Nobody has to notice; and when it is back and nothing was said, what had been told holds."""
    port = free_port()
    first, second = (ours_on, other_on) if we_are_first else (other_on, ours_on)
    with first(port) as one, second(port) as two:
        ours, other = (one, two) if isinstance(one, SharedPort) else (two, one)
        assert isinstance(ours, SharedPort)
        assert isinstance(other, socket.socket)
        ours.lead(to_us=False)
        other.close()

        assert come_to(port, ours.socket) == TRIES
        ours.other_is_gone()
        ours.lead(to_us=True)
        with other_on(port):
            assert come_to(port, ours.socket) == TRIES
            ours.lead(to_us=False)
            assert come_to(port, ours.socket) == 0


@settings(max_examples=25)
@given(st.lists(st.sampled_from(["reload", "crash", "us", "them"]), max_size=8), st.booleans())
def test_the_order_is_known_through_reloads_and_crashes(steps: list[str], we_are_first: bool) -> None:
    """A reload brings the new listener before the old one leaves, a crash leaves first, and we are told of it."""
    port = free_port()
    others = [] if we_are_first else [_listener(port)]
    with ours_on(port) as ours:
        others = others or [_listener(port)]
        to_us = False
        ours.lead(to_us=to_us)
        for step in steps:
            if step == "reload":
                others.append(_listener(port))
                others.pop(0).close()
            elif step == "crash":
                others.pop(0).close()
                ours.other_is_gone()
                ours.lead(to_us=to_us)
                others.append(_listener(port))
            else:
                to_us = step == "us"
                ours.lead(to_us=to_us)

            assert come_to(port, ours.socket) == (TRIES if to_us else 0), step
        others[0].close()


def test_a_mistaken_order_is_put_right() -> None:
    """Told that a connection went the wrong way, the other order is believed."""
    port = free_port()
    with ours_on(port) as ours, other_on(port):
        ours.was_mistaken()
        ours.lead(to_us=True)
        assert come_to(port, ours.socket) == 0

        ours.was_mistaken()
        ours.lead(to_us=True)

        assert come_to(port, ours.socket) == TRIES


def test_a_port_of_somebody_else_is_left_alone() -> None:
    """Who does not share keeps the port, and we say so rather than fight."""
    with socket.socket() as somebody:
        somebody.bind((HOST, 0))
        somebody.listen()

        with pytest.raises(OSError, match="in use"):
            SharedPort(HOST, somebody.getsockname()[1])


def _listener(port: int) -> socket.socket:
    other = socket.socket()
    other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    other.bind((HOST, port))
    other.listen()
    return other
