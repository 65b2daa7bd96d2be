"""The stream worker over a real broker and a real Valkey."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from services.features.reader import FeatureReader
from tests.support.disk import FullDisk
from tests.support.servers import Server
from tests.support.stream.stream_rig import QUICK, TOPIC, Rig, clean_replay, click, in_topic, many_clicks
from tests.support.stream.topics import read_topic
from tests.support.training.bundles import publish_bundle
from tests.support.wait import until_answer, wait_for

TIMEOUT_S = 10.0
DEAD_TOPIC = "interactions.dlq"


def test_rows_equal_a_clean_replay_and_the_log_holds_each_event_once(rig: Rig) -> None:
    """For any batches, rows equal one-by-one application, and the offline log equals the topic."""
    rig.start_worker()
    events = many_clicks(300, num_users=9)
    for start in range(0, len(events), 50):
        rig.send(*events[start : start + 50])
    users = sorted({event.user_id for event in events})
    expected = clean_replay(rig.broker)

    wait_for(lambda: rig.rows(*users) == expected, what="rows equal the replay")
    rig.stop_worker()

    assert sorted(rig.logged()) == in_topic(rig.broker)
    assert rig.metric("tailrace_stream_applied_total") == 300
    assert rig.metric("tailrace_stream_skipped_total", reason="duplicate_event") == len(events) - 300
    assert rig.metric("tailrace_event_to_visible_seconds_count") > 0


async def test_accepted_event_is_seen_by_the_next_read(rig: Rig) -> None:
    """Recorded events are soon visible to requests, and in popularity."""
    publish_bundle(rig.settings.bundle_root, "v1")
    rig.start_worker()
    reader = FeatureReader(rig.features, num_partitions=4)
    await asyncio.to_thread(rig.send, click(1, event_time_ms=time.time_ns() // 1_000_000))

    seen = await until_answer(lambda: reader.read("u", "v1", TIMEOUT_S), lambda features: features.num_events == 1)
    popular = await until_answer(lambda: reader.read_popular(TIMEOUT_S), lambda row: bool(row.weights))
    await reader.close()

    assert seen.history_item_ids == ("i1",)
    assert [item_id for item_id, _ in popular.weights] == ["i1"]


def test_poison_is_dead_lettered_and_lag_falls_to_zero(rig: Rig) -> None:
    """Unparsable records go to the dead-letter topic unchanged, with the reason; later records are applied."""
    foreign = click(3)
    poison: list[tuple[bytes | None, bytes]] = [
        (b"u", b"\xff\xfe not json"),
        (b"u", b'{"user_id":"u","surprise":1}'),
        (b"someone else", foreign.encode()),
        (None, b"[" * 100_000),
        (b"u", click(4, event_time_ms=7_258_118_400_000).encode()),
    ]
    rig.start_worker()
    rig.send(click(1), *poison, click(2))

    wait_for(lambda: rig.metric("tailrace_stream_dead_lettered_total") == len(poison), what="dead letters")
    wait_for(lambda: rig.rows("u") and rig.rows("u")["u"].item_ids == ("i1", "i2"), what="good events")
    wait_for(lambda: rig.lags() == [0.0] * 4, what="lag")
    letters = {record.value: dict(record.headers) for _, record in read_topic(rig.broker, DEAD_TOPIC)}

    assert set(letters) == {value for _, value in poison}
    assert b"surprise" in letters[poison[1][1]]["reason"]
    assert b"key" in letters[poison[2][1]]["reason"]
    assert all(headers["topic"] == TOPIC.encode() and headers["offset"].isdigit() for headers in letters.values())


def test_events_wait_while_the_store_is_unavailable(rig: Rig, valkey: Server) -> None:
    """While Redis is stopped, events are neither logged nor committed, and count as lag; then each is applied once."""
    rig.start_worker()
    rig.send(click(1))
    wait_for(lambda: rig.rows("u"), what="first event")
    valkey.kill()

    for number in range(2, 12):
        rig.send(click(number))
    wait_for(lambda: sum(lag or 0 for lag in rig.lags()) == 10, what="lag that counts what waits")
    logged_meanwhile = len(rig.logged())
    valkey.start()
    wait_for(lambda: "u" in rig.rows("u") and rig.rows("u")["u"].num_events == 11, what="late events")

    assert logged_meanwhile <= 1
    assert rig.rows("u") == clean_replay(rig.broker)


def test_a_misplaced_record_of_any_size_stops_nothing(rig: Rig) -> None:
    """Oversized values and headers on a wrong partition become dead letters; the next event is applied."""
    rig.start_worker()
    rig.send_to(0, click(1, "u"), padding=b" " * 1_100_000)
    rig.send_to(0, click(2, "u"), headers=[("tracestate", b"x" * 1_100_000)])

    rig.send_to(0, click(3, "u"))

    wait_for(lambda: rig.rows("u") and rig.rows("u")["u"].item_ids == ("i3",), what="the event behind them")
    wait_for(lambda: rig.metric("tailrace_stream_dead_lettered_total") == 2, what="dead letters")
    wait_for(lambda: rig.lags() == [0.0] * 4, what="lag")
    letters = [dict(record.headers) for _, record in read_topic(rig.broker, DEAD_TOPIC)]
    assert sorted((letter["offset"], letter["reason"].split(b":")[0]) for letter in letters) == [
        (b"0", b"value"),
        (b"1", b"headers"),
    ]


def test_events_wait_while_the_disk_is_full(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events are applied until the log's buffer is full; then polling pauses while heartbeats and leases continue.

    No offset is committed meanwhile. Once the disk has room, all events are logged and applied once, also those whose
    worker ended.
    """
    disk = FullDisk(monkeypatch)
    rig.start_worker(replace(QUICK, max_pending_events=50))
    events = many_clicks(150, num_users=1)
    rig.send(*events)
    wait_for(lambda: rig.metric("tailrace_stream_log_failures_total", step="append") > 2, what="refusals")
    wait_for(lambda: 50 <= applied(rig) < len(events) and disk.num_refused > 5, what="a pause")
    at_rest, beat_s = applied(rig), rig.settings.worker_heartbeat.stat().st_mtime
    wait_for(lambda: rig.settings.worker_heartbeat.stat().st_mtime > beat_s, what="a heartbeat")
    wait_for(lambda: sum(lag or 0 for lag in rig.lags()) > 0, what="lag")

    assert rig.logged() == []
    assert applied(rig) == at_rest
    rig.stop_worker()
    rig.start_worker(replace(QUICK, max_pending_events=50))
    disk.has_room = True
    expected = clean_replay(rig.broker)
    wait_for(lambda: rig.rows(*expected) == expected, what="all applied")
    rig.stop_worker()
    assert sorted(rig.logged()) == in_topic(rig.broker)


