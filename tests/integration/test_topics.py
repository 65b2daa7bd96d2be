"""The topics of a deployment, made on a real broker."""

import subprocess
import sys
from pathlib import Path

import pytest
from kafka import KafkaAdminClient

from infra.kafka.topics import create_missing, wanted_topics
from services.settings.settings import Settings, inherited_environment
from tests.support.servers import Server, broker_server

pytestmark = pytest.mark.integration


def topics_at(broker: Server) -> set[str]:
    """The topics that a broker has."""
    admin = KafkaAdminClient(bootstrap_servers=broker.address)
    try:
        return set(admin.list_topics())
    finally:
        admin.close()


def test_topics_are_made_once_a_broker_answers(tmp_path: Path) -> None:
    """A start before the broker prints that it waits, and then creates all three; a second run creates none."""
    broker = broker_server(tmp_path / "broker")
    settings = Settings(state_dir=tmp_path, kafka_bootstrap=broker.address)
    waiting = subprocess.Popen(
        [sys.executable, "-m", "infra.kafka.topics"],
        env={**inherited_environment(), **settings.as_environment()},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert waiting.stderr is not None
    printed = waiting.stderr.readline()
    broker.start()
    try:
        made, _ = waiting.communicate(timeout=60)
        again = create_missing(settings.kafka_address.client_options(), wanted_topics(settings))

        assert "broker is away" in printed
        assert waiting.returncode == 0
        assert set(made.split()) >= {"interactions", "interactions.dlq", "impressions"}
        assert topics_at(broker) >= {"interactions", "interactions.dlq", "impressions"}
        assert again == []
    finally:
        waiting.kill()
        broker.kill()
