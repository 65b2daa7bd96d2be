"""How clients of kafka-python are opened and closed, so that neither leaves threads and sockets behind."""

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

from kafka import KafkaAdminClient, KafkaConsumer
from kafka.errors import KafkaError

from services.errors import DependencyUnavailable
from services.settings.addresses import KafkaAddress
from services.settings.record_batches import step_over_undecodable

REQUEST_MS = 5_000
"""How long a reader waits for one answer of a broker."""
_CONNECT_MS, _CLOSE_MS = 2_000, 500
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


def open_reader(
    address: KafkaAddress, clients: ExitStack, *, fetch_max_wait_ms: int, max_poll_records: int, **options: Any
) -> tuple[Any, Any]:
    """Open an admin client and a consumer that reads by itself, without a group, and steps over what cannot be decoded. `clients` closes both.

    `options` are of both. Raises DependencyUnavailable where no broker listens, and what `open_client` does.
    """
    if not any_listens(address.bootstrap, _CONNECT_MS / 1_000):
        raise DependencyUnavailable("broker", _RETRY_AFTER_S)
    both = {"bootstrap_timeout_ms": _CONNECT_MS, "request_timeout_ms": REQUEST_MS, **options}
    admin = open_client(KafkaAdminClient, address, **both)
    clients.callback(_closed, admin.close)
    consumer = open_client(
        KafkaConsumer,
        address,
        **both,
        group_id=None,
        enable_auto_commit=False,
        auto_offset_reset="none",
        isolation_level="read_committed",
        fetch_max_wait_ms=fetch_max_wait_ms,
        max_poll_records=max_poll_records,
        allow_auto_create_topics=False,
    )
    clients.callback(_closed, partial(consumer.close, autocommit=False, timeout_ms=_CLOSE_MS))
    step_over_undecodable(consumer)
    return admin, consumer


def _closed(close: Callable[[], object]) -> None:
    with suppress(KafkaError, OSError, RuntimeError):
        close()


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
