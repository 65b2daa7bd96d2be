"""The topics that the platform writes: how each is created, and whether its records survive the loss of a broker."""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kafka.admin import ConfigResource, ConfigResourceType
from kafka.errors import AuthorizationError, TopicAlreadyExistsError

from services.settings.kafka_clients import broker_failure
from services.settings.settings import Settings

_DAY_MS = 86_400_000
EVENTS_KEEP_MS, DEAD_LETTERS_KEEP_MS = 7 * _DAY_MS, 30 * _DAY_MS
"""Events are in the offline log within seconds, so a week is ample."""
_TOMBSTONES_KEEP_MS = 3_650 * _DAY_MS
"""A reader that starts later than this misses an item's deletion, so it is practically unlimited."""
_MIN_IN_SYNC = "min.insync.replicas"
_REPLICAS, _IN_SYNC = 3, 2
"""With this many replicas, records need this many copies before acknowledgement; with fewer, one copy suffices.

Otherwise an outage would refuse all records.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """One topic, with the broker's default replication.

    `keep_ms` None: compacted, the newest record of each key is kept for ever.
    """

    name: str
    num_partitions: int
    keep_ms: int | None

    def options(self, num_replicas: int = 1) -> dict[str, Any]:
        """Return the topic's entry for the admin client, for this number of replicas."""
        in_sync = {_MIN_IN_SYNC: str(_IN_SYNC)} if num_replicas >= _REPLICAS else {}
        keeping = {"retention.ms": str(self.keep_ms), "cleanup.policy": "delete"}
        if self.keep_ms is None:
            keeping = {
                "retention.ms": "-1",
                "cleanup.policy": "compact",
                "delete.retention.ms": str(_TOMBSTONES_KEEP_MS),
            }
        return {
            "num_partitions": self.num_partitions,
            "replication_factor": -1,
            "configs": {**keeping, **in_sync},
        }


def wanted_topics(settings: Settings) -> tuple[Topic, ...]:
    """Return every topic that the platform writes."""
    keep_ms: dict[str, int | None] = {
        settings.interactions_topic: EVENTS_KEEP_MS,
        settings.dead_letter_topic: DEAD_LETTERS_KEEP_MS,
        settings.impressions_topic: EVENTS_KEEP_MS,
        settings.items_topic: None,
    }
    return tuple(Topic(name=name, num_partitions=settings.topic_partitions, keep_ms=ms) for name, ms in keep_ms.items())


def wanted_topic(settings: Settings, name: str) -> Topic:
    """Return the topic of this name that the platform writes."""
    return next(topic for topic in wanted_topics(settings) if topic.name == name)


def create_missing(admin: Any, topics: Iterable[Topic]) -> list[str]:
    """Create missing topics through a KafkaAdminClient and return their names; existing topics stay unchanged.

    Raises KafkaError, and DependencyUnavailable with the missing permission.

    The broker is first asked for its default number of replicas, so only the right to create topics is needed.
    """
    there = set(admin.list_topics())
    missing = [topic for topic in topics if topic.name not in there]
    for topic in missing:
        with suppress(
            TopicAlreadyExistsError
        ):  # another process was faster; or the embedded broker, which has made it when asked
            try:
                (planned,) = admin.create_topics({topic.name: topic.options()}, validate_only=True)["topics"]
                admin.create_topics({topic.name: topic.options(planned["replication_factor"])})
            except AuthorizationError as error:
                raise broker_failure(error, [topic.name], ["Create"]) from error
    return [topic.name for topic in missing]


def replication(admin: Any, topics: Iterable[Topic]) -> dict[str, tuple[int, int | None]]:
    """Return, by existing topic, the fewest replicas of a partition and min.insync.replicas (None if unknown).

    Raises KafkaError.
    """
    names = [topic.name for topic in topics]
    described = {
        topic["name"]: topic["partitions"] for topic in admin.describe_topics(names) if not topic["error_code"]
    }
    asked = [ConfigResource(ConfigResourceType.TOPIC, name) for name in described]
    configs = admin.describe_configs(asked, config_filter="all").get("topic", {}) if asked else {}
    in_sync = {name: configs.get(name, {}).get(_MIN_IN_SYNC) for name in described}
    return {
        name: (
            min((len(partition["replica_nodes"]) for partition in partitions), default=0),
            int(in_sync[name]["value"]) if in_sync[name] else None,
        )
        for name, partitions in described.items()
    }


def is_durable(num_replicas: int, in_sync: int | None) -> bool:
    """Return whether an acknowledged record of such a topic is on enough replicas for their number."""
    return num_replicas < _REPLICAS or in_sync is None or in_sync >= _IN_SYNC
