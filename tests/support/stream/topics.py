"""Read a whole Kafka topic, for tests."""

from typing import Any

from kafka import KafkaAdminClient, KafkaConsumer, TopicPartition

from tests.support.servers import Server


def read_topic(broker: Server, topic: str) -> list[tuple[str, Any]]:
    """Return (topic ID, record) for each record in a topic."""
    admin = KafkaAdminClient(bootstrap_servers=broker.address)
    (description,) = admin.describe_topics([topic])
    admin.close()
    consumer = KafkaConsumer(bootstrap_servers=broker.address, fetch_max_wait_ms=10)
    places = [TopicPartition(topic, part["partition_index"]) for part in description["partitions"]]
    consumer.assign(places)
    consumer.seek_to_beginning()
    ends = consumer.end_offsets(places)  # of the embedded broker: the last batch's first record
    records: list[tuple[str, Any]] = []
    while any(
        consumer.position(partition) < max(ends[partition], consumer.highwater(partition) or 0) for partition in places
    ):
        for batch in consumer.poll(200).values():
            records += [(str(description["topic_id"]), record) for record in batch]
    consumer.close()
    return records
