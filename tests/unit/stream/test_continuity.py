"""The epochs of a topic id. tests/integration/stream/test_changed_log.py and test_recovery.py hold when a log gets one."""

from services.stream.continuity import newest_epoch, next_epoch


def test_a_topic_id_has_epochs_in_the_order_of_their_numbers() -> None:
    """The id that the broker names is the first; those of other topics do not count, nor does a plus that is part of an id."""
    first = next_epoch("a+b")
    tenth = "a+b+10"

    assert (first, next_epoch("a+b+9")) == ("a+b+1", tenth)
    assert newest_epoch("a+b", ["other+11", "a+b+9", tenth, "a+b"]) == tenth
    assert newest_epoch("a+b", ["other+11"]) == "a+b"
