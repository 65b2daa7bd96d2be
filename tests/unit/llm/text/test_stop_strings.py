"""Stop strings cut a text at the same character however it is split into pieces."""

from hypothesis import given
from hypothesis import strategies as st

from services.llm.text.generate import StopStrings

TEXTS = st.text("abc", max_size=24)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3)


def cut_at_once(text: str, stop: list[str]) -> tuple[str, bool]:
    """Search the whole text for the first place where a stop string ends."""
    for end in range(1, len(text) + 1):
        ended = [string for string in stop if text[:end].endswith(string)]
        if ended:
            return text[: end - max(map(len, ended))], True
    return text, False


@given(text=TEXTS, stop=STOPS, borders=st.lists(st.integers(0, 24), max_size=6))
def test_the_cut_does_not_depend_on_the_pieces(text, stop, borders) -> None:
    """The shown text equals a search of the whole text, for every split into pieces."""
    stops = StopStrings(stop)
    ends = sorted({min(border, len(text)) for border in borders} | {len(text)})

    shown, start = "", 0
    for end in ends:
        shown += stops.feed(text[start:end])
        start = end
    shown += "" if stops.has_stopped else stops.flush()

    assert (shown, stops.has_stopped) == cut_at_once(text, stop)


def test_only_a_possible_stop_string_is_held_back() -> None:
    """Text that cannot be part of one is released at once."""
    stops = StopStrings(["\n\nEND"])

    assert stops.feed("hello\n") == "hello"
    assert stops.feed("world\n\nE") == "\nworld"
    assert stops.feed("NE") == "\n\nENE"
    assert stops.feed("x\n\nEND and more") == "x"
    assert stops.feed("more") == ""
