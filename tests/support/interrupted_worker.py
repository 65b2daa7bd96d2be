"""A stream worker that kills itself with SIGKILL at one point: `python -m tests.support.interrupted_worker POINT NTH`."""

import os
import signal
import sys
import threading
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from services.observability.metrics import StreamMetrics
from services.settings.settings import load_settings
from services.stream.run import run_worker
from services.stream.worker import Interruptions, Pace


def kill_at(nth: int) -> Callable[[], None]:
    """Make a call that kills this process when it is made for the nth time."""
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1
        if calls == nth:
            os.kill(os.getpid(), signal.SIGKILL)

    return call


if __name__ == "__main__":
    run_worker(
        load_settings(),
        threading.Event(),
        StreamMetrics(CollectorRegistry()),
        Pace(checkpoint_every_events=20),
        Interruptions(**{sys.argv[1]: kill_at(int(sys.argv[2]))}),
    )
