"""The release report in a name's record: encoding, decoding, and other text in its place."""

import json
import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from models.registry.release_report import GuardReport, ReleaseReport

TEXTS = st.text(max_size=600)
NUMBERS = st.none() | st.floats()
PAIRS = st.tuples(st.integers(0, 2**53), st.integers(0, 2**53))
GUARDS = st.builds(GuardReport, name=TEXTS, state=TEXTS, worse_by=NUMBERS, low=NUMBERS, high=NUMBERS, lacks=TEXTS)
REPORTS = st.builds(
    ReleaseReport,
    act=TEXTS,
    outcome=TEXTS,
    reason=TEXTS,
    stage=st.integers(0, 20),
    share=st.sampled_from([0.01, 0.25, 1.0]),
    elapsed_s=st.integers(),
    users=PAIRS,
    lists=PAIRS,
    guards=st.lists(GUARDS, max_size=4).map(tuple),
)


WRONG_TYPES = (
    '{"reason": 1}',
    '{"reason": "r", "users": ["a", 1]}',
    '{"reason": "r", "lists": [1]}',
    '{"reason": "r", "share": "half"}',
    '{"reason": "r", "guards": [{"name": "errors", "state": 1, "worse_by": null, "low": null, "high": null}]}',
)


def rounded(value: float | None) -> float | None:
    """Return the number rounded to four decimal places; None if it is not finite."""
    return None if value is None or not math.isfinite(value) else round(value, 4)


@given(REPORTS)
def test_a_report_is_read_as_it_was_written(report: ReleaseReport) -> None:
    """Numbers are rounded to four decimal places, non-finite numbers become None, and a long reason is truncated."""
    guards = tuple(
        replace(guard, worse_by=rounded(guard.worse_by), low=rounded(guard.low), high=rounded(guard.high))
        for guard in report.guards
    )

    assert ReleaseReport.decode(report.encode()) == replace(report, guards=guards, reason=report.reason[:500])


@given(
    st.text(min_size=1)
    | st.sampled_from(["[1]", "12", "null", '{"guards": 1}', '{"guards": [{}]}', "[" * 9_999, *WRONG_TYPES])
)
def test_words_are_the_reason(text: str) -> None:
    """Text that is not a report becomes the reason; empty text becomes None."""
    assert ReleaseReport.decode(text) == ReleaseReport(reason=text)
    assert ReleaseReport.decode("") is None


def test_what_another_version_adds_is_left_out() -> None:
    """Fields added by a newer version are ignored, so processes can be replaced one at a time."""
    report = ReleaseReport(
        act="stay",
        reason="too few",
        guards=(GuardReport(name="errors", state="open", worse_by=None, low=None, high=None),),
    )
    plain = json.loads(report.encode())

    newer = plain | {"more": 1, "guards": [guard | {"more": 1} for guard in plain["guards"]]}

    assert ReleaseReport.decode(json.dumps(newer)) == report
