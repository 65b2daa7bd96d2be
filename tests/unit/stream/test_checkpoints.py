"""Checkpoints of applied events over a slow or failing disk, without a broker or a store."""

import threading
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from services.contracts.events import Interaction
from services.errors import DependencyUnavailable
from services.features.ownership import PartitionWrite
from services.features.schema import LogPosition
from services.observability.metrics import StreamMetrics
from services.stream.background import Chores, Timer
from services.stream.checkpoints import LogCheckpoints
from services.stream.decode import LoggedInteraction, Record
from services.stream.effects import Pending
from services.stream.log.offline_log import OfflineLog
from services.stream.report import WorkerReport


class SlowLog(OfflineLog):
    """An offline log that waits for `go_on` before each file, then raises `failure` if any."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.go_on = threading.Event()
        self.failure: OSError | None = None

    def append(self, events: Any) -> None:
        """Wait, then fail or write."""
        self.go_on.wait(20)
        if self.failure is not None:
            raise self.failure
        super().append(events)


class Store:
    """Partition 0 of a store, and a consumer: remembers their writes and commits."""

    def __init__(self) -> None:
        self.applied: LogPosition | None = None
        self.writes: list[PartitionWrite] = []
        self.commits: list[int] = []
        self.failure: DependencyUnavailable | None = None

    def position(self, _partition: int) -> LogPosition | None:
        return self.applied

    def write_all(self, writes: list[PartitionWrite]) -> None:
        """Keep the writes."""
        self.writes += writes

    def commit(self, positions: dict[int, LogPosition]) -> None:
        """Fail, or keep the offset."""
        if self.failure is not None:
            raise self.failure
        self.commits += [at.offset for at in positions.values()]


class Scene:
    """Checkpoints of one partition, whose events `apply` applies."""

    def __init__(self, root: Path) -> None:
        self.log, self.store, self.pending = SlowLog(root), Store(), Pending()
        self.consumer: Any = self.store
        parts: Any = self.log, self.store, WorkerReport(StreamMetrics(CollectorRegistry())), lambda: None, lambda: None
        self.checkpoints = LogCheckpoints(*parts)

    def apply(self, *offsets: int) -> None:
        """Apply an event at each offset."""
        for offset in offsets:
            at = LogPosition("t", 0, offset)
            event = LoggedInteraction(Interaction(event_id=str(at), user_id="u", item_id="i", event_time_ms=1), at)
            self.pending.add([Record(at, b"u", b"", 0)], [event])
            self.store.applied = at

    def finish(self) -> None:
        """Let the disk finish, and commit."""
        self.log.go_on.set()
        self.checkpoints.wait()
        self.checkpoints.finish(self.consumer, self.pending)

    @property
    def logged(self) -> list[int]:
        return [logged.position.offset for logged in self.log.read(0)]

    @property
    def waiting(self) -> list[int]:
        return [event.position.offset for event in self.pending.by_partition[0]]


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_events_are_applied_while_the_disk_writes(scene: Scene) -> None:
    """Only the events of the written batch are committed; the store's position, which is further, does not move."""
    scene.apply(0, 1)
    scene.checkpoints.begin(scene.pending)
    scene.checkpoints.finish(scene.consumer, scene.pending)
    scene.apply(2)
    assert (scene.store.commits, scene.waiting) == ([], [0, 1, 2])

    scene.finish()

    assert (scene.store.commits, scene.waiting, scene.logged) == ([1], [2], [0, 1])
    assert [(write.position, write.state) for write in scene.store.writes] == [(None, {"saved": "t/1"})]


def test_a_refusing_disk_keeps_the_events(scene: Scene) -> None:
    """No event is committed or forgotten; the next checkpoint writes all of them in order."""
    scene.apply(0)
    scene.log.failure = OSError("No space left on device")
    scene.checkpoints.begin(scene.pending)
    scene.apply(1)
    scene.finish()
    assert (scene.store.commits, scene.waiting, scene.pending.is_refused) == ([], [0, 1], True)

    scene.log.failure = None
    scene.checkpoints.complete(scene.consumer, scene.pending)

    assert (scene.store.commits, scene.logged, scene.pending.is_refused) == ([1], [0, 1], False)


def test_records_without_events_move_the_position(scene: Scene) -> None:
    """A dead letter leaves no row, so its checkpoint moves the store's position."""
    at = LogPosition("t", 0, 0)
    scene.pending.add([Record(at, b"u", b"", 0)], [])

    scene.checkpoints.complete(scene.consumer, scene.pending)

    assert (scene.store.commits, [write.position for write in scene.store.writes]) == ([0], [at])


def test_a_lost_consumer_leaves_the_events_on_disk(scene: Scene) -> None:
    """Events are logged without their commit, each once."""
    scene.log.go_on.set()
    scene.apply(0)
    scene.store.failure = DependencyUnavailable("broker", 0.0)
    with pytest.raises(DependencyUnavailable):
        scene.checkpoints.complete(scene.consumer, scene.pending)
    scene.apply(1)

    scene.checkpoints.save(scene.pending)

    assert (scene.store.commits, scene.logged) == ([], [0, 1])


@pytest.mark.parametrize(("at_once", "rounds"), [(False, ["a", "b", "a"]), (True, ["a", "b"])])
def test_due_jobs_take_turns(at_once: bool, rounds: list[str]) -> None:
    """While events arrive, a call does one job, and no job is starved by another."""
    done: list[str] = []
    chores = Chores((Timer(0.0), lambda: done.append("a")), (Timer(0.0), lambda: done.append("b")))

    for _ in range(1 if at_once else 3):
        chores.work(at_once=at_once)

    assert done == rounds
