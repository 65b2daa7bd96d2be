"""When a consumer fetches: pytest tests/unit/settings/test_fetch_pace.py."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.settings.arrivals import ArrivalFile, ArrivalWatch
from services.settings.fetch_pace import FetchPace, FetchWaits

WAITS = FetchWaits(busy_ms=25, quiet_ms=75, untouched_ms=60_000)


class FetchedConsumer:
    """A consumer without a broker, whose fetches return the given answers in turn, then nothing."""

    def __init__(self, *answers: dict[str, list[int]]) -> None:
        self.config: dict[str, Any] = {"fetch_max_wait_ms": 25, "max_poll_records": 10}
        self._fetcher = SimpleNamespace(config=self.config, _nodes_with_pending_fetch_requests=set())
        self.place = SimpleNamespace(position=SimpleNamespace(offset=0), highwater=0)
        self._subscription = SimpleNamespace(assignment={"0": self.place})
        self.answers = list(answers)
        self.waits_ms: list[int] = []

    def poll(self, _wait_ms: int) -> dict[str, list[int]]:
        """Return the next answer, and record the broker's wait."""
        self.waits_ms.append(self.config["fetch_max_wait_ms"])
        return self.answers.pop(0) if self.answers else {}

    def _poll_once(self, _timer: Any, _max_records: int) -> dict[str, list[int]]:
        return self.poll(0)


@pytest.fixture
def file(tmp_path: Path) -> ArrivalFile:
    return ArrivalFile(tmp_path / "arrivals", "interactions")


@pytest.fixture
def watch(file: ArrivalFile) -> Iterator[ArrivalWatch]:
    """A watch of that file."""
    watch = file.watch()
    assert watch is not None
    yield watch
    watch.close()


def test_a_quiet_topic_is_fetched_less_often_until_a_record_arrives() -> None:
    """The broker's long wait begins three seconds after the last record and ends with the next."""
    clock = [0.0]
    consumer = FetchedConsumer({}, {}, {"0": [1]})
    pace = FetchPace(consumer, WAITS, clock=lambda: clock[0])
    for clock[0] in (1.0, 3.0, 9.0, 11.9, 12.0):
        pace.poll(100)

    assert consumer.waits_ms == [25, 75, 75, 25, 75]


def test_a_touch_ends_the_wait_for_records(file: ArrivalFile, watch: ArrivalWatch) -> None:
    """A drained consumer fetches after a touch, though an untouched topic would have to wait for a minute."""
    consumer = FetchedConsumer({}, {"0": [1]})
    pace = FetchPace(consumer, WAITS, watch)
    assert pace.poll(100) == {}
    file.touch()

    assert pace.poll(100) == {"0": [1]}
    assert not pace.is_vain


def test_a_consumer_with_records_fetches_again_without_a_touch(file: ArrivalFile, watch: ArrivalWatch) -> None:
    """Records may answer an earlier fetch than the touch, so only an empty answer ends the fetching."""
    consumer = FetchedConsumer({}, {"0": [1]}, {"0": [2]})
    pace = FetchPace(consumer, WAITS, watch)
    pace.poll(100)
    file.touch()

    assert [pace.poll(100) for _ in range(3)] == [{"0": [1]}, {"0": [2]}, {}]


def test_a_broker_that_needs_longer_gets_longer(file: ArrivalFile, watch: ArrivalWatch) -> None:
    """A fetch without the reported records is repeated at once, and the broker holds it twice as long each time."""
    consumer = FetchedConsumer({}, {}, {}, {}, {"0": [1]})
    pace = FetchPace(consumer, WAITS, watch)
    pace.poll(100)
    consumer.place.highwater = 1
    file.touch()

    assert [pace.poll(100) for _ in range(4)] == [{}, {}, {}, {"0": [1]}]
    assert consumer.waits_ms == [1, 1, 2, 4, 8]
    assert not pace.is_vain


def test_a_touch_without_a_record_is_reported(file: ArrivalFile, watch: ArrivalWatch) -> None:
    """The caller then checks whether the topic was replaced."""
    pace = FetchPace(FetchedConsumer(), WAITS, watch)
    pace.poll(100)
    assert not pace.is_vain
    file.touch()
    pace.poll(100)

    assert pace.is_vain


def test_records_of_a_producer_that_touches_no_file_keep_fetches_frequent(watch: ArrivalWatch) -> None:
    """After such a record, a quiet topic is fetched at its pace without touches: here in less than the minute."""
    clock = [1.0]
    consumer = FetchedConsumer({"0": [1]}, {}, {}, {"0": [2]})
    pace = FetchPace(consumer, WAITS, watch, clock=lambda: clock[0])
    for clock[0] in (2.0, 3.0):
        pace.poll(100)
    clock[0] = 60.0

    assert [pace.poll(100) for _ in range(2)] == [{}, {"0": [2]}]


def test_a_touch_soon_after_its_record_explains_it(file: ArrivalFile, watch: ArrivalWatch) -> None:
    """A reader may see a record before its producer has the acknowledgement; rare fetches then suffice."""
    clock = [1.0]
    pace = FetchPace(FetchedConsumer({"0": [1]}), WAITS, watch, clock=lambda: clock[0])
    clock[0] = 2.0
    pace.poll(100)
    file.touch()
    for clock[0] in (2.1, 60.0):
        pace._look_for_others(has_records=False)
        pace._is_touched(watch, 0)

    assert pace._longest_s == WAITS.untouched_ms / 1_000


def test_a_waiting_caller_is_not_kept_for_a_touch(watch: ArrivalWatch) -> None:
    """An urgent poll fetches at once."""
    consumer = FetchedConsumer({}, {"0": [1]})
    pace = FetchPace(consumer, WAITS, watch)
    pace.poll(100)

    assert pace.poll(100, is_urgent=True) == {"0": [1]}


def test_a_touch_before_the_wait_counts_once(file: ArrivalFile, watch: ArrivalWatch) -> None:
    """A watch remembers touches from its creation until a wait returns them."""
    file.touch()
    file.touch()

    assert (watch.wait(0.0), watch.wait(0.0)) == (True, False)


def test_without_a_folder_nothing_is_touched_or_watched() -> None:
    """Readers then wait in the broker."""
    file = ArrivalFile(None, "interactions")
    file.touch()

    assert file.watch() is None
