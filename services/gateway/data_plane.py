"""The data plane: everything that a door can call, behind one object.

Doors parse, call the data plane and format. It knows no transport. `build.py` composes it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from services.contracts.answers import BundleInfo, CanaryInfo
from services.contracts.events import EventBody, RecordEventsResponse
from services.contracts.tenant import scoped
from services.gateway.assign import Assign
from services.gateway.batch import RecommendBatch, Refused
from services.gateway.events.items import ItemOperations
from services.gateway.events.record import RecordEvents, once_each
from services.gateway.lifecycle import BackgroundPart, Lifecycle, Thread
from services.gateway.overload.long_work import LongWork
from services.gateway.overload.monitor import EdgeWatch, LoadMonitor
from services.gateway.preview import PreviewSurface
from services.gateway.recommend import Recommend
from services.gateway.records.answer import RefusalRecord, RefusalSink
from services.gateway.records.batches import AnswerBatches
from services.gateway.records.explanations import Explanations
from services.gateway.records.metrics import AnswerMetrics
from services.gateway.request.names import Names
from services.gateway.request.pages import Pages
from services.gateway.shadow import Shadow
from services.gateway.surfaces.editor import SurfacesEditor
from services.gateway.surfaces.experiments import RunningExperiments
from services.gateway.surfaces.surfaces import Surfaces
from services.gateway.text.metrics import TextReport
from services.gateway.text.tier import TextTier
from services.gateway.tiers.popular import PopularTier
from services.gateway.tiers.similar import SimilarTier
from services.gateway.users.erase import EraseUsers
from services.gateway.users.export import ExportUser
from services.gateway.wishes.wishes import Wishes
from services.items.live_items import Knowledge

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """The operations that doors call. `recommend_batch` is composed with the recorder of refused requests."""

    recommend: Recommend
    recommend_batch: Callable[[Refused], RecommendBatch]
    record: RecordEvents
    items: ItemOperations
    preview: PreviewSurface
    assign: Assign
    users: EraseUsers
    export: ExportUser


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundles:
    """The live bundles by name, the files and keys that select and page their answers, and the readers of wishes."""

    names: Names
    surfaces: Surfaces
    experiments: RunningExperiments
    pages: Pages
    wishes: Wishes


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """The tiers that doors describe. `text` is None if the stack serves no text."""

    popular: PopularTier
    similar: SimilarTier
    text: TextTier | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """The receivers of records of answers and refusals, and the second rankings."""

    metrics: AnswerMetrics
    batches: AnswerBatches
    explanations: Explanations
    refusal_sinks: Sequence[RefusalSink]
    text_report: TextReport
    shadow: Shadow


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """The monotonic clock and the Unix clock, in seconds."""

    monotonic: Callable[[], float]
    wall: Callable[[], float]


class DataPlane:
    """Recommends, records events, and reports the live bundles and readiness."""

    def __init__(
        self,
        operations: Operations,
        bundles: Bundles,
        tiers: Tiers,
        records: Records,
        load: LoadMonitor,
        producers: Sequence[Thread],
        clocks: Clocks,
    ) -> None:
        self.recommend, self.recommend_batch = operations.recommend, operations.recommend_batch(self.recommend_refused)
        self.users, self.export, self.items = operations.users, operations.export, operations.items
        self.preview, self.assign, self._record = operations.preview, operations.assign, operations.record
        self.names, self.experiments, self._surfaces = bundles.names, bundles.experiments, bundles.surfaces
        self.surfaces_editor = SurfacesEditor(bundles.surfaces)
        self.wishes = bundles.wishes
        self.popular, self.similar, self.text = tiers.popular, tiers.similar, tiers.text
        self.explanations, self.text_report = records.explanations, records.text_report
        self._metrics, self._batches, self._refusal_sinks = records.metrics, records.batches, records.refusal_sinks
        self.load, self._wall_clock = load, clocks.wall
        self.reading, self.edge = LongWork("body"), EdgeWatch(load, clocks.monotonic, clocks.wall)
        self._lifecycle = Lifecycle(
            (
                BackgroundPart.threads("producers", producers),
                BackgroundPart("records", self._batches.stop, self._batches.start),
                BackgroundPart("users", self.users.stop),
                BackgroundPart("names", self.names.stop, self.names.start),
                BackgroundPart("items", self.items.stop, self.items.start),
                BackgroundPart("surfaces", self._surfaces.stop, self._surfaces.start),
                BackgroundPart("experiments", self.experiments.stop, self.experiments.start),
                BackgroundPart("popular", self.popular.stop, self.popular.start),
                BackgroundPart("similar", self.similar.stop, self.similar.start),
                BackgroundPart("wishes", self.wishes.stop, self.wishes.start),
                BackgroundPart("explanations", self.explanations.stop, self.explanations.start),
                BackgroundPart("pages", bundles.pages.stop, bundles.pages.start),
                BackgroundPart("shadow", records.shadow.stop),
                BackgroundPart("load", self.load.stop, self.load.start),
            )
        )

    async def start(self) -> None:
        """Load the bundles, connect the producers and start the background tasks. Call in the serving loop."""
        await self._lifecycle.start()

    async def stop(self) -> None:
        """Stop the background tasks; pending records are flushed for at most two seconds per producer."""
        await self._lifecycle.stop()

    def recommend_refused(self, door: str, code: str, message: str, request_id: str, tenant: str | None) -> None:
        """Record that a tenant's recommendation request, or an unknown caller's, was refused."""
        now_ms = int(self._wall_clock() * 1_000)
        record = RefusalRecord(
            request_id=request_id, door=door, code=code, message=message, now_ms=now_ms, tenant=tenant
        )
        for sink in self._refusal_sinks:
            sink(record)

    async def record(
        self, drafts: Sequence[EventBody], tenant: str, door: str, request_id: str
    ) -> RecordEventsResponse:
        """Record events of a tenant's users; see RecordEvents."""
        sent = await self._record(drafts, tenant)
        events, known = once_each(sent), [live.items for live in self.names.all_loaded_for(tenant)]
        item_ids = [event.item_id for event in events]
        unknown = [item_id for item_id in item_ids if known and not any(items.has(item_id) for items in known)]
        self._batches.flush()  # an event may name an answer whose record waits
        self._metrics.recorded(
            door, [event.request_id and scoped(tenant, event.request_id) for event in events], len(unknown)
        )
        log.info("recorded", request_id=request_id, door=door, num_events=len(events), num_unknown=len(unknown))
        return RecordEventsResponse(
            event_ids=tuple(event.event_id for event in sent),
            unknown_items=tuple(dict.fromkeys(unknown)),
            accepted=len(events),
        )

    @property
    def max_events_per_request(self) -> int:
        return self._record.max_events

    def events_refused(self, door: str, code: str, message: str, request_id: str) -> None:
        """Record that an events request was refused."""
        self._metrics.events_refused(door, code)
        log.info("events_refused", request_id=request_id, door=door, code=code, message=message)

    def take_late_share(self) -> float:
        """Return the fraction (0 to 1) of late answers since the last call."""
        return self._metrics.take_late_share()

    def bundle(self, name: str | None = None) -> BundleInfo:
        """Return the description of a name's live bundle.

        Raises InvalidRequest for an unknown name, DependencyUnavailable before the first bundle is loaded.
        """
        bundles = self.names.of(name)
        live, canary = self.names.current(name), bundles.canary
        share = 0.0 if canary is None else canary.share_at(self._wall_clock() * 1_000)
        return BundleInfo(
            name=bundles.name,
            version=live.version,
            num_items=len(live.catalogue.item_ids),
            code_depth=live.catalogue.depth,
            manifest={key: value for key, value in live.manifest.items() if key != "version"},
            canary=None if canary is None else CanaryInfo(version=canary.version, share=share),
        )

    def is_ready(self) -> bool:
        """Whether at least one name can answer recommendations."""
        return not self.missing

    @property
    def missing(self) -> str:
        """The missing state that blocks recommendations; empty if none."""
        if self.items.knowledge is Knowledge.NONE:
            return "no states of items yet"
        return "" if self.names.is_loaded else "no bundle yet"

    @property
    def degraded(self) -> tuple[str, ...]:
        """The degraded modes of current answers, for readiness; the metrics report the same."""
        modes = {
            "items as of the snapshot": self.items.knowledge is Knowledge.SNAPSHOT,
            "surfaces outdated": self._surfaces.is_outdated,
            "experiments outdated": self.experiments.is_outdated,
        }
        return tuple(mode for mode, is_on in modes.items() if is_on)
