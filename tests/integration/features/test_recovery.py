"""Stores that lose rows, and partitions that change owners. Run: pytest tests/integration/features/test_recovery.py."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from redis import Redis

from pipelines.features.tables import build_tables, serve
from pipelines.runner.stage import silent
from services.contracts.event_roles import DEFAULT_ROLES
from services.errors import DependencyUnavailable, OwnershipLost
from services.features.ownership import KEY, PartitionWrite
from services.features.reader import FeatureReader
from services.features.repo import RepoAddress
from services.features.schema import POPULARITY, USER_HISTORY, LogPosition, PopularRow, PopularWindow, UserHistory
from services.features.writer import FeatureWriter
from services.observability.metrics import StreamMetrics
from services.stream.aggregate import apply, history_limits
from services.stream.background import Pace
from services.stream.decode import LoggedInteraction, decode
from services.stream.effects import NO_INTERRUPTIONS, HistoryEffects, Interruptions
from services.stream.log.offline_log import OfflineLog
from services.stream.popularity import ListedItems
from services.stream.rebuild import Rebuild, base_table
from services.stream.worker import StreamWorker
from tests.support.gateway.rows import history_row
from tests.support.servers import HOST, Server
from tests.support.stream.memory_topic import MemoryConsumer, MemoryTopic
from tests.support.stream.stream_rig import Rig, clean_replay, click, in_topic, many_clicks
from tests.support.training.synthetic import ratings, write_arrivals
from tests.support.wait import wait_for
from tests.unit.stream.log.test_offline_log import events

LIMITS = history_limits(30)


class Crash(Exception):
    """A worker's process ends at once."""


class Snapshots:
    """The full content of a store, for restoring it as a failover or a backup does."""

    def __init__(self, port: int) -> None:
        self.client = Redis(host=HOST, port=port)
        self._taken: dict[bytes, bytes] = {}

    def take(self) -> None:
        self._taken = {key: self.client.dump(key) for key in self.client.scan_iter()}

    def put_back(self) -> None:
        """Restore the store to the remembered state, or empty it if there is none."""
        self.client.flushall()
        for key, value in self._taken.items():
            self.client.restore(key, 0, value)


@dataclass(frozen=True)
class Cut:
    """The broker's log loses its end and continues with new events; the worker's machine may lose power too."""

    num_lost: int
    num_new: int
    is_crash: bool


