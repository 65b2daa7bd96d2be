"""Health probes, one per kind of server, each within a second. Standard library only.

The kernel still accepts connections for a stopped process, so each probe sends a request and reads the answer.
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
"""Maximal age of a heartbeat; a busy process may pause for a batch, or for an unresponsive broker."""


def answers_redis(host: str, port: int) -> bool:
    """Return whether a Redis-protocol server answers PING, even if it requires a password or its disk is full.

    With a full disk it still answers reads, and a restart would free nothing.
    """
    return _exchange(host, port, b"PING\r\n", 5) in {b"+PONG", b"-NOAU", b"-MISC"}


def answers_kafka(host: str, port: int) -> bool:
    """Return whether a Kafka-protocol broker answers an ApiVersions request."""
    request = struct.pack(">hhih", 18, 0, 1, -1)
    answer = _exchange(host, port, struct.pack(">i", len(request)) + request, 8)
    return len(answer) == 8 and struct.unpack(">i", answer[4:])[0] == 1


def answers_http(host: str, port: int, path: str) -> bool:
    return http_answer(host, port, path)[0] == http.client.OK


def http_answer(host: str, port: int, path: str) -> tuple[int, bytes]:
    """Return the status and the body of an HTTP server's answer to GET; status 0 without an answer."""
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()


def accepts(host: str, port: int) -> bool:
    """Return whether the port accepts connections."""
    try:
        socket.create_connection((host, port), timeout=TIMEOUT_S).close()
    except OSError:
        return False
    return True


def beats(heartbeat: Path) -> bool:
    """Return whether a process without a port has touched its file recently.

    A beat from the future was made before the clock was set back.
    """
    try:
        return abs(time.time() - heartbeat.stat().st_mtime) < BEAT_S
    except FileNotFoundError:
        return False


def _exchange(host: str, port: int, request: bytes, num_bytes: int) -> bytes:
    """Return the first `num_bytes` of the answer, fewer if the server does not send them."""
    answer = b""
    try:
        with socket.create_connection((host, port), timeout=TIMEOUT_S) as connection:
            connection.sendall(request)
            while len(answer) < num_bytes and (chunk := connection.recv(num_bytes - len(answer))):
                answer += chunk
    except OSError:
        return b""
    return answer
