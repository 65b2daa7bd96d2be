"""Faults of kafka-python that our clients do not have."""

import socket
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any

import pytest
from kafka import KafkaProducer
from kafka.errors import KafkaTimeoutError
from kafka.protocol.api_header import RequestHeader, ResponseClassRegistry
from kafka.protocol.metadata import ApiVersionsResponse
from kafka.protocol.schemas import StructField
from kafka.record.util import crc32c_c

from services.settings.addresses import KafkaAddress
from services.settings.kafka_clients import open_client


def test_checksums_are_computed_in_c() -> None:
    """In Python they take producers and readers twice as long as all else that they do with 500 events."""
    assert crc32c_c is not None


def test_two_first_answers_at_once_leave_a_decoder_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second thread begins while the first compiles, and would continue after the first restored the class."""
    monkeypatch.setattr(ApiVersionsResponse._struct, "_compiled_encoders", {})
    emit, is_second, first_done = StructField.emit_decode_from, threading.Event(), threading.Event()
    order = iter(("first", "second"))

    def paused(field: Any, *arguments: Any, **options: Any) -> Any:
        if field is ApiVersionsResponse._struct:
            if next(order) == "first":
                answered.append(second.submit(decode))
                is_second.wait(0.5)
            else:
                is_second.set()
                first_done.wait(5)
        return emit(field, *arguments, **options)

    def decode() -> Any:
        return ApiVersionsResponse.decode(content, version=4)

    content = ApiVersionsResponse(version=4, error_code=0, api_keys=[], throttle_time_ms=7).encode()
    answered: list[Future[Any]] = []
    monkeypatch.setattr(StructField, "emit_decode_from", paused)
    with ThreadPoolExecutor(1) as second:
        first = decode()
        first_done.set()
        later = answered[0].result(10)

    assert [answer.throttle_time_ms for answer in (first, later, decode())] == [7, 7, 7]


def test_two_first_answers_at_once_leave_a_registered_response(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second thread makes its class between the first thread's registration and the moment when it is kept.

    The registry refers to classes weakly, so that the class of the second, once dropped, would fail each answer.
    """
    monkeypatch.setattr(ApiVersionsResponse, "_VERSIONS", {})
    monkeypatch.setattr(ResponseClassRegistry, "_response_class_registry", {})
    register, seconds = ResponseClassRegistry.register_response_class, list[Future[Any]]()

    def paused(response_class: Any) -> None:
        register(response_class)
        if not seconds:
            seconds.append(second.submit(lambda: ApiVersionsResponse[4]))
            wait(seconds, 0.5)

    monkeypatch.setattr(ResponseClassRegistry, "register_response_class", paused)
    with ThreadPoolExecutor(1) as second:
        first = ApiVersionsResponse[4]
        also = seconds[0].result(10)

    header = RequestHeader(request_api_key=ApiVersionsResponse.API_KEY, request_api_version=4)
    assert first is also is ResponseClassRegistry.get_response_class(header)


def test_a_client_that_cannot_connect_says_why() -> None:
    """The client's own error is the same for a silent broker, a refused login and an answer it cannot read."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=_hang_up, args=(server,), daemon=True).start()
        address = KafkaAddress(bootstrap=f"127.0.0.1:{server.getsockname()[1]}")
        with pytest.raises(KafkaTimeoutError, match=r"Unable to bootstrap from .*: KafkaConnectionError"):
            open_client(KafkaProducer, address, bootstrap_timeout_ms=1_500)


def _hang_up(server: socket.socket) -> None:
    with suppress(OSError):
        while True:
            connection, _ = server.accept()
            connection.close()
