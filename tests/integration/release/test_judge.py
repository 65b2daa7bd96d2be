"""The canary analysis on a real broker and a real store, through kills, repeats, late clicks and outages."""

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from kafka import KafkaProducer

from models.registry.canary import Canary, CanaryStage
from models.registry.release_report import ReleaseReport
from models.registry.store import BundleStore
from services.settings.settings import Settings, inherited_environment
from tests.support.servers import Server
from tests.support.stream.release_records import Traffic, make_topics, recorded, send
from tests.support.wait import wait_for

HALF = (CanaryStage(0.5, 1.0),)
EQUAL = Traffic(seconds=240)
FAILING = Traffic(seconds=240, failing=0.01)
LENIENT = {"clicks": 0.5}
"""Four minutes of traffic do not resolve an equal click rate more precisely."""


@dataclass
class Scene:
    """A store with the versions `old` (live) and `new`, a broker, and the analysis in a separate process."""

    settings: Settings
    store: BundleStore
    broker: Server
    log: Path
    process: "subprocess.Popen[bytes] | None" = None

    def start(self) -> None:
        """Start the judge."""
        environment = inherited_environment() | self.settings.as_environment()
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pipelines.release"], env=environment, stdout=log, stderr=log
            )

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End the analysis process; return its exit status."""
        if self.process is None:
            return 0
        self.process.send_signal(number)
        status, self.process = self.process.wait(30), None
        return status

    def release(self, stages: tuple[CanaryStage, ...] = HALF, ago_s: int = 1_000, **options: object) -> Canary:
        """Begin a release of `new` in the past, so that its records can be written at once."""
        since_ms = time.time_ns() // 1_000_000 - ago_s * 1_000
        return self.store.release("new", stages, since_ms, by="ann", **options)  # type: ignore[arg-type]

    @property
    def report(self) -> ReleaseReport:
        """Return the record's report on the canary; empty before the first look."""
        canary = self.store.record().canary
        report = None if canary is None else ReleaseReport.decode(canary.report)
        return report or ReleaseReport(reason="")

    def reported(self) -> ReleaseReport:
        """Wait for a look at the topics' current records; return its findings."""
        canary = self.store.record().canary
        before = canary.looked_ms if canary is not None else 0

        def looked() -> bool:
            canary = self.store.record().canary
            return canary is None or (canary.looked_ms or 0) > (before or 0)

        wait_for(looked, what="a look")
        return self.report


@pytest.fixture
def scene(tmp_path: Path, broker: Server) -> Iterator[Scene]:
    """Everything except the analysis and the release is started."""
    settings = Settings(
        state_dir=tmp_path / "state",
        kafka_bootstrap=broker.address,
        release_look_s=0.3,
        release_lead_s=0.5,
        topic_partitions=2,
    )
    store = BundleStore.of(settings)
    for version in ("old", "new"):
        source = tmp_path / version
        source.mkdir()
        (source / "student.onnx").write_text(version)
        store.publish(source, version, {})
    store.promote("old", by="ann")
    make_topics(settings)
    scene = Scene(settings, store, broker, tmp_path / "judge.log")
    yield scene
    scene.stop(signal.SIGKILL)


def test_an_equal_candidate_goes_through_its_stages_and_live(scene: Scene) -> None:
    """Each stage begins a lead time after its record with its own impressions; the last promotes the candidate."""
    canary = scene.release((CanaryStage(0.3, 1.0), CanaryStage(0.5, 1.0)), budgets=LENIENT)
    send(scene.settings, *recorded(EQUAL, canary, "old", seed=1))
    began_ms = time.time_ns() // 1_000_000
    scene.start()

    def moved() -> Canary | None:
        canary = scene.store.record().canary
        return canary if canary is not None and canary.stage == 1 else None

    second = wait_for(moved, what="the second stage")
    assert second.since_ms > began_ms
    now_on = recorded(Traffic(seconds=240, rate=200), second, "old", seed=2)
    send(scene.settings, *now_on)
    wait_for(lambda: scene.store.live_version() == "new", what="the candidate live")

    record = scene.store.record()
    assert record.canary is None
    assert [(move.act, move.by) for move in record.history[-3:]] == [
        ("release", "ann"),
        ("share", "release"),
        ("promote", "release"),
    ]


def test_a_failing_candidate_is_rolled_back_with_the_reason(scene: Scene) -> None:
    """A candidate that fails 1 % of its calls is withdrawn, with the guard and its interval in the record."""
    canary = scene.release()
    send(scene.settings, *recorded(FAILING, canary, "old", seed=1))
    scene.start()
    wait_for(lambda: scene.store.record().canary is None, what="the end of the release")

    withdrawn = scene.store.withdrawals()["new"]
    assert scene.store.live_version() == "old"
    assert (withdrawn.by, "errors worse" in withdrawn.reason) == ("release", True)


