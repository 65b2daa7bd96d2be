"""Places in the log. Run: pytest tests/unit/features/test_schema.py."""

from services.features.schema import LogPosition


def test_a_position_covers_itself_and_what_lies_before_it_in_the_same_log() -> None:
    """Equal and older offsets are covered; another topic id or partition is another log."""
    here = LogPosition("t", 0, 5)

    assert here.covers(LogPosition("t", 0, 5))
    assert here.covers(LogPosition("t", 0, 0))
    assert not here.covers(LogPosition("t", 0, 6))
    assert not here.covers(LogPosition("other", 0, 0))
    assert not here.covers(LogPosition("t", 1, 0))
