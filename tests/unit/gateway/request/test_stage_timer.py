"""The stages of a request while a thread still adds stages."""

import sys
import threading
import time
from itertools import count

from services.gateway.request.context import StageTimer


def test_stages_are_read_while_a_thread_adds_one() -> None:
    """Reading the stages never fails while a thread adds one, even with thread switches at almost every instruction."""
    timer, is_over, before_s = StageTimer(time.monotonic, 0.0), threading.Event(), sys.getswitchinterval()

    def add() -> None:
        for number in count():
            with timer.measure(f"stage {number % 1_000}"):
                pass
            if number % 1_000 == 0:
                timer._spent.clear()
            if is_over.is_set():
                return

    thread = threading.Thread(target=add)
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        for _ in range(300):
            assert all(spent_ms >= 0 for spent_ms in timer.as_ms().values())
            timer.raw()
    finally:
        sys.setswitchinterval(before_s)
        is_over.set()
        thread.join()
