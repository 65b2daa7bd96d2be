"""Metrics of several processes are summed into one page; logs are JSON lines."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import structlog

from services.observability.metrics import configure_logging
from services.observability.node_metrics import render_metrics

LOG = """
import structlog
from services.observability.metrics import configure_logging
configure_logging("info")
for number in range(100):
    structlog.get_logger().info("recommended", tier="llm", text="x" * 1_000)
print("answered", flush=True)
"""
COUNT = """
import os, sys
from prometheus_client import REGISTRY
from services.observability.metrics import GatewayMetrics
metrics = GatewayMetrics(REGISTRY)
metrics.requests.labels("rest", "llm", "llm_in_time", "ok").inc(int(sys.argv[1]))
metrics.breaker_open.set(1)
metrics.request_seconds.labels("rest", "llm").observe(0.04)
"""


def test_every_process_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counters of ended processes are kept in one file, however many end; their gauges are removed."""
    for number in (2, 3):
        subprocess.run(
            [sys.executable, "-c", COUNT, str(number)], check=True, env={"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
        )
        (tmp_path / f"counter_{2**22 + number}.db").touch()  # no process has this id: killed before its first count
        page = render_metrics(tmp_path).decode()

    assert sorted(path.name for path in tmp_path.glob("*.db")) == ["counter_ended.db", "histogram_ended.db"]
    assert render_metrics(tmp_path).decode() == page

    assert 'tailrace_requests_total{code="ok",door="rest",reason="llm_in_time",tier="llm"} 5.0' in page
    assert 'tailrace_request_seconds_count{door="rest",tier="llm"} 2.0' in page
    assert "tailrace_breaker_open 1" not in page


def test_logs_are_json_lines_with_the_bound_context(capsys: pytest.CaptureFixture[str]) -> None:
    """Lines below the level are not written."""
    configure_logging("info")
    try:
        with structlog.contextvars.bound_contextvars(request_id="r"):
            structlog.get_logger().info("recommended", tier="llm")
            structlog.get_logger().debug("noise")
    finally:
        structlog.reset_defaults()

    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(line["event"], line["tier"], line["request_id"], line["level"]) for line in lines] == [
        ("recommended", "llm", "r", "info")
    ]


@pytest.mark.parametrize("stderr", ["full disk", "closed pipe", "closed file"])
def test_a_log_line_that_cannot_be_written_raises_nothing(stderr: str) -> None:
    """Whatever is behind standard error, log calls return."""
    reader, writer = os.pipe()
    os.close(reader)
    full = os.open("/dev/full", os.O_WRONLY)
    behind = {"full disk": full, "closed pipe": writer, "closed file": None}[stderr]
    command = ["sh", "-c", 'exec "$@" 2>&-', "sh"] if behind is None else []
    try:
        process = subprocess.run(
            [*command, sys.executable, "-c", LOG], stdout=subprocess.PIPE, stderr=behind, check=False, timeout=60
        )
    finally:
        os.close(writer)
        os.close(full)

    assert process.stdout == b"answered\n"
