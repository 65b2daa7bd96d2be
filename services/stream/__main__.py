"""`python -m services.stream`: one stream worker, until SIGTERM or Ctrl-C."""

import signal
import sys
import threading
from types import FrameType

from prometheus_client import REGISTRY

from services.errors import ConfigError
from services.observability.metrics import ProcessMetrics, StreamMetrics, configure_logging
from services.settings.settings import Settings, load_settings
from services.stream.run import run_worker


def main() -> None:
    """Apply events until a signal, then write a last checkpoint and end. Bad settings end it with their error."""
    try:
        _run(load_settings())
    except ConfigError as error:
        sys.exit(str(error))


def _run(settings: Settings) -> None:
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