class Life:
    """A topic, a log and a store with crashing workers, a restored store and a truncated topic, by a list of faults.

    A fault strikes at the end of its turn: turns are the worker's reads, writes and commits in sequence. Workers crash
    only with a broker that knows its leader epochs: otherwise the last second, applied but not logged, may be
    replaced unnoticed.
    """

    def __init__(
        self, features: RepoAddress, folder: Path, faults: dict[int, Any], *, knows_epochs: bool = True
    ) -> None:
        self._knows_epochs = knows_epochs
        self._numbers = count(1_000)
        self.topic = MemoryTopic(num_partitions=2)
        self.table = base_table(folder)
        self.features = features
        self._store = Snapshots(features.redis.port)
        self._store.client.flushall()
        self._faults = dict(faults)
        self._turn = 0
        self._is_struck = False

    def run(self) -> tuple[list[LoggedInteraction], list[LoggedInteraction]]:
        """Work until everything is applied; return the contents of topic and log.

        A new process starts after each crash, until a process meets no fault. A fault at a process' last turn is
        detected by the next process.
        """
        self._is_struck = True
        while self._is_struck:
            self._is_struck = False
            stop = threading.Event()
            with suppress(Crash):
                self._worker(stop).run(stop)
                for turn in sorted(self._faults):  # faults for turns that never came
                    self._strike(self._faults.pop(turn), lambda: None)
        in_topic = [event for own in self.topic.records for event in decode(own, 2, time.time_ns() // 1_000_000).events]
        return in_topic, [event for number in range(2) for event in OfflineLog(self.table.parent).read(number)]

    def rows(self, *user_ids: str) -> dict[str, UserHistory]:
        return FeatureWriter(self.features).read_histories(user_ids)

    def _worker(self, stop: threading.Event) -> StreamWorker:
        consumer: Any = partial(MemoryConsumer, self.topic, stop, knows_epochs=self._knows_epochs)
        return StreamWorker(
            consumer,
            FeatureWriter(self.features),
            OfflineLog(self.table.parent),
            ListedItems(),
            self.table,
            LIMITS,
            StreamMetrics(CollectorRegistry()),
            Pace(checkpoint_every_events=5, retry_after_s=0.0, renew_every_s=0.0),
            Interruptions(self._end_turn, self._end_turn, self._end_turn),
        )

    def _end_turn(self) -> None:
        self._turn += 1
        if fault := self._faults.pop(self._turn, None):
            self._strike(fault, self._crash)

    def _strike(self, fault: Any, crash: Callable[[], None]) -> None:
        self._is_struck = True
        if isinstance(fault, Cut):
            self.topic.cut(fault.num_lost)
            for number in islice(self._numbers, fault.num_new):
                self.topic.send(click(number, f"u{number % 3}"))
            if not fault.is_crash:
                return
            fault = "crash"
        if fault == "crash" and not self._knows_epochs:
            return
        {
            "snapshot": self._store.take,
            "restore": self._store.put_back,
            "empty": self._store.client.flushall,
            "crash": crash,
        }[fault]()

    def _crash(self) -> None:
        """End the process and expire its leases at once."""
        for field in self._store.client.hkeys(KEY):
            if field.endswith(b":until_ms"):
                self._store.client.hset(KEY, field, 0)
        raise Crash


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    num_events=st.integers(1, 40),
    seed=st.integers(0, 99),
    faults=st.dictionaries(st.integers(1, 25), st.sampled_from(["snapshot", "restore", "empty", "crash"]), max_size=6),
)
def test_effect_exactly_once_whatever_the_store_forgets(
    features: RepoAddress, tmp_path_factory: pytest.TempPathFactory, num_events: int, seed: int, faults: dict[int, str]
) -> None:
    """With crashes and an emptied or restored store at any points, rows equal a replay of the log."""
    life = Life(features, tmp_path_factory.mktemp("life"), faults)
    for event in many_clicks(num_events, num_users=3, seed=seed):
        life.topic.send(event)

    events, logged = life.run()

    assert [event.position for event in logged] == [event.position for event in events]
    expected: dict[str, UserHistory] = {}
    for entry in events:
        row = apply(expected.get(entry.interaction.user_id), [entry.event], LIMITS).row
        assert row is not None
        expected[row.user_id] = row
    assert life.rows("u0", "u1", "u2") == expected


def draw_faults(draw: random.Random) -> dict[int, Any]:
    """Return faults at some turns, most of them truncations."""
    others = ("snapshot", "restore", "empty", "crash")
    return {
        draw.randint(1, 25): Cut(draw.randrange(10), draw.randrange(10), draw.random() < 0.5)
        if draw.random() < 0.6
        else draw.choice(others)
        for _ in range(draw.randint(1, 6))
    }


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 9_999), knows_epochs=st.booleans())
def test_effect_exactly_once_whatever_the_topic_forgets(
    features: RepoAddress, tmp_path_factory: pytest.TempPathFactory, seed: int, knows_epochs: bool
) -> None:
    """If the topic loses its end at any points, all that it finally holds is applied and logged once.

    The topic may become shorter or longer than before, with or without a crash. Lost events stay in rows and log.
    """
    draw = random.Random(seed)
    life = Life(features, tmp_path_factory.mktemp("life"), draw_faults(draw), knows_epochs=knows_epochs)
    for number in range(draw.randint(1, 25)):
        life.topic.send(click(number, f"u{number % 3}"))

    events, logged = life.run()

    logged_ids = [event.interaction.event_id for event in logged]
    rows = life.rows("u0", "u1", "u2")
    assert len(set(logged_ids)) == len(logged_ids)
    assert {event.interaction.event_id for event in events} <= set(logged_ids)
    for user_id, row in rows.items():
        own = {event.interaction.item_id for event in logged if event.interaction.user_id == user_id}
        assert row.num_events >= len(own)
        assert len(set(row.item_ids)) == len(row.item_ids)
        assert row.num_events > len(row.item_ids) or own <= set(row.item_ids)


