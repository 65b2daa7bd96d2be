"""Keeps the servers of a single-node Ray on loopback.

Ray Serve binds the gRPC servers of its replicas and proxy to all interfaces, regardless of the configured host; Ray's
own servers follow the node's address. `ray_ingress` opens the doors. Replaces a method of a private class, read in
grpcio 1.85.1.
"""

from typing import Any

LOOPBACK = "127.0.0.1"
ENVIRONMENT = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Unset, as on every system but Linux, makes Ray use loopback as its node's address, where its servers listen."""

_EVERYWHERE = ("[::]", "0.0.0.0", "*")  # noqa: S104 - what is replaced


def listen_on_loopback() -> None:
    """Bind this process's gRPC servers to loopback instead of all interfaces."""
    from grpc.aio import _server

    server_class: Any = _server.Server
    add_insecure_port = server_class.add_insecure_port

    def on_loopback(server: Any, address: str) -> int:
        return int(add_insecure_port(server, loopback_of(address)))

    server_class.add_insecure_port = on_loopback


def loopback_of(address: str) -> str:
    """Return the same port on loopback for an address on all interfaces, any other address unchanged."""
    host, colon, port = address.rpartition(":")
    return f"{LOOPBACK}{colon}{port}" if host in _EVERYWHERE else address