def applied(rig: Rig) -> float:
    """Return how many events the worker has taken, applied or not."""
    return rig.metric("tailrace_stream_applied_total") + rig.metric(
        "tailrace_stream_skipped_total", reason="duplicate_event"
    )


def test_a_recreated_topic_is_read_from_its_start(rig: Rig) -> None:
    """If the broker restarts without its topics, new events extend the old rows, and no event is skipped."""
    rig.start_worker()
    rig.send(*(click(number) for number in range(5)))
    wait_for(lambda: rig.rows("u") and rig.rows("u")["u"].num_events == 5, what="first life")
    first_life = rig.rows("u")["u"].position.topic_id

    rig.broker.kill()
    rig.broker.start()
    rig.send(*(click(number) for number in range(5, 12)))
    wait_for(lambda: rig.rows("u")["u"].num_events == 12, what="second life")
    rig.stop_worker()

    row = rig.rows("u")["u"]
    assert row.item_ids == tuple(f"i{number}" for number in range(12))
    assert row.position.topic_id != first_life
    assert sorted(event_id for event_id, _, _ in rig.logged()) == sorted(f"e{number}" for number in range(12))


def test_killed_worker_leaves_what_a_clean_replay_gives(rig: Rig) -> None:
    """SIGKILL after a write, then a normal worker, gives the rows and offline log of an undisturbed run.

    test_recovery.py interrupts a worker at every point, in one process.
    """
    rig.send(*many_clicks(120, num_users=5))
    expected, sent = clean_replay(rig.broker), in_topic(rig.broker)
    environment = os.environ | rig.settings.as_environment()
    killed = subprocess.run(
        [sys.executable, "-m", "tests.support.stream.interrupted_worker", "after_write", "3"],
        env=environment,
        timeout=300,
        check=False,
    )

    rig.start_worker()
    wait_for(lambda: len(rig.logged()) >= len(sent), what="every partition taken over and logged")
    rig.stop_worker()

    assert rig.rows(*expected) == expected
    assert killed.returncode == -signal.SIGKILL
    assert sorted(rig.logged()) == sent


def test_sigterm_ends_the_worker_after_a_checkpoint(rig: Rig) -> None:
    """`python -m services.stream` ends by itself on SIGTERM, and everything applied is in the offline log."""
    rig.send(*(click(number) for number in range(10)))
    environment = os.environ | rig.settings.as_environment()
    worker = subprocess.Popen([sys.executable, "-m", "services.stream"], env=environment)
    wait_for(lambda: rig.rows("u") and rig.rows("u")["u"].num_events == 10, 300, what="events applied")

    worker.terminate()

    assert worker.wait(60) == 0
    assert len(rig.logged()) == 10