def serve_recorded(rig: Rig, folder: Path, *item_ids: str) -> None:
    """Serve the base tables of these recorded events of one user."""
    write_arrivals(ratings(*(("u", item_id) for item_id in item_ids)), folder)
    build_tables(folder, 30, folder, silent)
    serve(folder, rig.features, rig.settings.offline_log_dir, silent)


async def test_a_lost_store_is_whole_again_without_a_command(rig: Rig, tmp_path: Path) -> None:
    """If Redis is emptied between two clicks, reads see either no history or all 22 events of the user."""
    serve_recorded(rig, tmp_path, *(f"old{number}" for number in range(20)))
    base = rig.rows("u")["u"]
    reader = FeatureReader(rig.features, num_partitions=4)
    rig.start_worker()
    rig.send(click(1))
    wait_for(lambda: rig.rows("u")["u"].num_events == 21, what="first click")
    rig.stop_worker()
    before = await reader.read("u", "v1", 10.0)
    rig.empty_store()

    with pytest.raises(DependencyUnavailable):
        await reader.read("u", "v1", 10.0)
    rig.start_worker()
    rig.send(click(2))
    wait_for(lambda: "u" in rig.rows("u") and rig.rows("u")["u"].num_events == 22, what="both clicks and the base")
    after = await reader.read("u", "v1", 10.0)
    await reader.close()

    assert len(base.item_ids) == 20
    assert before.num_events == 21
    assert after.history_item_ids == (*before.history_item_ids, "i2")
    assert rig.rows("u") == clean_replay(rig.broker, base=(base,))


def test_unreadable_base_tables_are_waited_for(rig: Rig, tmp_path: Path) -> None:
    """Without base tables the worker reports rows it cannot restore, and continues once the tables are written."""
    serve_recorded(rig, tmp_path, "old")
    table = base_table(rig.settings.offline_log_dir)
    right = table.read_bytes()
    table.write_bytes(b"garbage")
    rig.empty_store()
    rig.start_worker()

    wait_for(lambda: rig.metric("tailrace_stream_log_failures_total", step="open") > 1, what="a second try")
    before = rig.rows("u")
    table.write_bytes(right)
    rig.send(click(1))

    wait_for(lambda: "u" in rig.rows("u") and rig.rows("u")["u"].item_ids == ("old", "i1"), what="base and click")
    assert before == {}


def test_a_rebuild_that_is_stopped_goes_on_where_it_was(features: RepoAddress, tmp_path: Path) -> None:
    """SIGTERM ends a long rebuild after its batch; requests see no partial history, and the next process resumes."""
    log, writer, stop = OfflineLog(tmp_path), FeatureWriter(features), threading.Event()
    log.append(events(0, 2_499))
    rebuild = Rebuild(
        base_table(tmp_path), log, writer, HistoryEffects(writer, LIMITS, DEFAULT_ROLES, NO_INTERRUPTIONS), stop.set
    )
    seen: list[tuple[int, bool]] = []

    for stopped in (stop, threading.Event()):
        claim = writer.partitions.claim(0)
        assert claim is not None
        rebuild.make_whole({0: claim}, 1, stopped)
        left = writer.partitions.claim(0)
        assert left is not None
        assert left.position is not None
        seen.append((left.position.offset, left.is_whole))

    assert seen == [(999, False), (2_499, True)]
    assert writer.read_histories(["u"])["u"].num_events == 2_500


def test_a_store_emptied_below_a_running_worker_is_rebuilt(rig: Rig) -> None:
    """The worker detects an emptied store by itself, even without events."""
    rig.start_worker()
    rig.send(*many_clicks(60, num_users=3))
    expected = clean_replay(rig.broker)
    wait_for(lambda: rig.rows(*expected) == expected, what="all applied")
    wait_for(lambda: sorted(rig.logged()) == in_topic(rig.broker), what="all logged")

    rig.empty_store()

    wait_for(lambda: rig.rows(*expected) == expected, what="all back")


