"""The worker's loop over a failing log, without a broker or a store."""

import errno
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from services.contracts.event_roles import DEFAULT_ROLES
from services.contracts.events import Interaction
from services.errors import DependencyUnavailable, ReplicaOnly
from services.features.ownership import Claim
from services.features.schema import LogPosition, PopularRow
from services.observability.metrics import StreamMetrics
from services.stream.aggregate import history_limits
from services.stream.background import Pace, PopularCounts, Timer
from services.stream.decode import LoggedInteraction, Record
from services.stream.effects import Pending
from services.stream.log.offline_log import OfflineLog
from services.stream.popularity import ListedItems
from services.stream.worker import StreamWorker

PACE = Pace(popularity_every_s=0.0, popularity_at_least_every_s=0.0, checkpoint_every_s=0.0, retry_after_s=0.0)
NUM_POLLS = 50


def do_nothing(_self: object, *_: Any, **__: Any) -> None:
    """Replace a method that the test does not need."""


class FakeConsumer:
    """A topic of one partition with five records that never arrive.

    Its broker fails at the second poll; with `quiet_after` it stays available and finally stops the worker.
    """

    topic_id = "t"
    partitions = wanted = (0,)
    num_partitions = 1

    def __init__(self, stop: threading.Event, quiet_after: Callable[[], bool] | None) -> None:
        self._stop = stop
        self._quiet_after = quiet_after
        self._num_polls = 0

    def poll(self, _wait_ms: int) -> list[Any]:
        """Return no records."""
        if self._quiet_after is None:
            self._num_polls += 1
            if self._num_polls > 1:
                raise DependencyUnavailable("broker", 0.0)
        elif self._quiet_after():
            self._num_polls += 1
            if self._num_polls == NUM_POLLS:
                self._stop.set()
        return []

    commit = dead_letter = reroute = assign = close = check_topic = do_nothing

    def lag(self) -> dict[int, int]:
        return {0: 5}


class FakePartitions:
    """A store that lets this worker own everything and has lost no data."""

    owned = (0,)

    def __init__(self, is_continued: bool) -> None:
        self._is_continued = is_continued

    def claim(self, partition: int) -> Claim:
        return Claim(LogPosition("t", partition, 10**9), None, True, frozenset(), is_continued=self._is_continued)

    write = write_all = do_nothing


class FakeWriter:
    """Keeps the written popularity, and stops the worker after `num_writes` rows."""

    def __init__(self, num_writes: int, is_continued: bool = True) -> None:
        self.written: list[PopularRow] = []
        self.partitions = FakePartitions(is_continued)
        self.stop = threading.Event()
        self._num_writes = num_writes

    def write_popularity(self, rows: list[PopularRow]) -> None:
        """Keep rows."""
        self.written += rows
        if len(self.written) >= self._num_writes:
            self.stop.set()

    close = do_nothing


class CountedLog(OfflineLog):
    """An offline log that counts full reads, whose readers wait for `go_on`, and whose step `fails` raises."""

    num_reads = 0

    def __init__(self, root: Path, go_on: threading.Event | None = None, fails: str = "") -> None:
        super().__init__(root)
        self._go_on = go_on
        self._fails = fails

    def compact(self, partition: int, now_s: float) -> int:
        """Fail, or merge."""
        if self._fails == "upkeep":
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().compact(partition, now_s)

    def read(
        self, partition: int, not_before_ms: int = 0, after: LogPosition | None = None
    ) -> Iterator[LoggedInteraction]:
        """Fail, or count, wait, and read."""
        if self._fails == "count":
            raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")
        self.num_reads += after is None
        if self._go_on is not None:
            self._go_on.wait(20)
        return super().read(partition, not_before_ms, after)


def logged_click(root: Path) -> CountedLog:
    """Return a log with a current click."""
    log = CountedLog(root)
    log.append([LoggedInteraction(click_of("u"), LogPosition("t", 0, 0))])
    return log


