"""Is it alive? One real question per kind of server, answered within a second. Standard library only.

A stopped process still accepts connections (the kernel does), so each probe asks something and reads the answer.
"""

import http.client
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

Probe = Callable[[], bool]
TIMEOUT_S = 1.0
BEAT_S = 10.0
"""A heart that is busy may pause: for a batch, or for a connection to a broker that does not answer."""


def answers_redis(host: str, port: int) -> bool:
    """Whether a Redis-protocol server answers PING, be it by asking for a password or by refusing writes to a full disk.

    The latter still answers reads, and a new start would make no room.
    """
    return _ask(host, port, b"PING\r\n", 5) in {b"+PONG", b"-NOAU", b"-MISC"}


def answers_kafka(host: str, port: int) -> bool:
    """Whether a Kafka-protocol broker answers an ApiVersions request."""
    request = struct.pack(">hhih", 18, 0, 1, -1)
    answer = _ask(host, port, struct.pack(">i", len(request)) + request, 8)
    return len(answer) == 8 and struct.unpack(">i", answer[4:])[0] == 1


def answers_http(host: str, port: int, path: str) -> bool:
    """Whether an HTTP server answers GET with 200."""
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def accepts(host: str, port: int) -> bool:
    """Whether anything accepts connections there."""
    try:
        socket.create_connection((host, port), timeout=TIMEOUT_S).close()
    except OSError:
        return False
    return True


def beats(heartbeat: Path) -> bool:
    """Whether a process without a port has touched its file lately."""
    try:
        return time.time() - heartbeat.stat().st_mtime < BEAT_S
    except FileNotFoundError:
        return False


def _ask(host: str, port: int, request: bytes, num_bytes: int) -> bytes:
    """Send the request and read that many bytes; fewer when the server does not answer."""
    answer = b""
    try:
        with socket.create_connection((host, port), timeout=TIMEOUT_S) as connection:
            connection.sendall(request)
            while len(answer) < num_bytes and (chunk := connection.recv(num_bytes - len(answer))):
                answer += chunk
    except OSError:
        return b""
    return answer
