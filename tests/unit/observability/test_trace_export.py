"""Export of spans to an absent, a hanging and a healthy collector."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.observability.tracing import _QUEUE_SPANS, open_tracing, span
from tests.support.collector import Collector
from tests.support.servers import HOST, free_port
from tests.support.spans import traceparent

ROOT = Path(__file__).resolve().parents[3]
NUM_CALLS = 2 * _QUEUE_SPANS

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # grpc's threads at exit


@pytest.fixture
def collector() -> Iterator[Collector]:
    """A listening collector."""
    listening = Collector()
    yield listening
    listening.stop()


def test_spans_arrive_with_the_services_name(collector: Collector) -> None:
    """A collector receives the spans over the wire, including spans queued at the stop."""
    tracing = open_tracing(collector.endpoint, 1.0, "tailrace-gateway")
    with tracing.entry("call", {"traceparent": traceparent(0xA11CE)}), span("inner", attributes={"n": 3}):
        pass
    tracing.stop()

    arrived = collector.spans(0xA11CE)
    assert {name: service for name, (service, _) in arrived.items()} == {
        "call": "tailrace-gateway",
        "inner": "tailrace-gateway",
    }
    assert arrived["inner"][1].parent_span_id == arrived["call"][1].span_id
    assert arrived["inner"][1].attributes[0].value.int_value == 3


@pytest.mark.parametrize("is_there", [False, True])
def test_an_unresponsive_collector_costs_spans_and_no_time(collector: Collector, is_there: bool) -> None:
    """With four times the queue's spans, no call waits for an absent or hanging collector, and the process ends."""
    collector.go_on.clear()
    endpoint = collector.endpoint if is_there else f"http://{HOST}:{free_port()}"
    tracing = open_tracing(endpoint, 1.0, "tailrace-gateway")

    started_s = time.monotonic()
    for _ in range(NUM_CALLS):
        with tracing.entry("call", {}), span("inner"):
            pass
    called_s = time.monotonic()
    tracing.stop()
    stopped_s = time.monotonic()

    assert called_s - started_s < 30.0
    assert stopped_s - called_s < 10.0


def test_switched_off_the_sdk_is_not_even_imported() -> None:
    """Without an endpoint the process imports neither the SDK, its exporter nor grpc."""
    script = (
        "import sys\n"
        "from services.observability.tracing import open_tracing\n"
        "tracing = open_tracing('', 1.0, 'x')\n"
        "tracing.stop()\n"
        "assert tracing.is_off\n"
        "sys.exit(' '.join(name for name in sys.modules if name.startswith(('opentelemetry.sdk', "
        "'opentelemetry.exporter', 'grpc'))) or 0)"
    )

    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False, timeout=30
    )

    assert (ended.returncode, ended.stderr) == (0, "")
