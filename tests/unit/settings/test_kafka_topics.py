"""How topics are made, and which of them keep an acknowledged record when a broker is lost."""

from typing import Any

import pytest

from services.settings.kafka_topics import Topic, create_missing, is_durable, replication

TOPIC = Topic(name="interactions", num_partitions=4, keep_ms=1_000)


class Brokers:
    """A cluster that gives each topic so many replicas, as KafkaAdminClient shows it."""

    def __init__(self, num_replicas: int) -> None:
        self.num_replicas = num_replicas
        self.made: dict[str, dict[str, Any]] = {}

    def list_topics(self) -> list[str]:
        """Return the names."""
        return list(self.made)

    def create_topics(self, topics: dict[str, dict[str, Any]], validate_only: bool = False) -> dict[str, Any]:
        """Make topics, or describe them alone."""
        self.made |= {} if validate_only else topics
        return {"topics": [{"name": name, "replication_factor": self.num_replicas} for name in topics]}

    def describe_topics(self, names: list[str]) -> list[dict[str, Any]]:
        """Describe topics; one that does not exist has an error."""
        partitions = [{"replica_nodes": list(range(self.num_replicas))}]
        codes = {name: 0 if name in self.made else 3 for name in names}
        return [{"name": name, "error_code": code, "partitions": partitions} for name, code in codes.items()]

    def describe_configs(self, asked: list[Any], config_filter: str) -> dict[str, Any]:
        """Return all settings of topics."""
        assert config_filter == "all"
        configs = {one.name: {"min.insync.replicas": "1", **self.made[one.name]["configs"]} for one in asked}
        return {"topic": {name: {key: {"value": one[key]} for key in one} for name, one in configs.items()}}


@pytest.mark.parametrize(("num_replicas", "in_sync"), [(1, 1), (2, 1), (3, 2), (5, 2)])
def test_two_replicas_have_a_record_before_it_is_acknowledged_where_there_are_three(
    num_replicas: int, in_sync: int
) -> None:
    """A missing topic is made so; one that exists is left as it is, and none that is absent is described."""
    brokers = Brokers(num_replicas)

    made, again = create_missing(brokers, [TOPIC]), create_missing(brokers, [TOPIC])

    absent = Topic(name="absent", num_partitions=4, keep_ms=1_000)
    assert (made, again) == (["interactions"], [])
    assert replication(brokers, [TOPIC, absent]) == {"interactions": (num_replicas, in_sync)}
    assert is_durable(num_replicas, in_sync)
    assert is_durable(num_replicas, 1) is (num_replicas < 3)
