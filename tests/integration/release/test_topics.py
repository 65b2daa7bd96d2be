"""The release process' topic reader on a real broker: new records, and records that it returns again."""

import time
from contextlib import closing

from kafka import KafkaProducer

from infra.kafka.topics import create_missing
from pipelines.release.topics import ReleaseTopicReader
from services.contracts.events import Interaction
from services.settings.kafka_topics import wanted_topics
from services.settings.settings import Settings
from services.settings.topic_reader import Mark
from tests.support.servers import Server


def send(settings: Settings, *event_ids: str) -> None:
    """Produce interactions."""
    now_ms = time.time_ns() // 1_000_000
    with closing(KafkaProducer(bootstrap_servers=settings.kafka_bootstrap)) as producer:
        for event_id in event_ids:
            event = Interaction(event_id=event_id, user_id=f"u{event_id}", item_id="i", event_time_ms=now_ms)
            producer.send(settings.interactions_topic, key=event.key, value=event.encode()).get(30)


def read(reader: ReleaseTopicReader) -> list[str]:
    return sorted(event.event_id for _, interactions in reader.read() for event in interactions)


def test_records_are_returned_once_while_the_log_is_the_same(broker: Server) -> None:
    """Records are returned once across connections; a replaced log is returned whole."""
    settings = Settings(kafka_bootstrap=broker.address, topic_partitions=2)
    create_missing(settings.kafka_address.client_options(), wanted_topics(settings))
    since_ms = time.time_ns() // 1_000_000 - 60_000
    reader = ReleaseTopicReader(
        settings.kafka_address, settings.impressions_topic, settings.interactions_topic, since_ms
    )
    send(settings, "a", "b", "c")
    with closing(reader):
        assert read(reader) == ["a", "b", "c"]
        send(settings, "d")
        assert read(reader) == ["d"]
        reader.close()
        assert read(reader) == []
        assert reader._logs is not None
        for partition, mark in reader._logs.marks.items():
            if mark.last is not None:
                reader._logs.marks[partition] = Mark(mark.offset, mark.leader_epoch, (mark.last[0], "another record"))
        reader.close()

        assert read(reader) == ["a", "b", "c", "d"]