def test_a_stopped_owner_writes_nothing_when_it_goes_on(rig: Rig) -> None:
    """A worker paused between read and write (SIGSTOP) cannot write after another worker has taken over."""
    environment = os.environ | rig.settings.as_environment()
    rig.send(*many_clicks(30, num_users=4))
    stopped = subprocess.Popen(
        [sys.executable, "-m", "tests.support.stream.interrupted_worker", "after_read", "2", "SIGSTOP"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        wait_for(lambda: Path(f"/proc/{stopped.pid}/stat").read_text().split()[2] == "T", 120, what="a frozen worker")
        rig.start_worker()
        rig.send(*many_clicks(30, num_users=4, seed=1))
        expected = clean_replay(rig.broker)
        wait_for(lambda: rig.rows(*expected) == expected, what="the other worker's rows")

        stopped.send_signal(signal.SIGCONT)
        assert stopped.stdout is not None
        refused = next(line for line in stopped.stdout if "stream.write_refused" in line)
        next(line for line in stopped.stdout if "stream.waiting_for_other_worker" in line)
    finally:
        stopped.kill()
        stopped.communicate()

    assert "the lease is not ours" in refused
    assert rig.rows(*expected) == expected
    rig.stop_worker()
    log = OfflineLog(rig.settings.offline_log_dir)
    assert sum(len(list(log.read(number))) for number in range(4)) == len(rig.logged())


def test_two_workers_that_want_the_same_partitions_never_share_one(rig: Rig) -> None:
    """A second worker waits for owned partitions, and takes them when the old worker ends."""
    other = Rig(rig.settings.model_copy(update={"worker_index": 1, "num_workers": 2}), rig.features, rig.broker)
    rig.start_worker()
    rig.send(*many_clicks(40, num_users=20))
    wait_for(lambda: rig.metric("tailrace_stream_applied_total") == 40, what="the old worker's events")
    other.start_worker()
    rig.send(*many_clicks(40, num_users=20, seed=1))
    wait_for(lambda: rig.metric("tailrace_stream_applied_total") > 40, what="the old worker's further events")
    applied_beside = other.metric("tailrace_stream_applied_total")
    rig.stop_worker()
    rig.settings = rig.settings.model_copy(update={"num_workers": 2})
    rig.start_worker()
    rig.send(*many_clicks(40, num_users=20, seed=2))
    expected = clean_replay(rig.broker)

    wait_for(lambda: rig.rows(*expected) == expected, what="rows equal the replay")
    other.stop_worker()

    assert applied_beside == 0
    assert other.metric("tailrace_stream_applied_total") > 0


def test_events_of_a_foreign_partitioner_reach_their_users(rig: Rig) -> None:
    """Events that a producer puts on partition 0 are forwarded to the users' partitions and applied once."""
    rig.start_worker()
    rig.send_to(0, *(click(number, f"u{number % 5}") for number in range(25)))

    wait_for(lambda: rig.metric("tailrace_stream_applied_total") == 25, what="all events applied")
    rig.stop_worker()

    users = [f"u{number}" for number in range(5)]
    rows = rig.rows(*users)
    assert rig.metric("tailrace_stream_rerouted_total") > 0
    assert {user: row.num_events for user, row in rows.items()} == dict.fromkeys(users, 5)
    assert sorted(rig.logged()) == sorted(set(rig.logged()))
    assert len(rig.logged()) == 25


def test_a_write_needs_the_lease_and_the_position_and_the_row(features: RepoAddress, valkey: Server) -> None:
    """A second writer cannot claim; writes to a restored store are refused, and rows changed meanwhile are kept."""
    owner, other = FeatureWriter(features), FeatureWriter(features)
    store = Snapshots(valkey.port)
    first, second = history_row("u", ("a",), 1), history_row("u", ("a", "b"), 2)
    owner.partitions.claim(1)
    store.take()
    owner.apply_histories({LogPosition("t", 1, 7): [first]}, {})

    assert other.partitions.claim(1) is None
    with pytest.raises(OwnershipLost):
        other.apply_histories({LogPosition("t", 1, 8): [second]}, {"u": first})
    assert owner.read_histories(["u"]) == {"u": first}
    store.put_back()
    with pytest.raises(OwnershipLost, match="position"):
        owner.apply_histories({LogPosition("t", 1, 8): [second]}, {"u": first})
    claim = owner.partitions.claim(1)
    assert claim is not None
    assert claim.position is None


def test_a_lease_of_before_the_clock_was_set_back_is_over(features: RepoAddress, valkey: Server) -> None:
    """A stopped worker's lease does not block for an hour if the clock is an hour earlier after a restart."""
    dead, next_one = FeatureWriter(features), FeatureWriter(features)
    client = Snapshots(valkey.port).client
    dead.partitions.claim(1)

    assert next_one.partitions.claim(1) is None
    client.hincrby(KEY, "1:until_ms", 3_600_000)
    assert next_one.partitions.claim(1) is not None


def test_a_claim_names_whether_another_wrote_meanwhile(features: RepoAddress, valkey: Server) -> None:
    """A reclaimed partition continues, unless its lease had expired and another worker applied events."""
    owner, other = FeatureWriter(features), FeatureWriter(features)
    client = Snapshots(valkey.port).client

    first, again = owner.partitions.claim(1), owner.partitions.claim(1)
    client.hset(KEY, "1:until_ms", 0)
    other.partitions.claim(1)
    other.apply_histories({LogPosition("t", 1, 7): [history_row("u", ("a",), 1)]}, {})
    other.partitions.release()
    after = owner.partitions.claim(1)

    assert [claim and claim.is_continued for claim in (first, again, after)] == [False, True, False]


def test_partitions_that_are_written_together_are_fenced_each_by_itself(features: RepoAddress, valkey: Server) -> None:
    """Large writes to owned partitions succeed, also after the store lost its scripts or a partition was taken."""
    writer = FeatureWriter(features)
    rows = [history_row(f"u{number}") for number in range(450)]
    for partition in range(3):
        writer.partitions.claim(partition)

    with Redis(host=HOST, port=valkey.port) as client:
        client.script_flush()
        writer.apply_histories({LogPosition("t", 0, 7): rows[:2], LogPosition("t", 1, 7): rows[2:]}, {})
        client.hset(KEY, "1:lease", "another")
    with pytest.raises(OwnershipLost, match="lease"):
        writer.partitions.write_all(
            [PartitionWrite(number, position=LogPosition("t", number, 8)) for number in range(3)]
        )

    assert writer.read_histories([row.user_id for row in rows]) == {row.user_id: row for row in rows}
    assert writer.partitions.owned == (0, 2)
    assert [writer.partitions.position(number) for number in (0, 2)] == [
        LogPosition("t", number, 8) for number in (0, 2)
    ]


def test_rows_are_laid_out_as_feast_lays_them_out(features: RepoAddress, valkey: Server) -> None:
    """Keys, fields and bytes equal Feast's own write, to the microsecond."""
    writer = FeatureWriter(features)
    history = history_row("ü", ("a", "b"), 1_795_262_400_123_457)
    windows = {"1h": PopularWindow(("a",), (2,)), "24h": PopularWindow(), "7d": PopularWindow(("b",), (168,))}
    popular = PopularRow(partition=3, as_of_ms=int(time.time() * 1_000), windows=windows)
    with Redis(host=HOST, port=valkey.port) as client:

        def content() -> dict[bytes, Any]:
            """Return all rows of the store, and empty it."""
            rows = {key: client.hgetall(key) for key in client.scan_iter() if not key.startswith(b"tailrace:")}
            client.flushall()
            return rows

        writer._write(USER_HISTORY, [history], [history.row_time_us])
        writer._write(POPULARITY, [popular], [popular.as_of_ms * 1_000])
        of_feast = content()
        writer.write_histories([history])
        writer.partitions.claim(3)
        writer.write_popularity([popular])

        assert len(of_feast) == 2
        assert content() == of_feast
