"""The live catalogue, as imports and `add-items` read and follow it."""

from collections.abc import Iterator
from contextlib import contextmanager

from pipelines.imports.delivered import LiveCatalogue
from services.errors import DependencyUnavailable
from services.items.follower import ITEMS_START_S, ItemFollower
from services.items.live_items import Knowledge, LiveItems
from services.settings.kafka_topics import wanted_topic
from services.settings.settings import Settings


@contextmanager
def following_catalogue(settings: Settings) -> Iterator[LiveCatalogue]:
    """Provide the live catalogue, read to the topic's end and followed from there.

    Raises DependencyUnavailable if that was not possible: decisions on items must not rest on a part of their states.
    """
    items = LiveItems()
    topic = wanted_topic(settings, settings.items_topic)
    follower = ItemFollower(items, settings.kafka_address, topic.name, settings.items_snapshot, makes=topic)
    try:
        follower.start(ITEMS_START_S)
        if items.knowledge is not Knowledge.CURRENT:
            why = follower.failure or f"{ITEMS_START_S:g} s without a record before its end; read it again later"
            raise DependencyUnavailable(f"the topic {topic.name}", 1.0, why)
        yield LiveCatalogue(items, follower.positions.topic_id, follower)
    finally:
        follower.stop()
