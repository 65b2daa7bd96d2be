"""The topics of a deployment, created on a real broker."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kafka import KafkaAdminClient

from infra.kafka import topics
from services.settings.settings import Settings
from tests.support.servers import broker_server
from tests.support.wait import wait_for

NAMES = {"interactions", "interactions.dlq", "impressions", "items"}


def test_topics_are_made_once_a_broker_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A start before the broker names its setting and waits, and then creates all topics; a second run creates none."""
    broker = broker_server(tmp_path / "broker")
    settings = Settings(state_dir=tmp_path, kafka_bootstrap=broker.address)
    for name, value in settings.as_environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(topics, "_CONNECT_MS", 200)
    try:
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(topics.main)
            setting = f"TAILRACE_KAFKA_BOOTSTRAP: {broker.address}: "
            wait_for(lambda: setting in capsys.readouterr().err, 60, "the first attempt")
            broker.start()
            waiting.result(60)
        again = topics.create_missing(settings.kafka_address.client_options(), topics.wanted_topics(settings))
        admin = KafkaAdminClient(bootstrap_servers=broker.address)
        existing = set(admin.list_topics())
        admin.close()
    finally:
        broker.kill()

    assert {line.removeprefix("made topic ") for line in capsys.readouterr().out.splitlines()} == NAMES
    assert existing >= NAMES
    assert again == []
