"""Check that ports are free, and name the process that holds one and the setting that changes it."""

import errno
import socket
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import psutil

from services.errors import EnvironmentFault

_FIRST_INNER_PORT = 20_000
_EVERYWHERE = "0.0.0.0"  # noqa: S104 - compared with, not listened on
_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


@dataclass(frozen=True, slots=True)
class Port:
    """One address that a part listens on, and the settings of its port and its host."""

    host: str
    number: int
    setting: str
    host_setting: str = "TAILRACE_HTTP_HOST"

    def meets(self, other: "Port") -> bool:
        """Return whether the two addresses exclude each other."""
        return self.number == other.number and (self.host == other.host or _EVERYWHERE in {self.host, other.host})


def check_free(port: Port) -> None:
    """Raise EnvironmentFault, naming the holder and the setting, unless the port can be bound."""
    try:
        _bind(port.host, port.number)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            holder = _holder(port.number)
            raise EnvironmentFault(
                f"port {port.number} is taken{holder}; stop that, or set {port.setting} to another port"
            ) from error
        is_host = error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror)
        raise EnvironmentFault(
            f"cannot listen on {port.host}:{port.number} ({error.strerror}); "
            f"change {port.host_setting if is_host else port.setting}"
        ) from error


def free_window(width: int, seed: str, reserved: Collection[int] = ()) -> int:
    """Return the first of `width` free consecutive ports outside the range for outgoing connections.

    `reserved` ports belong to servers that do not listen yet. Different seeds spread stacks that start at the same moment.
    Raises EnvironmentFault when there is no such window.
    """
    last = _first_ephemeral_port() - width
    starts = range(_FIRST_INNER_PORT, last, width)
    offset = zlib.crc32(seed.encode()) % len(starts)
    for index in range(len(starts)):
        first = starts[(offset + index) % len(starts)]
        if all(number not in reserved and is_free("", number) for number in range(first, first + width)):
            return first
    raise EnvironmentFault(f"no {width} free ports in a row between {_FIRST_INNER_PORT} and {last}; stop other servers")


def is_free(host: str, number: int) -> bool:
    """Return whether the port can be bound."""
    try:
        _bind(host, number)
    except OSError:
        return False
    return True


def _bind(host: str, number: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, number))


def _holder(number: int) -> str:
    """Return a description of the process that listens on the port, empty when it cannot be seen."""
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == number and connection.pid:
                return f" by {psutil.Process(connection.pid).name()} (pid {connection.pid})"
    except psutil.Error:
        return ""
    return ""


def _first_ephemeral_port() -> int:
    try:
        return max(int(_EPHEMERAL_RANGE.read_text().split()[0]), _FIRST_INNER_PORT + 2_000)
    except OSError:
        return 32_768
