"""How clients of kafka-python are opened and closed, so that neither leaves threads and sockets behind."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from kafka.errors import KafkaError

from services.errors import DependencyUnavailable
from services.settings.addresses import KafkaAddress

_RETRY_AFTER_S = 1.0


@contextmanager
def broker_as_dependency() -> Iterator[None]:
    """Raise DependencyUnavailable for every failure of the broker inside this block."""
    try:
        yield
    except (KafkaError, OSError) as error:
        raise DependencyUnavailable("broker", _RETRY_AFTER_S) from error


def any_listens(bootstrap: str, timeout_s: float) -> bool:
    """Return whether any of the brokers (`host:port,host:port`) accepts a connection.

    For use before a client is made: a refused connection is known at once, while a client would try for its whole timeout, and whatever waits for it as long.
    """
    for address in bootstrap.split(","):
        host, _, port = address.strip().rpartition(":")
        with suppress(OSError), socket.create_connection((host, int(port)), timeout_s):
            return True
    return False


def open_client(kind: Any, address: KafkaAddress, **options: Any) -> Any:
    """Make a client of this class. Raises what its constructor does, and ConfigError for a bad file.

    One whose constructor fails, as it does at a broker that hangs, leaves a thread and three descriptors: its network is closed here.
    """
    networks = []

    def network(**given: Any) -> Any:
        networks.append(kind.DEFAULT_CONFIG["kafka_client"](**given))
        return networks[-1]

    try:
        return kind(**address.client_options(), **options, kafka_client=network)
    except BaseException:
        for one in networks:
            one.close()
        raise


def close_producer(producer: Any, timeout_s: float) -> None:
    """Close a producer; what is unacknowledged after `timeout_s` is given up. Its errors are ignored.

    `KafkaProducer.close` of 3.0.12 raises while records are unacknowledged, and leaves its threads and sockets for good: its sender is ended here.
    """
    with suppress(KafkaError, OSError):
        producer.close(timeout=timeout_s)
        return
    producer._sender.force_close()
    with suppress(KafkaError, OSError):
        producer.close(timeout=timeout_s)
