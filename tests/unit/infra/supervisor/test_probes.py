"""Health probes against small real servers."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infra.local.supervisor import probes
from infra.local.supervisor.probes import accepts, answers_http, answers_kafka, answers_redis, beats

HOST = "127.0.0.1"


@pytest.fixture
def answering() -> Iterator[Callable[[bytes], int]]:
    """Start servers that read a request and send fixed bytes; each call returns a port."""
    servers: list[socket.socket] = []

    def start(answer: bytes) -> int:
        server = socket.create_server((HOST, 0))
        servers.append(server)

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        return int(server.getsockname()[1])

    yield start
    for server in servers:
        server.close()


def test_a_probe_accepts_only_its_protocol_s_answer(
    answering: Callable[[bytes], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A valid response is healthy, an invalid response is not."""
    monkeypatch.setattr(probes, "TIMEOUT_S", 60.0)
    kafka_answer = b"\0\0\0\x06" + b"\0\0\0\x01" + b"\0\0"

    assert answers_redis(HOST, answering(b"+PONG\r\n"))
    assert answers_redis(HOST, answering(b"-MISCONF Errors writing to the AOF file: No space left on device\r\n"))
    assert not answers_redis(HOST, answering(b"-LOADING\r\n"))
    assert answers_kafka(HOST, answering(kafka_answer))
    assert not answers_kafka(HOST, answering(b"+PONG\r\n0000"))
    assert answers_http(HOST, answering(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"), "/")
    assert not answers_http(HOST, answering(b"HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n"), "/")
    assert not answers_http(HOST, answering(b"garbage"), "/")


def test_a_stopped_server_is_unhealthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that accepts connections but never answers fails every probe that sends a request."""
    monkeypatch.setattr(probes, "TIMEOUT_S", 0.05)
    with socket.create_server((HOST, 0)) as mute:
        port = mute.getsockname()[1]

        assert accepts(HOST, port)
        assert not answers_redis(HOST, port)
        assert not answers_kafka(HOST, port)
        assert not answers_http(HOST, port, "/")


def test_a_heartbeat_is_fresh_or_unhealthy(tmp_path: Path) -> None:
    """A recent heartbeat is healthy; a missing or old heartbeat is not, nor is one from before the clock went back."""
    heartbeat = tmp_path / "beat"
    never = beats(heartbeat)
    heartbeat.touch()
    now = beats(heartbeat)
    os.utime(heartbeat, (0, 0))
    old = beats(heartbeat)
    hour_ahead_s = time.time() + 3_600
    os.utime(heartbeat, (hour_ahead_s, hour_ahead_s))

    assert (never, now, old, beats(heartbeat)) == (False, True, False, False)
