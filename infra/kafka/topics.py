"""Create a deployment's missing topics, with their retention: `python -m infra.kafka.topics`.

Names and partitions are settings. An existing topic is left as it is. Producers create no topic, so this must run first.
"""

import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kafka import KafkaAdminClient
from kafka.errors import KafkaError, TopicAlreadyExistsError

from services.errors import DependencyAway
from services.settings.settings import Settings, load_settings

_DAY_MS = 86_400_000
_CONNECT_MS = 10_000
_RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """One topic, with the broker's default replication."""

    name: str
    num_partitions: int
    keep_ms: int

    def options(self) -> dict[str, Any]:
        """Return the topic's entry for the admin client."""
        return {
            "num_partitions": self.num_partitions,
            "replication_factor": -1,
            "configs": {"retention.ms": str(self.keep_ms), "cleanup.policy": "delete"},
        }


def wanted_topics(settings: Settings) -> tuple[Topic, ...]:
    """Return every topic that the platform writes. Events are in the offline log within seconds, so a week is ample."""
    return (
        Topic(name=settings.interactions_topic, num_partitions=settings.topic_partitions, keep_ms=7 * _DAY_MS),
        Topic(name=settings.dead_letter_topic, num_partitions=settings.topic_partitions, keep_ms=30 * _DAY_MS),
        Topic(name=settings.impressions_topic, num_partitions=settings.topic_partitions, keep_ms=7 * _DAY_MS),
    )


def create_missing(connection: Mapping[str, Any], topics: Iterable[Topic]) -> list[str]:
    """Create missing topics and return their names. `connection` has the client's arguments. Raises DependencyAway."""
    try:
        admin = KafkaAdminClient(**connection, bootstrap_timeout_ms=_CONNECT_MS)
        try:
            return [topic.name for topic in topics if _create(admin, topic)]
        finally:
            admin.close()
    except (KafkaError, OSError) as error:
        raise DependencyAway("broker", _RETRY_AFTER_S) from error


def _create(admin: KafkaAdminClient, topic: Topic) -> bool:
    try:
        admin.create_topics({topic.name: topic.options()})
    except TopicAlreadyExistsError:
        return False
    return True


def main() -> None:
    """Create missing topics as soon as a broker answers."""
    settings = load_settings()
    while True:
        try:
            made = create_missing(settings.kafka_address.client_options(), wanted_topics(settings))
        except DependencyAway as error:
            sys.stderr.write(f"{error} ({error.__cause__!r})\n")
            time.sleep(_RETRY_AFTER_S)
        else:
            sys.stdout.writelines(f"made topic {name}\n" for name in made)
            return


if __name__ == "__main__":
    main()
