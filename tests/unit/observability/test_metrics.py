"""Metrics of several processes are summed into one page."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.observability.node_metrics import render_metrics

COUNT = """
import os, sys
from prometheus_client import REGISTRY
from services.observability.metrics import GatewayMetrics
metrics = GatewayMetrics(REGISTRY)
metrics.requests.labels("rest", "llm", "llm_in_time", "ok").inc(int(sys.argv[1]))
metrics.breaker_open.labels("default").set(1)
metrics.request_seconds.labels("rest", "llm").observe(0.04)
"""


def test_every_process_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counters of ended processes are merged into one file, however many end; their gauges are removed."""
    for number in (2, 3):
        subprocess.run(
            [sys.executable, "-c", COUNT, str(number)], check=True, env={"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
        )
        (tmp_path / f"counter_{2**22 + number}.db").touch()  # no process has this id: killed before its first count
        page = render_metrics(tmp_path).decode()

    (begun := tmp_path / f"counter_{os.getpid()}.db").touch()  # a process creates its file, then writes to it
    assert render_metrics(tmp_path).decode() == page
    begun.unlink()
    assert sorted(path.name for path in tmp_path.glob("*.db")) == ["counter_ended.db", "histogram_ended.db"]
    assert render_metrics(tmp_path).decode() == page

    assert 'tailrace_requests_total{code="ok",door="rest",reason="llm_in_time",tier="llm"} 5.0' in page
    assert 'tailrace_request_seconds_count{door="rest",tier="llm"} 2.0' in page
    assert 'tailrace_breaker_open{name="default"} 1' not in page
