"""A log that returns shorter or with other records under the same topic ID: real connections, store and worker."""

from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pytest

from services.contracts.events import Interaction
from tests.support.servers import broker_server
from tests.support.stream.stream_rig import TOPIC, Rig, click
from tests.support.stream.substituted_broker import SubstitutedBroker, make_topic
from tests.support.wait import wait_for

CHANGED = "tailrace_stream_changed_logs_total"


class TwoBrokers:
    """A topic of one partition at one address, which a second broker takes over under the same topic ID."""

    def __init__(self, folder: Path) -> None:
        self.proxy = SubstitutedBroker()
        self._servers = [broker_server(folder / name, advertised=self.proxy.address) for name in "ab"]
        first, self._second = self._servers
        first.start()
        self._seen = make_topic(first, self.proxy, TOPIC)
        self.topic_id = str(UUID(bytes=self._seen))
        self.proxy.lead_to(first)

    def substitute(self) -> None:
        """Lead to the second broker, whose topic is empty."""
        self.proxy.lead_to(None)
        self._servers[0].kill()
        self._second.start()
        self.proxy.lead_to(self._second, (self._seen, make_topic(self._second, self.proxy, TOPIC)))

    def close(self) -> None:
        """End all."""
        self.proxy.close()
        for server in self._servers:
            server.kill()


@pytest.fixture
def brokers(tmp_path: Path) -> Iterator[TwoBrokers]:
    """Both brokers; clients reach the first."""
    made = TwoBrokers(tmp_path / "brokers")
    yield made
    made.close()


@pytest.fixture
def one_log(rig: Rig, brokers: TwoBrokers) -> Rig:
    """A rig on the topic of both brokers."""
    changes = {"kafka_bootstrap": brokers.proxy.address, "topic_partitions": 1}
    rig.settings = rig.settings.model_copy(update=changes)
    return rig


def names(events: list[Interaction]) -> list[str]:
    return sorted(event.event_id for event in events)


@pytest.mark.parametrize(
    ("num_same", "num_new", "is_running"),
    [(0, 31, True), (20, 11, True), (0, 31, False), (20, 11, False), (20, 70, False)],
    ids=["all other", "shorter", "all other, no worker", "shorter, no worker", "longer by now, no worker"],
)
def test_a_log_that_came_back_with_other_events_loses_none(
    one_log: Rig, brokers: TwoBrokers, num_same: int, num_new: int, is_running: bool
) -> None:
    """After a replaced log of 31 or 90 instead of 60 events, kept events count once and new events are applied and
    logged.

    This broker has no leader epochs: a new consumer compares its records with the logged records. Offsets may repeat.
    """
    rig, old = one_log, [click(number) for number in range(60)]
    new = [click(number) for number in range(1_000, 1_000 + num_new)]
    rig.start_worker()
    rig.send(*old)
    wait_for(lambda: len(rig.logged()) == 60, what="all old events logged")
    if not is_running:
        rig.stop_worker()

    brokers.substitute()
    rig.send(*old[:num_same], *new)
    if not is_running:
        rig.start_worker()
    wait_for(lambda: rig.rows("u")["u"].num_events >= 60 + num_new, what="all new events")
    wait_for(lambda: len(rig.logged()) >= 60 + num_new, what="all new events logged")
    rig.stop_worker()

    assert rig.rows("u")["u"].num_events == 60 + num_new
    assert sorted(event_id for event_id, _, _ in rig.logged()) == names([*old, *new])
    assert {topic_id for _, topic_id, _ in rig.logged()} == {brokers.topic_id, f"{brokers.topic_id}+1"}
    assert rig.metric(CHANGED) == 1


def test_a_broken_connection_changes_no_log(one_log: Rig, brokers: TwoBrokers) -> None:
    """Repeated reconnections of workers to an unchanged log keep the broker's topic ID."""
    rig = one_log
    for number in range(3):
        rig.start_worker()
        rig.send(*(click(10 * number + index) for index in range(10)))
        wait_for(lambda least=10 * (number + 1): len(rig.logged()) >= least, what="all logged")
        brokers.proxy.cut()
        rig.send(click(100 + number))
        wait_for(
            lambda name=f"i{100 + number}": rig.rows("u")["u"].item_ids[-1] == name, what="the event after the cut"
        )
        rig.stop_worker()

    assert rig.rows("u")["u"].num_events == 33
    assert {topic_id for _, topic_id, _ in rig.logged()} == {brokers.topic_id}
    assert rig.metric(CHANGED) == 0
