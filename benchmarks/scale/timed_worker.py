"""A stream worker that records when each event became visible: `python -m benchmarks.scale.timed_worker NOTES`.

It writes the notes when it ends: a row per event with its Unix time of being visible and the seconds since it was
accepted.
"""

import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
from prometheus_client import CollectorRegistry, Histogram

from services.observability.log_lines import configure_logging
from services.observability.metrics import StreamMetrics
from services.settings.settings import load_settings
from services.stream.__main__ import run_worker


class _Noting(Histogram):
    """The metric of the time to visibility; also records each value."""

    def __init__(self) -> None:
        super().__init__("event_to_visible_seconds", "as the worker's own metric", registry=None)
        self.noted: list[tuple[float, float]] = []

    def observe(self, amount: float, exemplar: dict[str, str] | None = None) -> None:
        """Note a value."""
        self.noted.append((time.time(), amount))
        super().observe(amount, exemplar)


def main(notes: Path) -> None:
    """Work until SIGTERM."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    settings = load_settings()
    configure_logging(settings.log_level, "worker")
    metrics = StreamMetrics(CollectorRegistry())
    noting = _Noting()
    metrics.visible_seconds = noting
    run_worker(settings, stop, metrics)
    np.save(notes, np.array(noting.noted, dtype=np.float64).reshape(-1, 2))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
