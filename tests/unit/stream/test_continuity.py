"""The epochs of a topic id; the integration tests of stream cover when a log gets a new epoch."""

from services.stream.continuity import newest_epoch, next_epoch


def test_a_topic_id_has_epochs_in_the_order_of_their_numbers() -> None:
    """The broker's id is the first epoch; other topics do not count, and an id may contain a plus."""
    first = next_epoch("a+b")
    tenth = "a+b+10"

    assert (first, next_epoch("a+b+9")) == ("a+b+1", tenth)
    assert newest_epoch("a+b", ["other+11", "a+b+9", tenth, "a+b"]) == tenth
    assert newest_epoch("a+b", ["other+11"]) == "a+b"
