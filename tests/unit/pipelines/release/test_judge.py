"""The analysis of a name on a real store keeps a person's changes made while it reads the topics."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from models.registry.canary import CanaryStage
from models.registry.store import BundleStore
from pipelines.release.judge import ReleaseJudge
from pipelines.release.topics import Batch
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
    store.move_canary("new", 1, 1)
    reading = Reading(lambda: store.end_canary("new", by="ann") if stops else None)
    judge = ReleaseJudge(store, lambda _since_ms: reading, ReleaseMetrics(CollectorRegistry()), 0)

    judge.look(NOW_MS)

    assert (store.live_version(), store.record().canary) == (live, None)
