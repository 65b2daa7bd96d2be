"""Sends records to a topic and waits until the broker has stored them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from services.errors import DependencyUnavailable

if TYPE_CHECKING:
    from pipelines.imports.delivered import Record, Send
    from services.settings.settings import Settings

_ACK_S = 30.0
_BATCH_BYTES, _LINGER_MS = 262_144, 1_000
"""Records sent together travel in few batches: the embedded broker and its readers need a time for each batch."""
_RETRY_AFTER_S = 1.0


@contextmanager
def topic_sender(settings: "Settings", name: str) -> Iterator["Send"]:
    """Provide a function that sends records to a topic and waits until they are stored.

    Raises DependencyUnavailable.
    """
    from kafka import KafkaAdminClient, KafkaProducer

    from services.settings.kafka_clients import any_listens, broker_as_dependency, close_producer, open_client
    from services.settings.kafka_topics import create_missing, wanted_topic

    address = settings.kafka_address
    if not any_listens(address.bootstrap, _RETRY_AFTER_S):
        raise DependencyUnavailable(
            f"the broker at {address.bootstrap} (`tailrace up` starts it, or set TAILRACE_KAFKA_BOOTSTRAP)", 5.0
        )
    with broker_as_dependency():
        admin = open_client(KafkaAdminClient, address)
        try:
            create_missing(admin, [wanted_topic(settings, name)])
        finally:
            admin.close()
        producer = open_client(
            KafkaProducer,
            address,
            acks="all",
            batch_size=_BATCH_BYTES,
            linger_ms=_LINGER_MS,
            allow_auto_create_topics=False,
        )
    try:
        yield partial(_send, producer, name)
    finally:
        close_producer(producer, _RETRY_AFTER_S)


def _send(producer: Any, topic: str, records: Sequence["Record"]) -> None:
    from services.settings.kafka_clients import broker_as_dependency

    with broker_as_dependency():
        sent = [producer.send(topic, value, key, list(headers)) for key, value, *headers in records]
        producer.flush(_ACK_S)
        for receipt in sent:
            receipt.get(_ACK_S)
