"""Sends events to the topic as a door does, at a steady rate."""

import time
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from kafka import KafkaAdminClient, KafkaProducer

from services.contracts.events import Interaction
from services.settings.settings import Settings

_NUM_USERS = 10_000


def create_topic(settings: Settings) -> None:
    """Create the topic of interactions."""
    admin = KafkaAdminClient(**settings.kafka_address.client_options())
    admin.create_topics(
        {settings.interactions_topic: {"num_partitions": settings.topic_partitions, "replication_factor": -1}}
    )
    admin.close()


def draw(item_ids: Sequence[str], num_events: int) -> Iterator[tuple[str, str]]:
    """Draw users and items, each as likely as any other."""
    rng = np.random.default_rng(0)
    for user, item in zip(
        rng.integers(0, _NUM_USERS, num_events), rng.integers(0, len(item_ids), num_events), strict=True
    ):
        yield f"user-{user}", item_ids[item]


def send(settings: Settings, touches: Iterable[tuple[str, str]], rate: int) -> int:
    """Send an event for each (user, item), accepted at the moment of sending, and return their number once all are acknowledged."""
    producer = KafkaProducer(**settings.kafka_address.client_options(), acks="all", metrics_enabled=False)
    began_s, number = time.monotonic(), 0
    stamp = time.time_ns()
    for number, (user_id, item_id) in enumerate(touches, 1):
        if (ahead_s := began_s + number / rate - time.monotonic()) > 0:
            time.sleep(ahead_s)
        now_ms = time.time_ns() // 1_000_000
        event = Interaction(
            event_id=f"{stamp}-{number}",
            user_id=user_id,
            item_id=item_id,
            event_time_ms=now_ms,
            accepted_time_ms=now_ms,
        )
        producer.send(settings.interactions_topic, event.encode(), event.key)
    producer.flush(30)
    producer.close()
    return number
