"""`python -m pipelines.release`: analyses each name's canary once a minute until SIGTERM or Ctrl-C.

It also starts the addition of new items. One process is enough; two do no harm. While no name has a canary, the process
only reads one small record per name: counting and analysis are imported when the first canary begins.
"""

import signal
import threading
import time
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING

import structlog
from prometheus_client import REGISTRY

from models.registry.store import BundleStore
from pipelines.release.additions import Additions
from services.errors import TailraceError
from services.observability.log_lines import configure_logging
from services.observability.metrics import ProcessMetrics, ReleaseMetrics
from services.settings.settings import Settings, ending_with_error, load_settings

if TYPE_CHECKING:
    from pipelines.release.judge import ReleaseJudge

log = structlog.get_logger()

_BEAT_EVERY_S = 1.0


@ending_with_error()
def main() -> None:
    """Analyse until a signal arrives. Bad settings exit with their error."""
    settings = load_settings()
    configure_logging(settings.log_level, "release", settings.log_file)
    stop = threading.Event()

    def end(_signal: int, _frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    ProcessMetrics(REGISTRY, "release")
    run_judges(settings, stop, ReleaseMetrics(REGISTRY))


def run_judges(settings: Settings, stop: threading.Event, metrics: ReleaseMetrics) -> None:
    """Look at all names until `stop` is set, even if a store or broker fails."""
    judges: dict[str, ReleaseJudge] = {}
    beat = _beat(settings)
    additions = Additions(60 * settings.add_items_every_min, time.monotonic())
    while not stop.is_set():
        next_look_s = time.monotonic() + settings.release_look_s
        _look(settings, judges, metrics, beat)
        while not stop.is_set() and (left_s := next_look_s - time.monotonic()) > 0:
            beat()
            additions.look(time.monotonic())
            stop.wait(min(left_s, _BEAT_EVERY_S))
    additions.close()
    for judge in judges.values():
        judge.close()


def _look(settings: Settings, judges: "dict[str, ReleaseJudge]", metrics: ReleaseMetrics, beat: partial[None]) -> None:
    """Look at each name once; a failing name does not delay other names."""
    try:
        store = BundleStore.of(settings)
        names = store.names()
    except TailraceError as error:
        log.warning("release_no_look", error=str(error))
        return
    for name in names:
        beat()
        try:
            named = store.named(name)
            if name in judges or named.record().canary is not None:
                judge = judges.get(name) or judges.setdefault(name, _judge(settings, named, metrics, beat))
                judge.look(time.time_ns() // 1_000_000)
            metrics.look_time.labels(name).set_to_current_time()
        except TailraceError as error:
            log.warning("release_no_look", name=name, error=str(error))
        except Exception:  # one failing release must not stop the analysis of other releases
            log.exception("release_failed", name=name)


def _judge(settings: Settings, store: BundleStore, metrics: ReleaseMetrics, beat: partial[None]) -> "ReleaseJudge":
    from pipelines.release.judge import ReleaseJudge
    from pipelines.release.topics import ReleaseTopicReader

    def open_reader(since_ms: int) -> ReleaseTopicReader:
        return ReleaseTopicReader(
            settings.kafka_address,
            settings.impressions_topic,
            settings.interactions_topic,
            since_ms,
            lambda topic, number: metrics.refused.labels(topic).inc(number),
        )

    return ReleaseJudge(store, open_reader, metrics, round(settings.release_lead_s * 1_000), beat)


def _beat(settings: Settings) -> partial[None]:
    settings.release_heartbeat.parent.mkdir(parents=True, exist_ok=True)
    return partial(settings.release_heartbeat.touch)


if __name__ == "__main__":
    main()
