"""One listening socket of several on one port, and the say in which of them gets a new connection.

    {ours, HAProxy's}   the kernel's group of sockets that listen on one port with SO_REUSEPORT, in the order of listening

All of a group belong to one user. A program of one instruction, "return i" (SO_ATTACH_REUSEPORT_CBPF, socket(7)), gives
every new connection to the group's i-th socket; where there is no i-th, the kernel gives it to one that is there. So when
HAProxy dies, the next connection is ours at once, before anybody has noticed. A socket that leaves is replaced by the last
of the group, hence two sockets are enough to keep count: HAProxy's is the one that is not ours.
"""

import ctypes
import socket
import struct
from contextlib import suppress

from infra.local.supervisor.ports import is_free

_SO_ATTACH_REUSEPORT_CBPF = 51
_BPF_RET = 0x06
BACKLOG = 1_024
"""Callers who may wait to be taken in: when HAProxy dies, all come at once."""


class SharedPort:
    """Our socket on a port that HAProxy listens on too, or will. Listens from its making."""

    def __init__(self, host: str, port: int) -> None:
        """Raises OSError when the port belongs to somebody who does not share it."""
        self._is_first = is_free(host, port)
        self.socket = _bound(host, port)
        self.socket.listen(BACKLOG)

    def lead(self, *, to_us: bool) -> None:
        """Have new connections come to us, or to the other as long as there is one."""
        _attach(self.socket, 0 if to_us is self._is_first else 1)

    def other_is_gone(self) -> None:
        """Be told that nobody else listens, which makes us the first."""
        self._is_first = True

    def was_mistaken(self) -> None:
        """Be told that a connection went the wrong way: the order is not the one that was believed."""
        self._is_first = not self._is_first


def can_share() -> bool:
    """Whether this kernel lets connections be led."""
    with suppress(OSError), _bound("127.0.0.1", 0) as probe:
        probe.listen()
        _attach(probe, 0)
        return True
    return False


def _bound(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


def _attach(bound: socket.socket, index: int) -> None:
    """Lead the group's new connections to the index-th of its sockets."""
    instruction = ctypes.create_string_buffer(struct.pack("=HBBI", _BPF_RET, 0, 0, index))
    program = struct.pack("@HP", 1, ctypes.addressof(instruction))
    bound.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_REUSEPORT_CBPF, program)
