"""The fault matrix as a page shows it."""

from typing import Any

from benchmarks.faults.page import matrix, priorities

PART: dict[str, Any] = {
    "num_requests": 8,
    "availability": 0.9995,
    "deadline_met": 1.0,
    "p99_ms": 12.34,
    "tiers": {"llm": 0.25, "none": 0.05, "student": 0.7},
}


def test_one_line_per_fault() -> None:
    """Numbers are formatted; a row that did not recover is marked."""
    row = {**PART, "fault": "store-stop", "goodput": 0.9, "recovery_s": 1.5, "during": PART}

    lines = matrix([row, {**row, "recovery_s": None}]).splitlines()

    assert lines[2] == ("| store-stop | 99.95 % | 100.00 % | 12.3 | 0.900 | 1.5 s | student 70%, llm 25%, failed 5% |")
    assert "not in this row" in lines[3]


def test_the_classes_of_a_spike() -> None:
    """There is a line for each class of callers, and for the high one by door."""
    doors = {"high over REST": PART, "high over gRPC": PART}
    lines = priorities({"by_priority": {"high": PART, "low": PART}, "by_door": doors}).splitlines()

    assert len(lines) == 6
    assert lines[2].startswith("| high | 8 | 99.95 % | 100.00 % | 12.3 |")
    assert lines[5].startswith("| high over gRPC | 8 |")
