"""Impressions with a real broker, Valkey and worker: written once, remembered by user, reset by the user's events."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest
from kafka import KafkaProducer

from services.contracts.events import Impression
from services.features.reader import FeatureReader
from services.features.shown import ShownWriter
from services.settings.settings import inherited_environment
from services.stream.impressions.memory import MAX_SHOWN_ITEMS
from services.stream.log.kinds import IMPRESSIONS
from services.stream.log.offline_log import OfflineLog
from tests.support.stream.stream_rig import Rig, click
from tests.support.training.bundles import publish_bundle
from tests.support.wait import until_answer, wait_for


def impression(number: int, user_id: str | None = "u", items: tuple[str, ...] = ("a", "b")) -> Impression:
    return Impression(
        request_id=f"r{number}",
        user_id=user_id,
        shown_time_ms=time.time_ns() // 1_000_000,
        item_ids=items,
        tier="student",
        reason="short_history",
        bundle_version="v1",
        newest_event_time_ms=None,
        history_len=0,
        history_digest="0",
    )


def show(rig: Rig, *impressions: Impression) -> None:
    """Produce impressions as a gateway does."""
    producer = KafkaProducer(bootstrap_servers=rig.settings.kafka_bootstrap, max_block_ms=10_000)
    for receipt in [
        producer.send("impressions", key=impression.key, value=impression.encode()) for impression in impressions
    ]:
        receipt.get(10)
    producer.close()


def landed(rig: Rig) -> list[str]:
    """Return the request IDs in the offline log of impressions."""
    log = OfflineLog(rig.settings.offline_log_dir, kind=IMPRESSIONS)
    return [logged.impression.request_id for partition in range(4) for logged in log.read(partition)]


async def test_what_was_shown_is_in_the_same_read_until_the_user_acts_on_it(rig: Rig) -> None:
    """Features have counts and times; a click removes only its item; visitors' impressions are written too."""
    publish_bundle(rig.settings.bundle_root, "v1")
    rig.start_worker()
    reader = FeatureReader(rig.features, num_partitions=4)
    show(rig, impression(1), impression(2, items=("b", "c")), impression(3, None))
    seen = await until_answer(lambda: reader.read("u", "v1", 10.0), lambda features: features.shown.get("b") == 2)
    rig.send(click(1, item_id="b"), click(2, item_id="z"))
    after = await until_answer(lambda: reader.read("u", "v1", 10.0), lambda features: features.num_events == 2)
    await reader.close()
    wait_for(lambda: len(landed(rig)) == 3, what="the log")

    assert seen.shown == {"a": 1, "b": 2, "c": 1}
    assert all(abs(time.time() - last_s) < 60 for last_s in seen.shown_times_s.values())
    assert after.shown == {"a": 1, "c": 1}
    assert sorted(landed(rig)) == ["r1", "r2", "r3"]


def test_unreadable_impressions_are_set_aside(rig: Rig) -> None:
    """Invalid bytes, lone surrogates and numbers out of range do not block later impressions."""
    rig.start_worker()
    producer = KafkaProducer(bootstrap_servers=rig.settings.kafka_bootstrap, max_block_ms=10_000)
    good = impression(1).encode()
    for value in (
        b"\xff",
        b"{}",
        good.replace(b'"v1"', b'"\\ud800"'),
        good.replace(b'"history_len":0', b'"history_len":1e30'),
    ):
        producer.send("impressions", key=b"u", value=value).get(10)
    producer.close()
    show(rig, impression(2))

    wait_for(lambda: landed(rig) == ["r2"], what="the one behind them")
    assert rig.metric("tailrace_stream_dead_lettered_total") == 4


@pytest.mark.parametrize("num_lives", [3, pytest.param(5, marks=pytest.mark.grid)])
def test_each_lands_and_counts_once_however_often_the_worker_is_killed(num_lives: int, rig: Rig) -> None:
    """Workers killed at any moment write every impression once, and the counts match."""
    draw = random.Random(3)
    environment = {**inherited_environment(), **rig.settings.as_environment()}
    number = 0
    for _ in range(num_lives):
        worker = subprocess.Popen([sys.executable, "-m", "services.stream"], env=environment)
        for _ in range(6):
            batch = [impression(number + at, f"u{(number + at) % 3}", (f"i{(number + at) % 7}",)) for at in range(10)]
            number += len(batch)
            show(rig, *batch)
            time.sleep(draw.random() / 2)
        time.sleep(1 + 4 * draw.random())
        os.kill(worker.pid, signal.SIGKILL)
        worker.wait()
    rig.start_worker()
    wait_for(lambda: len(landed(rig)) >= number, 60.0, "all impressions")
    rig.stop_worker()

    assert sorted(landed(rig)) == sorted(f"r{at}" for at in range(number))
    rows = ShownWriter(rig.features).read(["u0", "u1", "u2"])
    for user, row in rows.items():
        expected = Counter(f"i{at % 7}" for at in range(number) if f"u{at % 3}" == user)
        assert dict(zip(row.item_ids, row.counts, strict=True)) == dict(expected)
    assert len(rows) == 3
    assert max(len(row.item_ids) for row in rows.values()) <= MAX_SHOWN_ITEMS
