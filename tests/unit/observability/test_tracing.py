"""Spans: their parents, their sampling, and the disabled state."""

import asyncio

import pytest
import structlog
from opentelemetry.trace import INVALID_SPAN, StatusCode

from services.observability.tracing import Tracing, here, note, note_failure, past_span, span, trace_headers, trace_id
from tests.support.spans import Recorder, span_id, trace_id_of, traceparent


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def test_disabled_tracing_makes_no_span() -> None:
    """Without a provider every span is INVALID_SPAN, and no context is propagated."""
    tracing = Tracing()

    with tracing.entry("call", {"traceparent": traceparent()}) as outer, span("inner") as inner:
        note({"a": 1})
        note_failure("broken", is_ours=True)
        past_span("past", 0.0, 1.0)
        carried, context, known_as = trace_headers(), here(), trace_id()
    tracing.stop()

    assert outer is INVALID_SPAN
    assert inner is INVALID_SPAN
    assert tracing.is_off
    assert (carried, context, known_as) == ((), None, None)


def test_an_entry_goes_on_with_the_callers_trace(recorder: Recorder) -> None:
    """The W3C header sets trace and parent, its state is propagated, and log lines inside have the trace id."""
    headers = {"traceparent": traceparent(0x1234, 0x5678), "tracestate": "vendor=1"}

    with recorder.tracing.entry("call", headers), span("inner"):
        carried = dict(trace_headers())
        known_as = trace_id()
        logged = structlog.contextvars.get_contextvars()["trace_id"]

    call, inner = recorder.one("call"), recorder.one("inner")
    assert call.parent is not None
    assert (trace_id_of(call), call.parent.span_id) == (0x1234, 0x5678)
    assert carried == {"traceparent": traceparent(0x1234, span_id(inner)), "tracestate": "vendor=1"}
    assert known_as == logged == f"{0x1234:032x}"
    assert "trace_id" not in structlog.contextvars.get_contextvars()


@pytest.mark.parametrize("header", ["", "nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "00-zz-yy-01", "\x00é"])
def test_an_unreadable_header_begins_a_new_trace(recorder: Recorder, header: str) -> None:
    """A malformed header only loses the link to the caller."""
    with recorder.tracing.entry("call", {"traceparent": header}):
        pass

    assert recorder.one("call").parent is None


async def test_tasks_do_not_see_each_others_spans(recorder: Recorder) -> None:
    """Concurrent requests have separate spans, and no span stays open."""

    async def request(name: str) -> None:
        """Open a span, yield, and open another span."""
        with recorder.tracing.entry(name, {}):
            await asyncio.sleep(0)
            with span(f"{name} inner"):
                await asyncio.sleep(0)

    await asyncio.gather(request("one"), request("two"))

    assert recorder.tree() == {"one": None, "two": None, "one inner": "one", "two inner": "two"}
    assert here() is None


def test_sampling_follows_the_caller() -> None:
    """The caller's decision holds in both directions; with a fraction of 0 no new trace is sampled."""
    always = Recorder()
    with always.tracing.entry("call", {"traceparent": traceparent(sampled=False)}), span("inner"):
        pass
    recorder = Recorder(share=0.0)

    with recorder.tracing.entry("not sampled", {}), span("inner"):
        carried = trace_headers()
    with recorder.tracing.entry("sampled by the caller", {"traceparent": traceparent()}), span("child"):
        pass

    assert not always.spans
    assert carried == ()
    assert recorder.tree() == {"sampled by the caller": None, "child": "sampled by the caller"}


def test_messages_continue_the_traces_of_their_senders(recorder: Recorder) -> None:
    """A message without context starts no trace; joint work joins the first sampled trace and links all senders."""
    senders = [
        (("traceparent", traceparent(trace, trace << 4 | trace, sampled=sampled)),)
        for trace, sampled in ((1, False), (2, True), (3, True))
    ]

    with recorder.tracing.continuation("alone", ()), recorder.tracing.joint_entry("nobody traced", senders[:1]):
        pass
    with recorder.tracing.continuation("sent", senders[2]):
        pass
    with recorder.tracing.joint_entry("process", senders):
        pass

    process = recorder.one("process")
    assert {span.name: trace_id_of(span) for span in recorder.spans} == {"sent": 3, "process": 2}
    assert [(link.context.trace_id, link.context.span_id) for link in process.links] == [(2, 0x22), (3, 0x33)]


def test_a_failure_marks_the_span_and_is_raised_on(recorder: Recorder) -> None:
    """The span has only the error's class, since its message may contain user data."""
    with pytest.raises(ZeroDivisionError), recorder.tracing.entry("call", {}):
        raise ZeroDivisionError("user 196")

    call = recorder.one("call")
    assert call.status.status_code is StatusCode.ERROR
    assert (call.attributes or {})["error.type"] == "ZeroDivisionError"
    assert not call.events
    assert "196" not in call.to_json()
