"""The wait of a consumer's fetches: pytest tests/unit/settings/test_fetch_pace.py."""

from types import SimpleNamespace

from services.settings.fetch_pace import FetchPace, FetchWaits


def test_a_quiet_topic_is_fetched_less_often_until_a_record_arrives() -> None:
    """The long wait begins three seconds after the last record and ends with the next."""
    clock = [0.0]
    config = {"fetch_max_wait_ms": 25}
    consumer = SimpleNamespace(_fetcher=SimpleNamespace(config=config))
    pace = FetchPace(consumer, FetchWaits(busy_ms=25, quiet_ms=75), lambda: clock[0])
    waits: list[int] = []
    for clock[0], has_records in ((1.0, False), (3.0, False), (9.0, True), (11.9, False), (12.0, False)):
        pace.polled(has_records=has_records)
        waits.append(config["fetch_max_wait_ms"])

    assert waits == [25, 75, 25, 25, 75]
