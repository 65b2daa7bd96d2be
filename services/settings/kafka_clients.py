"""Opens and closes clients of kafka-python without leaking threads and sockets, and names missing permissions."""

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial, wraps
from typing import Any

from kafka import KafkaAdminClient, KafkaConsumer
from kafka.errors import (
    ClusterAuthorizationFailedError,
    GroupAuthorizationFailedError,
    KafkaConnectionError,
    KafkaError,
    KafkaTimeoutError,
    SaslAuthenticationFailedError,
    TopicAuthorizationFailedError,
    TransactionalIdAuthorizationFailedError,
    for_code,
)
from kafka.net.manager import KafkaConnectionManager
from kafka.net.selector import NetworkSelector
from kafka.protocol.api_message import VersionSubscriptable
from kafka.protocol.schemas import StructField

from services.errors import ConfigError, DependencyUnavailable
from services.settings.addresses import KAFKA_PASSWORD_FILE, KafkaAddress, read_secret
from services.settings.record_batches import step_over_undecodable

REQUEST_MS = 5_000
"""Timeout of a reader's request to a broker."""
_CONNECT_MS, _CLOSE_MS = 2_000, 500
_RETRY_AFTER_S = 1.0
_GRANT = (
    "kafka-acls.sh --bootstrap-server $TAILRACE_KAFKA_BOOTSTRAP --add --allow-principal User:$TAILRACE_KAFKA_USERNAME"
)
_PERMISSIONS: dict[type[KafkaError], tuple[str, str, tuple[str, ...]]] = {
    TopicAuthorizationFailedError: ("topic", "--topic", ("Describe", "Read", "Write")),
    GroupAuthorizationFailedError: ("group", "--group", ("Read",)),
    ClusterAuthorizationFailedError: ("cluster", "--cluster", ("Create",)),
    TransactionalIdAuthorizationFailedError: ("transactional id", "--transactional-id", ("Write",)),
}
"""By a broker's refusal: the kind of resource, its option of kafka-acls.sh, and the operations that clients need."""


def missing_permission(error: BaseException, names: Sequence[str] = (), operations: Sequence[str] = ()) -> str:
    """Return the permission that a broker refuses, and the command that grants it; empty for any other error.

    `names` are the resources if the error has none, `operations` the attempted operations.
    """
    if isinstance(error, SaslAuthenticationFailedError):
        return "user or password refused; correct TAILRACE_KAFKA_USERNAME or the file of TAILRACE_KAFKA_PASSWORD_FILE"
    if type(error) not in _PERMISSIONS:
        return ""
    kind, option, needed = _PERMISSIONS[type(error)]
    named = names or _names_in(error)
    tried = operations or needed
    words = [f"--operation {operation}" for operation in tried] + [
        f"{option} {name}".rstrip() for name in named or ("",)
    ]
    what = " ".join((kind, ", ".join(named))).rstrip()
    return f"not authorised to {', '.join(tried).lower()} {what}; grant it: {_GRANT} {' '.join(words)}"


def _names_in(error: BaseException) -> list[str]:
    """Return the resources that kafka-python names: a set, or one word."""
    given = error.args[0] if error.args else ()
    if isinstance(given, str):
        return [given] if given and " " not in given else []
    return sorted(given) if isinstance(given, set | frozenset | list | tuple) else []


def broker_failure(
    error: BaseException, names: Sequence[str] = (), operations: Sequence[str] = ()
) -> DependencyUnavailable:
    return DependencyUnavailable("broker", _RETRY_AFTER_S, missing_permission(error, names, operations))


def check_described(topic: dict[str, Any]) -> None:
    """Raise DependencyUnavailable for a topic whose description is an error."""
    if topic["error_code"]:
        raise broker_failure(for_code(topic["error_code"])(), [topic["name"]], ["Describe"])


@contextmanager
def broker_as_dependency() -> Iterator[None]:
    """Raise DependencyUnavailable for every failure of the broker inside this block."""
    try:
        yield
    except (KafkaError, OSError) as error:
        raise broker_failure(error) from error


