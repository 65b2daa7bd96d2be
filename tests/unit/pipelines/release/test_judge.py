"""The analysis of a name on a real store: its moves, and a person's changes made while it reads the topics."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from models.registry.canary import CanaryStage
from models.registry.store import BundleStore
from pipelines.release.decision import Act
from pipelines.release.judge import ReleaseJudge
from pipelines.release.topics import Batch
from services.contracts.experiments import place_of
from services.observability.metrics import ReleaseMetrics
from tests.unit.pipelines.release.test_counts import shown

NOW_MS = 1_900_000_000_000


class Reading:
    """A topic with a list of the candidate that runs a callback during the read."""

    def __init__(self, happens: Callable[[], object]) -> None:
        self.happens = happens

    def read(self) -> Iterator[Batch]:
        """Yield the list."""
        self.happens()
        yield [shown(1, bundle_version="new")], []

    def close(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize(("stops", "live"), [(False, "new"), (True, "old")])
def test_a_stop_while_the_topics_are_read_is_kept(tmp_path: Path, stops: bool, live: str) -> None:
    """In the last stage the candidate is promoted, unless a person stopped the release during the analysis."""
    store = BundleStore(tmp_path / "bundles")
    for version in ("old", "new"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "student.onnx").write_text(version)
        store.publish(tmp_path / version, version, {})
    store.promote("old")
    store.release("new", (CanaryStage(0.5, 0.0), CanaryStage(1.0, 0.0)), 0)
    store.move_canary("new", 1, 1, 1)
    reading = Reading(lambda: store.end_canary("new", by="ann") if stops else None)
    judge = ReleaseJudge(store, lambda _since_ms: reading, ReleaseMetrics(CollectorRegistry()), 0)

    judge.look(NOW_MS)

    assert (store.live_version(), store.record().canary) == (live, None)


class Slower:
    """A topic with a list of each of 2,000 users, which the candidate answers at four times the live latency."""

    def __init__(self, store: BundleStore, since_ms: int) -> None:
        self.canary = store.record().canary
        self.since_ms = since_ms

    def read(self) -> Iterator[Batch]:
        """Yield the lists."""
        assert self.canary is not None
        lists = []
        for number in range(2_000):
            user_id = f"u{number}"
            is_new = place_of(self.canary.salt, user_id) < 0.5
            lists.append(
                shown(
                    number,
                    user_id=user_id,
                    shown_time_ms=self.since_ms + number,
                    bundle_version="new" if is_new else "live",
                    elapsed_ms=(40.0 if is_new else 10.0) + number % 3,
                )
            )
        yield lists, []

    def close(self) -> None:
        """Do nothing."""


class Everyone:
    """A topic with a list of each of 200 users by the candidate."""

    def __init__(self, since_ms: int) -> None:
        self.since_ms = since_ms

    def read(self) -> Iterator[Batch]:
        """Yield the lists."""
        yield (
            [shown(n, user_id=f"u{n}", shown_time_ms=self.since_ms + n, bundle_version="new") for n in range(200)],
            [],
        )

    def close(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize("lost", ["nothing", "the live version's descent", "the candidate's folder"])
def test_a_worse_candidate_loses_its_users(tmp_path: Path, lost: str) -> None:
    """The release ends if the live version was made from the candidate, or its folder is missing, too."""
    store = BundleStore(tmp_path / "bundles")
    is_parent = lost == "the live version's descent"
    for version, manifest in (("new", {}), ("live", {"lineage": {"optimised_from": "new"}} if is_parent else {})):
        (tmp_path / version).mkdir()
        (tmp_path / version / "student.onnx").write_text(version)
        store.publish(tmp_path / version, version, manifest)
    store.promote("live")
    since_ms = NOW_MS - 3_600_000
    store.release("new", (CanaryStage(0.5, 0.0), CanaryStage(1.0, 0.0)), since_ms)
    if lost == "the candidate's folder":
        shutil.rmtree(tmp_path / "bundles" / "new")
    metrics = ReleaseMetrics(CollectorRegistry())
    judge = ReleaseJudge(store, lambda start_ms: Slower(store, start_ms), metrics, 0)

    decision = judge.look(NOW_MS)

    record = store.record()
    assert decision is not None
    assert decision.act is Act.WITHDRAW
    assert (record.live, record.canary, list(record.withdrawn)) == ("live", None, [] if is_parent else ["new"])
    assert decision.reason in record.history[-1].note


@pytest.mark.parametrize("lost", ["a copy is withdrawn", "the candidate's folder"])
def test_a_release_whose_promotion_is_refused_ends(tmp_path: Path, lost: str) -> None:
    """The live version gets its users back, and the history says why."""
    store = BundleStore(tmp_path / "bundles")
    for version, text in (("live", "live"), ("new", "new"), ("copy", "new")):
        (tmp_path / version).mkdir()
        (tmp_path / version / "student.onnx").write_text(text)
        store.publish(tmp_path / version, version, {})
    store.promote("live")
    since_ms = NOW_MS - 3_600_000
    store.release("new", (CanaryStage(0.5, 0.0), CanaryStage(1.0, 0.0)), since_ms)
    store.move_canary("new", 1, since_ms, since_ms)
    canary = store.record().canary
    if lost == "the candidate's folder":
        shutil.rmtree(tmp_path / "bundles" / "new")
    else:
        store.withdraw("copy", reason="bad data")
        store._change(lambda record: replace(record, canary=canary))  # as an earlier release of Tailrace left it
    judge = ReleaseJudge(store, Everyone, ReleaseMetrics(CollectorRegistry()), 0)

    decision = judge.look(NOW_MS)

    record = store.record()
    assert decision is not None
    assert decision.act is Act.PROMOTE
    assert (record.live, record.canary, "new" in record.withdrawn) == ("live", None, False)
    assert record.history[-1].note.startswith("new: not promoted, since ")
    assert ("bad data" in record.history[-1].note) == (lost == "a copy is withdrawn")