def click_of(user_id: str) -> Interaction:
    return Interaction(event_id=user_id, user_id=user_id, item_id="i", event_time_ms=time.time_ns() // 1_000_000)


def run_over(
    log: OfflineLog,
    writer: FakeWriter,
    pace: Pace = PACE,
    quiet_after: Callable[[], bool] | None = None,
    registry: CollectorRegistry | None = None,
    kind: type[FakeConsumer] = FakeConsumer,
) -> int:
    """Run a worker until its writer or its quiet consumer stops it; return the number of heartbeats."""
    beats: list[int] = []
    connect = partial(kind, writer.stop, quiet_after)
    metrics = StreamMetrics(registry or CollectorRegistry())
    parts: Any = connect, writer, log, ListedItems(("i",)), Path("none"), history_limits(10), metrics, pace
    StreamWorker(*parts, beat=lambda: beats.append(1)).run(writer.stop)
    return len(beats)


class UnreadConsumer(FakeConsumer):
    """A topic that reports its lag, but cannot be read."""

    def poll(self, _wait_ms: int) -> list[Any]:
        """Fail, and stop the worker."""
        self._stop.set()
        raise DependencyUnavailable("broker", 0.0)


class DemotedPartitions(FakePartitions):
    """A store that fails every write after the claim, as a demoted replica or an unavailable server does."""

    def __init__(self, failure: DependencyUnavailable) -> None:
        super().__init__(is_continued=True)
        self._failure = failure

    def write_all(self, *_: Any) -> None:
        raise self._failure


@pytest.mark.parametrize(
    ("failure", "beats"), [(ReplicaOnly("features", 0.0), False), (DependencyUnavailable("features", 0.0), True)]
)
def test_a_worker_whose_store_is_a_replica_gives_no_heartbeat(
    tmp_path: Path, failure: DependencyUnavailable, beats: bool
) -> None:
    """A replica keeps no writes, so the worker must appear unhealthy; an unavailable store keeps the heartbeats."""
    writer = FakeWriter(num_writes=10 * NUM_POLLS)
    writer.partitions = DemotedPartitions(failure)

    num_beats = run_over(OfflineLog(tmp_path), writer, replace(PACE, renew_every_s=0.0), quiet_after=lambda: True)

    assert (num_beats >= NUM_POLLS) is beats
    assert beats or num_beats <= 2


def test_lag_is_reported_where_polls_fail(tmp_path: Path) -> None:
    """A worker whose polls all fail still reports its lag."""
    registry, writer, pace = CollectorRegistry(), FakeWriter(num_writes=3), replace(PACE, lag_every_s=0.0)

    run_over(logged_click(tmp_path), writer, pace, registry=registry, kind=UnreadConsumer)

    assert registry.get_sample_value("tailrace_stream_lag_events", {"partition": "0"}) == 5


@pytest.mark.parametrize("step", ["upkeep", "count"])
def test_what_fails_in_the_background_ends_nothing(tmp_path: Path, step: str) -> None:
    """A failed merge or count becomes a metric and a log line; polling continues."""
    logged_click(tmp_path)
    registry, writer = CollectorRegistry(), FakeWriter(num_writes=10 * NUM_POLLS)
    log = CountedLog(tmp_path, fails=step)

    def failed() -> bool:
        return bool(registry.get_sample_value("tailrace_stream_log_failures_total", {"step": step}))

    with capture_logs() as lines:
        run_over(log, writer, replace(PACE, compact_every_s=0.0), quiet_after=failed, registry=registry)

    assert failed()
    assert step in {line.get("step") for line in lines if line["event"] == "stream.log_failed"}
    assert bool(writer.written) is (step == "upkeep")


def test_popularity_is_counted_without_an_unreadable_file(tmp_path: Path) -> None:
    """The other files are counted, and the gauge has the number of unreadable files."""
    log = logged_click(tmp_path)
    log.append([LoggedInteraction(click_of("v"), LogPosition("t", 0, 1))])
    sorted(tmp_path.rglob("*.parquet"))[1].write_bytes(b"garbage")
    registry, writer = CollectorRegistry(), FakeWriter(num_writes=10 * NUM_POLLS)

    run_over(log, writer, replace(PACE, lag_every_s=0.0), quiet_after=lambda: bool(writer.written), registry=registry)

    assert writer.written[-1].windows["7d"].counts == (1,)
    assert registry.get_sample_value("tailrace_stream_log_unreadable_files") == 1


@pytest.mark.parametrize("is_continued", [True, False])
def test_a_lost_consumer_costs_no_second_count_of_the_week(tmp_path: Path, is_continued: bool) -> None:
    """Later consumers continue from the counts, unless another worker applied events meanwhile."""
    log, writer = logged_click(tmp_path), FakeWriter(num_writes=3, is_continued=is_continued)

    run_over(log, writer)

    assert len(writer.written) == 3
    assert (log.num_reads == 1) is is_continued


def test_popularity_is_counted_again_when_the_clock_was_set_back(tmp_path: Path) -> None:
    """A clock that ran ahead empties the windows; once corrected, they have all earlier events again."""
    clicks = [LoggedInteraction(click_of(user_id), LogPosition("t", 0, at)) for at, user_id in enumerate("ab")]
    now_ms = time.time_ns() // 1_000_000
    log = OfflineLog(tmp_path)
    log.append(clicks[:1])
    with ThreadPoolExecutor(1) as thread:
        counts = PopularCounts(log, ListedItems(("i",)), DEFAULT_ROLES, thread)

        def counted(at_ms: int) -> list[int]:
            thread.submit(int).result()  # earlier submissions are done
            counts.adopt({0: clicks[1:]})
            return [sum(row.windows["1h"].counts) for row in counts.rows(at_ms, 10)]

        counts.own({0: Claim(None, None, True, frozenset())})
        seen = [counted(now_ms), counted(now_ms + 10 * 86_400_000), counted(now_ms), counted(now_ms)]

    assert seen == [[2], [0], [], [2]]


@pytest.mark.parametrize(("at_least_every_s", "num_written"), [(3_600.0, 1), (0.0, NUM_POLLS)])
def test_unchanged_popularity_is_written_rarely(tmp_path: Path, at_least_every_s: float, num_written: int) -> None:
    """Unchanged popularity is written again only when the written rows are old."""
    log, writer = logged_click(tmp_path), FakeWriter(num_writes=10 * NUM_POLLS)
    pace = replace(PACE, popularity_at_least_every_s=at_least_every_s, lag_every_s=3_600.0)

    run_over(log, writer, pace, quiet_after=lambda: bool(writer.written))

    assert len(writer.written) == num_written


def test_events_are_polled_while_a_long_log_is_counted(tmp_path: Path) -> None:
    """While a week of events is counted, the worker polls its first records and sends heartbeats."""
    writer = FakeWriter(num_writes=10 * NUM_POLLS)
    log = CountedLog(tmp_path, go_on=writer.stop)

    num_beats = run_over(log, writer, quiet_after=lambda: True)

    assert num_beats >= NUM_POLLS


def test_due_once_a_period() -> None:
    """A timer is not due at first, then once per period."""
    times = iter([0.0, 0.5, 1.0, 1.5, 2.5])
    timer = Timer(1.0, clock=lambda: next(times))

    assert [timer.due() for _ in range(4)] == [False, True, False, True]


def test_unreadable_records_move_the_offset_but_not_the_log() -> None:
    """A dead letter at the end of a batch is committed, but not logged as an event."""
    places = [LogPosition("t", 2, 7), LogPosition("t", 2, 8)]
    event = LoggedInteraction(Interaction(event_id="e", user_id="u", item_id="i", event_time_ms=1), places[0])
    pending = Pending()

    pending.add([Record(position, b"u", b"", 0) for position in places], [event])

    assert pending.positions == {2: places[1]}
    assert pending.by_partition == {2: [event]}
    assert pending.num_events == 1
