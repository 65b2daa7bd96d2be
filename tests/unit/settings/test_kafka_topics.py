"""Creation of topics, and which topics keep an acknowledged record when a broker is lost."""

from typing import Any

import pytest
from kafka.errors import (
    ClusterAuthorizationFailedError,
    GroupAuthorizationFailedError,
    KafkaTimeoutError,
    SaslAuthenticationFailedError,
    TopicAuthorizationFailedError,
)

from services.errors import DependencyUnavailable
from services.settings.kafka_clients import broker_as_dependency, check_described
from services.settings.kafka_topics import Topic, create_missing, is_durable, replication

TOPIC = Topic(name="interactions", num_partitions=4, keep_ms=1_000)


class Brokers:
    """A cluster with this replication factor, as KafkaAdminClient shows it."""

    def __init__(self, num_replicas: int, refusal: Exception | None = None) -> None:
        self.num_replicas = num_replicas
        self.refusal = refusal
        self.made: dict[str, dict[str, Any]] = {}

    def list_topics(self) -> list[str]:
        return list(self.made)

    def create_topics(self, topics: dict[str, dict[str, Any]], validate_only: bool = False) -> dict[str, Any]:
        """Create or only describe topics; raise `refusal` if set."""
        if self.refusal is not None:
            raise self.refusal
        self.made |= {} if validate_only else topics
        return {"topics": [{"name": name, "replication_factor": self.num_replicas} for name in topics]}

    def describe_topics(self, names: list[str]) -> list[dict[str, Any]]:
        """Describe topics; a missing topic has an error code."""
        partitions = [{"replica_nodes": list(range(self.num_replicas))}]
        codes = {name: 0 if name in self.made else 3 for name in names}
        return [{"name": name, "error_code": code, "partitions": partitions} for name, code in codes.items()]

    def describe_configs(self, asked: list[Any], config_filter: str) -> dict[str, Any]:
        """Return all settings of topics."""
        assert config_filter == "all"
        configs = {
            resource.name: {"min.insync.replicas": "1", **self.made[resource.name]["configs"]} for resource in asked
        }
        return {"topic": {name: {key: {"value": config[key]} for key in config} for name, config in configs.items()}}


@pytest.mark.parametrize(("num_replicas", "in_sync"), [(1, 1), (2, 1), (3, 2), (5, 2)])
def test_two_replicas_have_a_record_before_it_is_acknowledged_where_there_are_three(
    num_replicas: int, in_sync: int
) -> None:
    """A missing topic is created this way, an existing topic is unchanged, and an absent topic is not described."""
    brokers = Brokers(num_replicas)

    made, again = create_missing(brokers, [TOPIC]), create_missing(brokers, [TOPIC])

    absent = Topic(name="absent", num_partitions=4, keep_ms=1_000)
    assert (made, again) == (["interactions"], [])
    assert replication(brokers, [TOPIC, absent]) == {"interactions": (num_replicas, in_sync)}
    assert is_durable(num_replicas, in_sync)
    assert is_durable(num_replicas, 1) is (num_replicas < 3)


@pytest.mark.parametrize(
    ("refusal", "permission"),
    [
        (TopicAuthorizationFailedError("Request failed"), "--operation Create --topic interactions"),
        (ClusterAuthorizationFailedError("Request failed"), "--operation Create --cluster"),
    ],
)
def test_a_refused_creation_names_the_permission(refusal: Exception, permission: str) -> None:
    """The error names the topic and the command that grants its creation."""
    with pytest.raises(DependencyUnavailable) as refused, broker_as_dependency():
        create_missing(Brokers(3, refusal), [TOPIC])

    assert permission in str(refused.value)
    assert "interactions" in str(refused.value)


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (TopicAuthorizationFailedError({"a", "b"}), "--operation Read --operation Write --topic a --topic b"),
        (GroupAuthorizationFailedError("tailrace-stream"), "--operation Read --group tailrace-stream"),
        (SaslAuthenticationFailedError("no"), "TAILRACE_KAFKA_PASSWORD_FILE"),
        (KafkaTimeoutError("late"), "try again"),
    ],
)
def test_a_refusal_of_the_broker_names_the_permission(error: Exception, named: str) -> None:
    """Callers see that the broker is unavailable; logs name the permission to grant."""
    with pytest.raises(DependencyUnavailable) as refused, broker_as_dependency():
        raise error

    assert named in str(refused.value)
    assert refused.value.summary == "broker is unavailable"


def test_a_topic_that_may_not_be_described_names_the_permission() -> None:
    """The description of such a topic has an error code."""
    with pytest.raises(DependencyUnavailable) as refused:
        check_described({"name": "items", "error_code": 29})

    assert "--operation Describe --topic items" in refused.value.why
