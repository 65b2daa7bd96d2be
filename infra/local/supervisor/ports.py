"""The ports of a stack: ports in the settings must be free, all others are chosen, so stacks can share a machine.

A stack's choice is recorded in its state folder. The next start reuses it if possible, and commands read it while the
stack runs.
"""

import errno
import socket
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from infra.local.supervisor.stackfile import StackFile
from services.errors import EnvironmentFault
from services.settings.settings import Settings

LOOPBACK = "127.0.0.1"
PUBLIC_PORTS = ("http_port", "grpc_port", "metrics_port")
INNER_PORTS = (
    *("redis_port", "kafka_bootstrap"),
    *("inner_http_port", "inner_grpc_port", "standby_http_port", "standby_grpc_port"),
)
"""The settings of ports that only the stack's own processes call."""
STORE_SETTINGS = {"redis_host", "redis_port", "redis_tls_ca_file"}
"""If one of these is set, the store is a specific server."""
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


def check_free(*ports: Port) -> None:
    """Raise EnvironmentFault with a line for each port that cannot be bound: its holder, and the setting to change."""
    if faults := [fault for port in ports if (fault := why_taken(port))]:
        raise EnvironmentFault("\n".join(faults))


def why_taken(port: Port) -> str | None:
    """Return why the port cannot be bound, with the fix; None if it can."""
    try:
        _bind(port.host, port.number)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            holder = _holder(port.number)
            return f"port {port.number} is taken{holder}; stop its owner, or set {port.setting} to another port"
        is_host = error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror)
        setting = port.host_setting if is_host else port.setting
        return f"cannot listen on {port.host}:{port.number} ({error.strerror}); change {setting}"
    return None


def with_free_ports(settings: Settings, before: Mapping[str, int]) -> Settings:
    """Return the settings with a free port for each unset `INNER_PORTS`: from `before`, the default, or another port.

    Raises EnvironmentFault if no port is free.
    """
    given = settings.model_fields_set
    named = given if given.isdisjoint(STORE_SETTINGS) else given | STORE_SETTINGS
    wanted = [name for name in INNER_PORTS if name not in named]
    used = ports_of(settings)
    taken = {number for name, number in used.items() if name not in wanted}
    chosen: dict[str, int] = {}
    for name in wanted:
        host = settings.inner_host if name.startswith(("inner", "standby")) else LOOPBACK
        liked = [number for number in (before.get(name), used[name]) if number is not None and number not in taken]
        seed = f"{settings.state_dir} {name}"
        free = next((number for number in liked if is_free(host, number)), None) or free_window(1, seed, taken)
        taken.add(free)
        chosen[name] = free
    return _with_ports(settings, chosen)


def ports_of(settings: Settings) -> dict[str, int]:
    """Return the port of each setting with a port; for brokers, that of the first."""
    broker = settings.kafka_bootstrap.partition(",")[0].rpartition(":")[2]
    kafka = {"kafka_bootstrap": int(broker) if broker.isdigit() else 0}
    return {name: getattr(settings, name) for name in (*PUBLIC_PORTS, *INNER_PORTS)} | kafka


def of_running_stack(settings: Settings) -> Settings:
    """Return the settings with the running stack's ports where not set; unchanged without a running stack."""
    stack_file = StackFile(settings.state_dir)
    if not stack_file.is_claimed():
        return settings
    known = stack_file.ports()
    return _with_ports(settings, {name: known[name] for name in known.keys() - settings.model_fields_set})


def _with_ports(settings: Settings, ports: Mapping[str, int]) -> Settings:
    addresses = {name: f"{LOOPBACK}:{ports[name]}" for name in ports.keys() & {"kafka_bootstrap"}}
    return settings.model_copy(update={**ports, **addresses})


def free_window(width: int, seed: str, reserved: Collection[int] = ()) -> int:
    """Return the first of `width` free consecutive ports outside the range for outgoing connections.

    `reserved` ports belong to servers that do not listen yet. Different seeds spread stacks that start at the same
    moment. Raises EnvironmentFault if no such window exists.
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
    """Return a description of the process that listens on the port, empty if it cannot be determined."""
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
