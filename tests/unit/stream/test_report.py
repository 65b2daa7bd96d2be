"""The worker's progress metrics."""

from prometheus_client import CollectorRegistry

from services.observability.metrics import StreamMetrics
from services.stream.report import LogStep, WorkerReport


def test_progress_is_records_taken_or_nothing_left() -> None:
    """With lag, a partition progresses only by taking records, not by reopening; without lag it always progresses."""
    registry, now_s = CollectorRegistry(), [100.0]
    report = WorkerReport(StreamMetrics(registry), clock=lambda: now_s[0])

    def times() -> list[float | None]:
        return [registry.get_sample_value("tailrace_stream_progress_time_seconds", {"partition": p}) for p in "012"]

    report.watch((0, 1, 2))
    now_s[0] = 200.0
    report.watch((0, 1, 2))
    report.lag({0: 5, 1: 5, 2: 0}, ())
    report.went_on({1})

    assert times() == [100.0, 200.0, 200.0]


def test_failures_are_counted_from_zero() -> None:
    """Each step's counter exists before its first failure, so that the first failure is an increase."""
    registry = CollectorRegistry()
    WorkerReport(StreamMetrics(registry))

    assert {registry.get_sample_value("tailrace_stream_log_failures_total", {"step": step}) for step in LogStep} == {0}
