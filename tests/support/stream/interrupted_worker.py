"""A stream worker that ends or stops itself at one point.

`python -m tests.support.stream.interrupted_worker POINT NTH [SIGSTOP]`.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from services.observability.log_lines import configure_logging
from services.observability.metrics import StreamMetrics
from services.settings.settings import load_settings
from services.stream.__main__ import run_worker
from services.stream.background import Pace
from services.stream.effects import Interruptions


def signal_at(nth: int, number: signal.Signals) -> Callable[[], None]:
    """Wrap a call so that its nth invocation signals this process."""
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1
        if calls == nth:
            os.kill(os.getpid(), number)

    return call


if __name__ == "__main__":
    configure_logging("info", "worker")
    run_worker(
        load_settings(),
        threading.Event(),
        StreamMetrics(CollectorRegistry()),
        Pace(checkpoint_every_events=20),
        Interruptions(**{sys.argv[1]: signal_at(int(sys.argv[2]), signal.Signals[(*sys.argv[3:], "SIGKILL")[0]])}),
    )
