"""The data plane: everything that a door can ask for, behind one object. Doors parse, call it, and format.

`services.app.build_plane` puts it together once per process, inside the running event loop; `start` begins what runs behind it.
Each part declares the ports that it needs (question.py, popular.py, llm_tier.py, live_bundle.py). Knows no transport.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.gateway.events.record import Draft, RecordEvents
from services.gateway.recommend import Recommend
from services.gateway.records.explaining import Refused
from services.gateway.records.explanations import Explanations
from services.gateway.records.report import Report
from services.gateway.request.load_monitor import LoadWatch
from services.gateway.text.metrics import TextReport
from services.gateway.text.tier import TextTier
from services.gateway.tiers.live_bundle import LiveBundle
from services.gateway.tiers.popular import Popular


class Producer(Protocol):
    """Something with a thread that is started and stopped with the plane."""

    def start(self) -> None:
        """Start the thread. Does not block."""
        ...

    def stop(self) -> None:
        """End the thread; may block for seconds."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleInfo:
    """What callers may know of the live bundle."""

    version: str
    num_items: int
    code_depth: int
    manifest: dict[str, object]


class DataPlane:
    """Recommend, record events, tell of the bundle and of readiness."""

    def __init__(
        self,
        *,
        recommend: Recommend,
        record: RecordEvents,
        live: LiveBundle,
        popular: Popular,
        producers: Sequence[Producer],
        report: Report,
        explanations: Explanations,
        load: LoadWatch,
        text_report: TextReport,
        text: TextTier | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the parts; `text` is absent where no text is served."""
        self.text = text
        self.text_report = text_report
        self.recommend = recommend
        self.report = report
        self.explanations = explanations
        self.clock = clock
        self._record = record
        self._live = live
        self._popular = popular
        self._producers = producers
        self._load = load

    async def start(self) -> None:
        """Load the bundle, connect the producers, and start what runs in the background. Call in the serving loop."""
        for producer in self._producers:
            producer.start()
        await self._live.start()
        await self._popular.start()
        self._load.start()
        await self.explanations.start()

    async def stop(self) -> None:
        """End the background work; records that wait are sent for at most two seconds each."""
        self._load.stop()
        await self._popular.stop()
        await self._live.stop()
        await self.explanations.stop()
        await asyncio.gather(*(asyncio.to_thread(producer.stop) for producer in self._producers))

    def recommend_refused(self, door: str, code: str, message: str, request_id: str) -> None:
        """A request for a recommendation got an error: tell of it, and keep why."""
        self.report.recommend_refused(door, code, message, request_id)
        now_ms = time.time_ns() // 1_000_000
        self.explanations.offer(Refused(request_id=request_id, door=door, code=code, message=message, now_ms=now_ms))

    async def record(self, drafts: Sequence[Draft], door: str, request_id: str) -> tuple[str, ...]:
        """Record events; see RecordEvents. Gives their ids."""
        event_ids = await self._record(drafts)
        self.report.recorded(door, len(event_ids), request_id)
        self.report.attribute([named for draft in drafts if (named := draft.get("request_id"))])
        return event_ids

    @property
    def live(self) -> LiveBundle:
        """The bundle that answers."""
        return self._live

    def bundle(self) -> BundleInfo:
        """Tell of the live bundle. Raises DependencyAway before the first one is loaded."""
        live = self._live.current()
        about = {key: value for key, value in live.manifest.items() if key not in {"version", "files"}}
        return BundleInfo(
            version=live.version,
            num_items=len(live.catalogue.item_ids),
            code_depth=live.catalogue.depth,
            manifest=about,
        )

    def is_ready(self) -> bool:
        """Whether recommendations can be answered."""
        return self._live.is_loaded
