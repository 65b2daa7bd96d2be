"""Parts start in order and stop in reverse order, also after a failure of one part."""

import threading

import pytest
from structlog.testing import capture_logs

from services.gateway.lifecycle import BackgroundPart, Lifecycle


class RecordEventsResponse:
    """A part that records its calls in `calls`, and fails in the methods named in `fails`."""

    def __init__(self, name: str, calls: list[str], fails: str = "") -> None:
        self.name, self._calls, self._fails = name, calls, fails

    async def start(self) -> None:
        self._call("start")

    async def stop(self) -> None:
        self._call("stop")

    def _call(self, method: str) -> None:
        self._calls.append(f"{method} {self.name}")
        if method == self._fails:
            raise OSError(f"{self.name} cannot {method}")


class RecordedThread(RecordEventsResponse):
    """A part with a thread: blocking methods."""

    def start(self) -> None:  # type: ignore[override]
        self._call("start")

    def stop(self) -> None:  # type: ignore[override]
        self._call("stop")


def lifecycle_of(calls: list[str], fails: str = "") -> Lifecycle:
    """Return parts a, b and c; b fails in this method."""
    parts = (RecordEventsResponse(name, calls, fails if name == "b" else "") for name in "abc")
    return Lifecycle([BackgroundPart(part.name, part.stop, part.start) for part in parts])


async def test_parts_stop_in_the_reverse_order_of_their_start() -> None:
    """Each part stops before the parts that were started before it; a part without a start only stops."""
    calls: list[str] = []
    lifecycle = Lifecycle([BackgroundPart(part.name, part.stop) for part in [RecordEventsResponse("only", calls)]])
    abc = lifecycle_of(calls)

    for parts in (lifecycle, abc):
        await parts.start()
        await parts.stop()

    assert calls == ["stop only", "start a", "start b", "start c", "stop c", "stop b", "stop a"]


async def test_a_failing_start_stops_the_started_parts() -> None:
    """The error of the failing part is raised, and a later stop repeats nothing."""
    calls: list[str] = []
    lifecycle = lifecycle_of(calls, "start")

    with pytest.raises(OSError, match="b cannot start"):
        await lifecycle.start()
    await lifecycle.stop()

    assert calls == ["start a", "start b", "stop a"]


async def test_a_failing_stop_is_logged_and_skips_no_part() -> None:
    """Parts that were started before the failing part stop too."""
    calls: list[str] = []
    lifecycle = lifecycle_of(calls, "stop")
    await lifecycle.start()

    with capture_logs() as logged:
        await lifecycle.stop()

    assert calls[3:] == ["stop c", "stop b", "stop a"]
    assert [(line["event"], line["part"]) for line in logged] == [("part_not_stopped", "b")]


@pytest.mark.parametrize(
    ("fails", "expected"),
    [
        ("", ["start a", "start b", "start c", "stop a", "stop b", "stop c"]),
        ("start", ["start a", "start b", "stop a"]),
        ("stop", ["start a", "start b", "start c", "stop a", "stop b", "stop c"]),
    ],
)
async def test_threads_are_one_part(fails: str, expected: list[str]) -> None:
    """A thread that cannot start ends the threads before it; a thread that cannot stop ends no other's stop."""
    calls: list[str] = []
    lifecycle = Lifecycle(
        [BackgroundPart.threads("abc", [RecordedThread(name, calls, fails if name == "b" else "") for name in "abc"])]
    )

    if fails == "start":
        with pytest.raises(OSError, match="b cannot start"):
            await lifecycle.start()
    else:
        await lifecycle.start()
        await lifecycle.stop()

    assert sorted(calls) == expected


async def test_threads_stop_at_the_same_time() -> None:
    """Two threads that wait for each other's stop both end."""
    barrier = threading.Barrier(2, timeout=60.0)

    class Waiting:
        """A thread whose stop ends when another's has begun."""

        def start(self) -> None:
            """Do nothing."""

        def stop(self) -> None:
            """Wait for the other stop."""
            barrier.wait()

    lifecycle = Lifecycle([BackgroundPart.threads("waiting", [Waiting(), Waiting()])])
    await lifecycle.start()
    with capture_logs() as logged:
        await lifecycle.stop()

    assert logged == []
