"""The spans of a request's time in the engine."""

import time
from typing import Any

import numpy as np
import pytest

from services.contracts.rank import EngineLoad
from services.llm.engine.outcome import EngineOutcome, Status
from services.llm.serving.metrics import record_spans
from services.llm.serving.streams import Ended
from tests.support.spans import Recorder

LOAD = EngineLoad(num_running=0, num_waiting=0, kv_cache_usage=0.0)
NOW_S = time.monotonic()


def ended(**changes: Any) -> Ended:
    """A request that waited 1 s, prefilled 2 s and decoded 3 s."""
    fields: dict[str, Any] = {
        "request_id": "r",
        "status": Status.DONE,
        "item_indices": np.zeros(0, dtype=np.int64),
        "scores": np.zeros(0, dtype=np.float32),
        "tokens": (),
        "num_prompt_tokens": 100,
        "num_cached_tokens": 64,
        "arrival_s": NOW_S - 6.0,
        "started_s": NOW_S - 5.0,
        "decoding_s": NOW_S - 3.0,
        "num_steps": 3,
    }
    return Ended(EngineOutcome(**{**fields, **changes}), NOW_S, LOAD)


def seconds(recorder: Recorder) -> dict[str, float]:
    """Return the seconds of each span."""
    return {span.name: ((span.end_time or 0) - (span.start_time or 0)) / 1e9 for span in recorder.spans}


@pytest.mark.parametrize(
    ("changes", "lengths"),
    [
        ({}, {"queue": 1.0, "prefill": 2.0, "decode": 3.0}),
        ({"decoding_s": None}, {"queue": 1.0, "prefill": 5.0}),
        ({"started_s": None, "decoding_s": None, "status": Status.LATE}, {"queue": 6.0}),
    ],
)
def test_each_part_is_a_span_of_its_length(changes: dict[str, Any], lengths: dict[str, float]) -> None:
    """A request that never ran has a queue span alone; one that ended with its prompt has no decode span."""
    recorder = Recorder()

    with recorder.tracing.entry("llm.rank", {}):
        record_spans(ended(**changes))

    found = seconds(recorder)
    del found["llm.rank"]
    assert found == pytest.approx(lengths, abs=1e-3)
    assert recorder.tree() == {**dict.fromkeys(lengths, "llm.rank"), "llm.rank": None}
