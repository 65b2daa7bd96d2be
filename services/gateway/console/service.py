"""The results of the console's API: live numbers, users and histories, the live bundle, and the drills.

Knows no transport. The composition root builds it from ports and starts it with the doors.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from services.contracts.message import check_id
from services.gateway.console.samples import MetricSampler
from services.gateway.console.slo import ChartStep, SloStatus, chart_steps, series_for, slo_statuses
from services.gateway.console.users import EventTimes, History, ListedUser, UserDirectory, choose_users, read_history
from services.gateway.drills import Drills, DrillTarget
from services.gateway.request.live_bundle import Live, LiveBundle
from services.observability.objectives import Objectives, load_objectives
from services.residency.report import ResidentModel, resident_models

CHART_S = 120.0
SLO_WINDOW_S = 3_600.0
NUM_USERS = 12
_USERS_KEPT_S = 5.0
_QUALITY_MODELS = ("decoder", "student", "twin", "item_knn", "bigram", "popularity")
"""The models of an evaluation report, in display order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleLive:
    """The live view.

    `slos` cover the last `window_s` seconds; `drills` maps a part to the remaining seconds of its drill.
    """

    window_s: float
    slos: list[SloStatus]
    steps: list[ChartStep]
    drills: dict[DrillTarget, float]
    default_deadline_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelQuality:
    """One evaluated model: hit rate and NDCG at ten, seen items removed; the interval is NDCG's 95 % bootstrap."""

    model: str
    hr_at_10: float
    ndcg_at_10: float
    ndcg_interval: tuple[float, float] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryGain:
    """The LLM's gain over the student's NDCG at ten for histories of `first` to `last` known items, and its use.

    `last` is None for the longest histories; the use is whether the LLM is called.
    """

    first: int
    last: int | None
    num_test_users: int
    llm_minus_student: float
    interval: tuple[float, float]
    calls_llm: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleQuality:
    """A bundle's evaluation report: every model under one protocol."""

    dataset: str
    protocol: str
    num_test_users: int
    student_share: float | None
    rows: tuple[ModelQuality, ...]
    gain: tuple[HistoryGain, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleBundle:
    """The live bundle and its evaluation."""

    version: str
    num_items: int
    code_depth: int
    num_parameters: int | None
    multiply_adds: Mapping[str, int]
    quality: BundleQuality


class ConsoleService:
    """The console's data and its switches. One per process."""

    def __init__(
        self,
        *,
        live: LiveBundle,
        users: UserDirectory,
        event_times: EventTimes,
        sampler: MetricSampler,
        drills: Drills,
        objectives: Objectives,
        read_report: Callable[[str], Mapping[str, Any]],
        scrape: Callable[[], Iterable[Any]],
        default_deadline_ms: int,
        llm_needs_gain: bool,
    ) -> None:
        self._live = live
        self._users = users
        self._event_times = event_times
        self._sampler = sampler
        self._drills = drills
        self._objectives = objectives
        self._read_report = read_report
        self._scrape = scrape
        self._default_deadline_ms = default_deadline_ms
        self._llm_needs_gain = llm_needs_gain
        self._listed: tuple[float, list[ListedUser]] | None = None
        self._bundle: ConsoleBundle | None = None

    async def start(self) -> None:
        """Start sampling metrics and following the drills."""
        await self._drills.start()
        await self._sampler.start()

    async def stop(self) -> None:
        """Stop the background tasks."""
        await self._sampler.stop()
        await self._drills.stop()

    def now(self) -> ConsoleLive:
        """Return the live view; while it is read, metrics are sampled each second."""
        ring = self._sampler.watch()
        counted = ring.window(SLO_WINDOW_S)
        return ConsoleLive(
            window_s=0.0 if counted is None else round(counted.span_s, 1),
            slos=[] if counted is None else slo_statuses(self._objectives, counted),
            steps=chart_steps(ring.steps(CHART_S), time.monotonic()),
            drills=self._drills.remaining_s(),
            default_deadline_ms=self._default_deadline_ms,
        )

    async def users(self) -> list[ListedUser]:
        """Return some users from the store, cached for a few seconds. Raises DependencyUnavailable."""
        now_s = time.monotonic()
        if self._listed is None or now_s - self._listed[0] > _USERS_KEPT_S:
            self._listed = (now_s, await choose_users(self._users, self._live.current().version, NUM_USERS))
        return self._listed[1]

    async def history(self, user_id: str) -> History:
        """Return a user's history with titles. Raises InvalidRequest or DependencyUnavailable."""
        check_id("user_id", user_id)
        return await read_history(self._users, user_id, self._live.current(), self._event_times)

    async def bundle(self) -> ConsoleBundle:
        """Return the live bundle.

        Raises DependencyUnavailable before the first bundle is loaded, BundleError if its report is missing.
        """
        live = self._live.current()
        if self._bundle is None or self._bundle.version != live.version:
            report = await asyncio.to_thread(self._read_report, live.version)
            self._bundle = ConsoleBundle(
                version=live.version,
                num_items=len(live.catalogue.item_ids),
                code_depth=live.catalogue.depth,
                num_parameters=live.manifest.get("num_parameters"),
                multiply_adds=live.manifest.get("multiply_adds", {}),
                quality=_bundle_quality(report, live if self._llm_needs_gain else None),
            )
        return self._bundle

    async def models(self) -> list[ResidentModel]:
        """Return which process of this node has which model in memory."""
        return await asyncio.to_thread(lambda: resident_models(self._scrape()))

    async def switch(self, wanted: Mapping[DrillTarget, bool]) -> dict[DrillTarget, float]:
        """Switch parts off (True) or on; return the remaining seconds of each part that is off."""
        await self._drills.switch(wanted)
        return self._drills.remaining_s()


def build_console(
    *,
    live: LiveBundle,
    users: UserDirectory,
    event_times: EventTimes,
    scrape: Callable[[], Iterable[Any]],
    drills: Drills,
    read_report: Callable[[str], Mapping[str, Any]],
    default_deadline_ms: int,
    llm_needs_gain: bool,
) -> ConsoleService:
    """Build the service with the objectives and a sampler of `scrape`'s output; starts nothing."""
    objectives = load_objectives()
    return ConsoleService(
        live=live,
        users=users,
        event_times=event_times,
        sampler=MetricSampler(scrape, series_for(objectives)),
        drills=drills,
        objectives=objectives,
        read_report=read_report,
        scrape=scrape,
        default_deadline_ms=default_deadline_ms,
        llm_needs_gain=llm_needs_gain,
    )


def _bundle_quality(report: Mapping[str, Any], routed_by: Live | None) -> BundleQuality:
    """Return an evaluation report's tables; skips missing ones.

    `routed_by` is the bundle that decides where the LLM is called; None: everywhere.
    """
    metrics = report.get("metrics", {})
    return BundleQuality(
        dataset=str(report.get("dataset", "")),
        protocol=str(report.get("protocol", "")),
        num_test_users=int(report.get("num_test_users", 0)),
        student_share=report.get("student_share"),
        rows=tuple(_model_quality(model, metrics[model]) for model in _QUALITY_MODELS if model in metrics),
        gain=tuple(_history_gain(row, routed_by) for row in report.get("gain", []) if row.get("history")),
    )


def _history_gain(row: Mapping[str, Any], routed_by: Live | None) -> HistoryGain:
    first, last = row["history"]
    return HistoryGain(
        first=first,
        last=last,
        num_test_users=row["num_cases"],
        llm_minus_student=row["llm_minus_student"],
        interval=(row["low"], row["high"]),
        calls_llm=routed_by is None or routed_by.llm_pays(first),
    )


def _model_quality(model: str, metrics: Mapping[str, Any]) -> ModelQuality:
    interval = metrics.get("ndcg@10_interval")
    return ModelQuality(
        model=model,
        hr_at_10=float(metrics["hr@10"]),
        ndcg_at_10=float(metrics["ndcg@10"]),
        ndcg_interval=None if interval is None else (float(interval[0]), float(interval[1])),
    )
