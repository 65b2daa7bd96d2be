"""How long a thread ran and wanted a core, from the system's counters."""

import time

import pytest

from services.gateway.overload import core_times
from services.gateway.overload.core_times import CoreTimes


def test_a_thread_that_works_wants_a_core_and_a_blocked_thread_does_not() -> None:
    """Work counts in both times. In a sleep of a second the thread wants no core, apart from its wake-up."""
    times, work_s = CoreTimes(), 0.05
    ran_before_s, wanted_before_s = times.read(time.monotonic())
    while time.thread_time() < ran_before_s + work_s:
        pass
    ran_s, wanted_s = times.read(time.monotonic())
    time.sleep(1.0)
    wanted_after_s = times.read(time.monotonic())[1]
    times.close()

    assert ran_s - ran_before_s >= work_s
    assert wanted_s - wanted_before_s >= work_s
    assert wanted_after_s - wanted_s < 1.0


def test_without_the_system_s_counters_a_thread_always_wants_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """The share is then what it gets of the time that passes."""
    monkeypatch.setattr(core_times, "_SCHEDSTAT", "/nowhere")

    assert CoreTimes().read(7.0)[1] == 7.0