def any_listens(bootstrap: str, timeout_s: float) -> bool:
    """Return whether any of the brokers (`host:port,host:port`) accepts a connection.

    For use before a client is made: a refused connection fails at once, while a client would try for its whole timeout.
    """
    for address in bootstrap.split(","):
        host, _, port = address.strip().rpartition(":")
        with suppress(OSError), socket.create_connection((host, int(port)), timeout_s):
            return True
    return False


def _prepare_messages_in_turn() -> None:
    """Let kafka-python prepare a message's class and decoder, at their first use, in one thread at a time.

    Its compiler changes the message's class for a moment, so a second thread could leave a decoder that fails. Two
    threads that ask for a version make its class twice; the registry of responses may keep a weak reference to the
    dropped class. After either, no client of this process could connect any more.
    """
    lock = threading.RLock()

    def in_turn(prepare: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(prepare)
        def prepare_in_turn(*arguments: Any, **options: Any) -> Any:
            with lock:
                return prepare(*arguments, **options)

        return prepare_in_turn

    StructField.compiled_decode_from = in_turn(StructField.compiled_decode_from)
    VersionSubscriptable.__getitem__ = in_turn(VersionSubscriptable.__getitem__)


_prepare_messages_in_turn()  # at the import: two threads that open their first clients would each set a lock


def open_client(kind: Any, address: KafkaAddress, **options: Any) -> Any:
    """Make a client of this class. Raises its constructor's errors, and ConfigError for a bad file.

    A constructor that runs out of time says only that; its last attempt's failure is added.

    Clients keep no metrics of their own: keeping them takes longer than a fetch without records.
    A constructor that fails, for example at a hanging broker, leaks a thread and three descriptors: the network is
    closed here.
    """
    networks: list[tuple[Any, _Connections]] = []

    def network(**given: Any) -> Any:
        net = NetworkSelector(**given)
        manager = _Connections(net, address, **given)
        client = kind.DEFAULT_CONFIG["kafka_client"](net=net, manager=manager, **given)
        networks.append((client, manager))
        return client

    if "metrics_enabled" in kind.DEFAULT_CONFIG:
        options["metrics_enabled"] = False
    try:
        return kind(**address.client_options(), **options, kafka_client=network)
    except BaseException as error:
        failures = [manager.failure for _, manager in networks if manager.failure]
        for client, _ in networks:
            client.close()  # fails what is still open
        if isinstance(error, KafkaTimeoutError) and failures:
            raise KafkaTimeoutError(f"{error.args[0]}: {failures[-1]}") from error
        raise


class _Connections(KafkaConnectionManager):  # type: ignore[misc]  # kafka-python comes without types
    """The connections of one client; each logs in with the file's password at the time of connection.

    `failure` tells why the last connection that failed did so.
    """

    def __init__(self, net: Any, address: KafkaAddress, **options: Any) -> None:
        super().__init__(net, **options)
        self._password_file = address.password_file
        self.failure = ""

    def get_connection(self, node_id: Any, *arguments: Any, **options: Any) -> Any:
        """Return the connection to a broker; a missing connection is made."""
        if node_id in self._conns:
            return super().get_connection(node_id, *arguments, **options)
        if self._password_file is not None:
            try:
                self.config["sasl_plain_password"] = read_secret(self._password_file, KAFKA_PASSWORD_FILE)
            except ConfigError as error:
                raise KafkaConnectionError(str(error)) from error
        connection = super().get_connection(node_id, *arguments, **options)
        connection.close_future.add_errback(self._keep)
        return connection

    def _keep(self, error: BaseException) -> None:
        self.failure = repr(error)


def open_reader(
    address: KafkaAddress, clients: ExitStack, *, fetch_max_wait_ms: int, max_poll_records: int, **options: Any
) -> tuple[Any, Any]:
    """Open an admin client and a consumer without a group that skips undecodable batches. `clients` closes both.

    `options` apply to both. Raises DependencyUnavailable if no broker listens, and the errors of `open_client`.
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
    """Close a producer; records unacknowledged after `timeout_s` are dropped. Its errors are ignored.

    `KafkaProducer.close` of 3.0.12 raises while records are unacknowledged, and leaks its threads and sockets: its
    sender is stopped here.
    """
    with suppress(KafkaError, OSError):
        producer.close(timeout=timeout_s)
        return
    producer._sender.force_close()
    with suppress(KafkaError, OSError):
        producer.close(timeout=timeout_s)
