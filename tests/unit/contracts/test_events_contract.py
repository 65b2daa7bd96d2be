"""Encoding and decoding of interactions are inverse, and malformed records are rejected."""

import json
from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.contracts.events import Interaction, decode_interaction
from services.errors import InvalidRequest

IDS = st.text(st.characters(categories=("L", "N", "P", "S")), min_size=1, max_size=20).filter(str.isprintable)
INTERACTIONS = st.builds(
    Interaction,
    event_id=IDS,
    user_id=IDS,
    item_id=IDS,
    event_time_ms=st.integers(0, 2**41),
    event_type=IDS,
    value=st.floats(allow_nan=False, allow_infinity=False),
    request_id=IDS | st.none(),
    accepted_time_ms=st.integers(0, 2**41) | st.none(),
)
FIELDS = {"event_id": "e", "user_id": "u", "item_id": "i", "event_time_ms": 1}


@given(INTERACTIONS)
def test_what_is_written_is_read_back(event: Interaction) -> None:
    """Decoding an encoded interaction returns an equal interaction."""
    assert decode_interaction(event.encode()) == event


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"user_id": None}, "user_id"),
        ({"user_id": ""}, "user_id"),
        ({"item_id": 5}, "item_id"),
        ({"event_time_ms": "1"}, "event_time_ms"),
        ({"event_time_ms": True}, "event_time_ms"),
        ({"event_time_ms": -1}, "event_time_ms"),
        ({"event_time_ms": 10**15}, "event_time_ms"),
        ({"value": "x"}, "value"),
        ({"value": True}, "value"),
        ({"value": 10**400}, "value"),
        ({"request_id": ""}, "request_id"),
        ({"request_id": "\ud800"}, "request_id"),
        ({"colour": 1}, "colour"),
    ],
)
def test_a_bad_field_is_refused_by_name(changed: dict[str, Any], field: str) -> None:
    """The error names a missing, mistyped, out-of-range or unknown field."""
    with pytest.raises(InvalidRequest, check=lambda error: error.field == field and error.fix != ""):
        decode_interaction(json.dumps({**FIELDS, **changed}).encode())


@pytest.mark.parametrize("value", [b"", b"{", b"[]", b"7", b"\xff", b"[" * 100_000, b"9" * 10_000, b"NaN"])
def test_a_record_that_is_no_object_is_refused(value: bytes) -> None:
    """Deeply nested and very long values are rejected too."""
    with pytest.raises(InvalidRequest):
        decode_interaction(value)


@pytest.mark.parametrize(("offset_ms", "is_accepted"), [(0, True), (60_000, True), (60_001, False)])
def test_an_event_from_the_future_is_refused(offset_ms: int, is_accepted: bool) -> None:
    """Events up to a minute ahead are accepted, for clock skew."""
    now_ms = 10**12
    event = Interaction(**{**FIELDS, "event_time_ms": now_ms + offset_ms})  # type: ignore[arg-type]

    with nullcontext() if is_accepted else pytest.raises(InvalidRequest):
        event.check_time(now_ms)