def test_fewer_clicks_are_found_across_a_kill_and_whatever_is_repeated(scene: Scene) -> None:
    """After SIGKILL between looks, repeated records and late clicks, the counts equal the counts of one pass."""
    canary = scene.release((CanaryStage(0.5, 10_000.0),), budgets={"clicks": 0.9})
    lists, clicks = recorded(Traffic(seconds=600, click_factor=0.7), canary, "old", seed=1)
    send(scene.settings, lists, clicks[: len(clicks) // 2])
    scene.start()
    assert scene.reported().lists != (0, 0)
    assert scene.stop(signal.SIGKILL) == -signal.SIGKILL
    send(scene.settings, lists, clicks)
    scene.start()
    wait_for(lambda: sum(scene.reported().users), what="a look")
    once = wait_for(lambda: report if sum((report := scene.reported()).lists) == len(lists) else None)
    scene.stop(signal.SIGKILL)
    scene.start()
    again = scene.reported()

    guards = [{guard.name: guard for guard in report.guards} for report in (once, again)]
    assert guards[0]["clicks"] == guards[1]["clicks"]
    assert (guards[0]["clicks"].worse_by or 0) > 0.15
    assert again.lists == once.lists


def test_records_that_cannot_be_read_are_stepped_over(scene: Scene) -> None:
    """Foreign records in both topics do not block the analysis."""
    canary = scene.release()
    producer = KafkaProducer(bootstrap_servers=scene.broker.address)
    for topic in ("impressions", "interactions"):
        for value in (b"torn{", b"\xff", b"[]", b'{"item_ids": 3}'):
            producer.send(topic, value=value).get(10)
    producer.close()
    send(scene.settings, *recorded(FAILING, canary, "old", seed=1))
    scene.start()

    wait_for(lambda: "new" in scene.store.withdrawals(), what="the verdict")


def test_without_the_store_nothing_moves_and_the_verdict_comes_when_it_is_back(scene: Scene) -> None:
    """The analysis survives an unreadable store record, and resumes when the record is readable."""
    canary = scene.release()
    hidden = scene.settings.bundle_root.with_name("hidden")
    scene.start()
    scene.reported()
    shutil.move(scene.settings.bundle_root / "names", hidden)
    scene.settings.bundle_root.joinpath("names").write_text("not a folder")
    send(scene.settings, *recorded(FAILING, canary, "old", seed=1))
    beat = scene.settings.release_heartbeat
    before = beat.stat().st_mtime
    wait_for(lambda: beat.stat().st_mtime > before + 2, what="a judge that lives on")
    (scene.settings.bundle_root / "names").unlink()
    shutil.move(hidden, scene.settings.bundle_root / "names")

    wait_for(lambda: "new" in scene.store.withdrawals(), what="the verdict")


def test_without_the_broker_nothing_is_promoted(scene: Scene) -> None:
    """A stage past its time stays while the broker is lost, and is then decided by the broker's records."""
    canary = scene.release(budgets=LENIENT)
    scene.broker.kill()
    scene.start()
    beat = scene.settings.release_heartbeat
    wait_for(beat.exists, what="the judge")
    before = beat.stat().st_mtime
    wait_for(lambda: beat.stat().st_mtime > before + 3, what="a judge that lives on")
    assert scene.store.record().canary == canary

    scene.broker.start()
    make_topics(scene.settings)
    send(scene.settings, *recorded(EQUAL, canary, "old", seed=1))
    wait_for(lambda: scene.store.live_version() == "new", what="the candidate live")


def test_a_release_by_hand_stays_and_says_how_it_goes_on(scene: Scene) -> None:
    """After a passing analysis, a manual release waits for a person."""
    canary = scene.release(by_hand=True, budgets=LENIENT)
    send(scene.settings, *recorded(EQUAL, canary, "old", seed=1))
    scene.start()
    report = wait_for(lambda: report if (report := scene.reported()).outcome == "no worse" else None)

    assert "tailrace release --next" in report.reason
    assert scene.store.live_version() == "old"


def test_a_release_that_nobody_saw_stays_and_says_what_it_lacks(scene: Scene) -> None:
    """Without impressions a stage stays after its time is over; the record says so."""
    scene.release()
    scene.start()

    assert "no user has received a list of it yet" in scene.reported().reason
    assert scene.store.record().canary is not None
