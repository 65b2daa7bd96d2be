"""The stored form of an explanation: encoding and decoding are inverse, and other content is rejected."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.contracts.explanation import OWN_FIELDS, StageTime, decode_explanation, encode_explanation


@given(st.text(max_size=20), st.lists(st.tuples(st.text(), st.floats(0, 10), st.floats(0, 10))), st.integers(0, 2**60))
def test_values_survive(text: str, stages: list[tuple[str, float, float]], number: int) -> None:
    """Texts, facts, and stages with microsecond times survive a round trip; stages are ordered by start."""
    own = (text, "grpc", "ok", number, text, *[None] * (len(OWN_FIELDS) - 5))

    ruled = ((text, 3, 1, ("pins", "caps")), ("i", None, 2, ()))
    mixed = ((text, 0.5, {"model": 0.25, "text": 0.25}),)
    decoded = decode_explanation(encode_explanation(own, (number, True), None, stages, ruled, mixed), ("n", "b"))

    expected = [
        StageTime(name=name, offset_ms=round(offset_s * 1e3, 3), duration_ms=round(duration_s * 1e3, 3))
        for name, offset_s, duration_s in stages
    ]
    assert (decoded.request_id, decoded.door, decoded.at_unix_ms, decoded.message) == (text, "grpc", number, text)
    assert [(item.item_id, item.before, item.after, item.rules) for item in decoded.ruled] == list(ruled)
    assert [(item.item_id, item.score, item.by_source) for item in decoded.mixed] == list(mixed)
    assert decoded.facts == {"n": number, "b": True}
    assert sorted(decoded.stages, key=repr) == sorted(expected, key=repr)
    assert [stage.offset_ms for stage in decoded.stages] == sorted(stage.offset_ms for stage in expected)


@pytest.mark.parametrize(
    "stored", [b"", b"{}", b"[]", b"nonsense", b'[["only"],[],null,[],[],[]]', b'{"a":1,"b":2,"c":3,"d":4,"e":5,"f":6}']
)
def test_other_content_is_refused(stored: bytes) -> None:
    """Malformed content raises; it never becomes a wrong explanation."""
    with pytest.raises((ValueError, TypeError)):
        decode_explanation(stored, ())
