"""Canary analysis of one name: reads the records since its stage began, analyses, and moves the release.

A restart reads the records again. While the broker is unavailable, the analysis decides nothing. While the store is
unavailable, decisions are not applied; the next look decides again.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import structlog

from models.registry.canary import Canary
from models.registry.name_record import NameRecord
from models.registry.store import BundleStore
from pipelines.experiments.verdict import Outcome
from pipelines.release.counts import StageCounts
from pipelines.release.decision import Act, Decision, decide
from pipelines.release.topics import Batch
from services.errors import BundleMoved, BundleNotFound, BundleWithdrawn, CanaryError
from services.observability.metrics import ReleaseMetrics

log = structlog.get_logger()

BY = "release"
"""Actor under which the analysis moves a name."""
_MOVED_MEANWHILE = (CanaryError, BundleMoved)
_VERDICTS = {Outcome.WORSE: -1, Outcome.CONTINUE: 0, Outcome.UNDECIDED: 0, Outcome.NO_WORSE: 1, Outcome.BETTER: 2}


class RecordReader(Protocol):
    """Reads the topics from a time on; see `pipelines.release.topics.ReleaseTopicReader`."""

    def read(self) -> Iterator[Batch]:
        """Yield records not returned yet. Raises DependencyUnavailable."""
        ...

    def close(self) -> None: ...


@dataclass(slots=True)
class _Stage:
    """State of the stage under analysis."""

    canary: Canary
    live: str
    counts: StageCounts
    reader: RecordReader


class ReleaseJudge:
    """Analyses the canaries of one name in sequence. Used from one thread."""

    def __init__(
        self,
        store: BundleStore,
        open_reader: Callable[[int], RecordReader],
        metrics: ReleaseMetrics,
        lead_ms: int,
        beat: Callable[[], object] = lambda: None,
    ) -> None:
        """Keep the parts without reading.

        Args:
            store: The bundles, under the name.
            open_reader: Makes a reader of the topics from a time (Unix ms) on.
            metrics: Metrics of this process.
            lead_ms: How long before a stage begins its record is written, so that all processes have the version by
                then.
            beat: Called during the work.
        """
        self._store = store
        self._open_reader = open_reader
        self._metrics = metrics
        self._lead_ms = lead_ms
        self._beat = beat
        self._stage: _Stage | None = None

    def look(self, now_ms: int) -> Decision | None:
        """Look once, and act. Return the decision; None without a canary.

        Raises BundleCorrupt or StoreUnavailable, and DependencyUnavailable: counts are kept, and the next look
        continues.
        """
        record = self._store.record()
        canary, live = record.canary, record.live
        if canary is None or live is None:
            self._end()
            return None
        self._metrics.share.labels(self._store.name, canary.version).set(canary.share_at(now_ms))
        self._metrics.rolled_back.labels(self._store.name, canary.version).inc(0)  # else its first increase is unseen
        if now_ms < canary.since_ms:
            return None
        stage = self._stage_of(canary, live)
        for impressions, interactions in stage.reader.read():
            stage.counts.add(impressions, interactions)
            self._beat()
        decision = decide(canary, stage.counts.look(now_ms), now_ms)
        self._measure(canary, decision)
        self._act(canary, record, decision, now_ms)
        return decision

    def close(self) -> None:
        if self._stage is not None:
            self._stage.reader.close()
            self._stage = None

    def _stage_of(self, canary: Canary, live: str) -> _Stage:
        """Return the state of this stage; a new stage begins without counts."""
        before = self._stage
        if before is None or _identity(before.canary, before.live) != _identity(canary, live):
            self._end()
            self._stage = before = _Stage(
                canary, live, StageCounts(self._store.name, canary, live), self._open_reader(canary.since_ms)
            )
        return before

    def _end(self) -> None:
        """Drop the state of an ended stage."""
        if self._stage is not None:
            self._metrics.share.labels(self._store.name, self._stage.canary.version).set(0)
            self._metrics.lost_users.labels(self._store.name, self._stage.canary.version).set(0)
        self.close()

    def _measure(self, canary: Canary, decision: Decision) -> None:
        labels = self._store.name, canary.version
        self._metrics.looks.labels(*labels).inc()
        self._metrics.lost_users.labels(*labels).set(decision.lost_users)
        if decision.verdict is None:
            return
        self._metrics.verdict.labels(*labels).set(_VERDICTS[decision.verdict.outcome])
        for reading in decision.verdict.readings:
            for bound in ("worse_by", "low", "high"):
                self._metrics.guard.labels(*labels, reading.name, bound).set(getattr(reading, bound))

    def _act(self, canary: Canary, record: NameRecord, decision: Decision, now_ms: int) -> None:
        """Apply the decision if the release is still the analysed one; a person's earlier move wins.

        Raises StoreUnavailable.
        """
        stage = f"stage {canary.stage + 1} of {len(canary.stages)}"
        noted: dict[str, object] = {
            "name": self._store.name,
            "version": canary.version,
            "stage": canary.stage,
            "reason": decision.reason,
        }
        try:
            self._store.report_canary(canary.version, decision.report.encode(), now_ms, release=canary)
            match decision.act:
                case Act.WITHDRAW:
                    self._store.reject_canary(canary, by=BY, reason=f"{stage}: {decision.reason}")
                    self._metrics.rolled_back.labels(self._store.name, canary.version).inc()
                    log.warning("release_rolled_back", **noted)
                case Act.MOVE_ON:
                    self._store.move_canary(
                        canary.version, canary.stage + 1, now_ms + self._lead_ms, now_ms, by=BY, release=canary
                    )
                    log.info("release_moved_on", **noted)
                case Act.PROMOTE:
                    self._promote(canary, record.live, noted)
                case Act.STAY:
                    log.info("release_stays", **noted)
        except _MOVED_MEANWHILE as error:
            log.warning("release_moved_meanwhile", **noted, act=decision.act.value, error=str(error))

    def _promote(self, canary: Canary, live: str | None, noted: dict[str, object]) -> None:
        """Promote the candidate; a release whose candidate may not be promoted ends, without a withdrawal."""
        try:
            self._store.promote(canary.version, live, by=BY, release=canary)
            log.info("release_promoted", **noted)
        except (BundleNotFound, BundleWithdrawn) as error:
            self._store.end_canary(canary.version, by=BY, note=f"not promoted, since {error}", release=canary)
            log.warning("release_ended", **noted, error=str(error))


def _identity(canary: Canary, live: str) -> tuple[object, ...]:
    return *canary.identity, live
