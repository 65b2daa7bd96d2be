"""The stages of a request, while one of them still runs in a thread."""

import sys
import threading
import time
from collections.abc import Iterator

import pytest

from services.gateway.request.context import StageTimer


@pytest.fixture
def switching() -> Iterator[None]:
    """Threads take turns at almost every instruction."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("switching")
def test_stages_are_read_while_a_thread_adds_one() -> None:
    """A student that ran out of time ends while the answer is written: reading the stages fails at no moment."""
    timer, is_over = StageTimer(time.monotonic, 0.0), threading.Event()

    def add() -> None:
        """Add stages until the test is over."""
        number = 0
        while not is_over.is_set():
            number += 1
            with timer.measure(f"stage {number % 1_000}"):
                pass
            if number % 1_000 == 0:
                timer._spent.clear()

    thread = threading.Thread(target=add)
    thread.start()
    try:
        for _ in range(300):
            timer.as_ms()
            timer.raw()
    finally:
        is_over.set()
        thread.join()
