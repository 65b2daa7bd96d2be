"""The stored form of an explanation: encoding and decoding are inverse, and other content is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.contracts.explanation import OWN_FIELDS, StageTime, decode_explanation, encode_explanation

OWN = ("r", "rest", "ok", 5, *[None] * (len(OWN_FIELDS) - 4))


@given(st.text(max_size=20), st.floats(0, 10), st.floats(0, 10), st.integers(0, 2**60))
def test_values_survive(text: str, offset_s: float, duration_s: float, number: int) -> None:
    """Any text, times to the microsecond and facts by name come back."""
    own = (text, "grpc", "ok", number, text, *OWN[5:])

    found = decode_explanation(
        encode_explanation(own, (number, True), None, [("rank", offset_s, duration_s)]), ("n", "b")
    )

    assert (found.request_id, found.door, found.at_unix_ms, found.message) == (text, "grpc", number, text)
    assert found.facts == {"n": number, "b": True}
    assert found.stages == (
        StageTime(name="rank", offset_ms=round(offset_s * 1e3, 3), duration_ms=round(duration_s * 1e3, 3)),
    )


def test_stages_are_in_the_order_of_their_start() -> None:
    """Decoded stages are sorted by their start, not by their end."""
    stages = [("student", 0.002, 0.001), ("llm", 0.001, 0.005), ("features", 0.0, 0.001)]

    found = decode_explanation(encode_explanation(OWN, (), None, stages), ())

    assert [stage.name for stage in found.stages] == ["features", "llm", "student"]


@pytest.mark.parametrize(
    "stored", [b"", b"{}", b"[]", b"nonsense", b'[["only"],[],null,[]]', b'{"a":1,"b":2,"c":3,"d":4}']
)
def test_other_content_is_refused(stored: bytes) -> None:
    """Malformed content raises; it never becomes a wrong explanation."""
    with pytest.raises((ValueError, TypeError)):
        decode_explanation(stored, ())
