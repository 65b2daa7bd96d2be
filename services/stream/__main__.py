"""`python -m services.stream`: one stream worker, until SIGTERM or Ctrl-C."""

import signal
import threading
from types import FrameType

from prometheus_client import REGISTRY

from services.observability.metrics import ProcessMetrics, StreamMetrics, configure_logging
from services.settings.settings import load_settings
from services.stream.run import run_worker


def main() -> None:
    """Read settings, apply events, and end after a last checkpoint on a signal."""
    settings = load_settings()
    configure_logging(settings.log_level)
    stop = threading.Event()

    def end(_signal: int, _frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    ProcessMetrics(REGISTRY, "worker")
    run_worker(settings, stop, StreamMetrics(REGISTRY))


if __name__ == "__main__":
    main()
