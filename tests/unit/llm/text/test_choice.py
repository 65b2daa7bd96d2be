"""A choice shows complete characters, cuts at stop strings, and reports each token once."""

from hypothesis import given
from hypothesis import strategies as st

from services.contracts.text import FinishReason
from services.llm.engine.sampling_parameters import SampledToken
from services.llm.text.generate import StopStrings, TextChoice
from services.llm.text.tokenizer import TextTokenizer
from tests.support.engine.checkpoints import EOS_ID, build_tokenizer

LIBRARY = build_tokenizer()
TOKENIZER = TextTokenizer(LIBRARY)


def choice_of(*stop: str) -> TextChoice:
    return TextChoice(0, TOKENIZER, stop=stop, stop_token_ids={EOS_ID})


@given(st.lists(st.integers(1, LIBRARY.get_vocab_size() - 1), max_size=30), st.integers(1, 5))
def test_pieces_add_up_to_decoding_at_once(token_ids, tokens_per_piece) -> None:
    """The joined pieces equal the decoded text and count all tokens; an incomplete character is held back."""
    choice, pieces = choice_of(), []
    for index, token_id in enumerate(token_ids):
        choice.append(SampledToken(token_id))
        if index % tokens_per_piece == 0:
            pieces.append(choice.take_piece())
    choice.end(FinishReason.LENGTH)
    pieces = [piece for piece in [*pieces, choice.take_piece()] if piece is not None]

    assert "".join(piece.text for piece in pieces) == LIBRARY.decode(token_ids)
    assert sum(piece.num_tokens for piece in pieces) == len(token_ids)
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + [FinishReason.LENGTH]


def test_each_token_has_its_place_in_the_text() -> None:
    """A token's offset is the number of complete characters before it; hidden tokens have length zero."""
    choice = choice_of()
    the, *others = LIBRARY.encode("the🎈 sea").ids

    for token_id in (the, LIBRARY.token_to_id("<|user|>"), *others):
        choice.append(SampledToken(token_id, -0.5))
    choice.end(FinishReason.LENGTH)
    piece = choice.take_piece()

    assert piece.text == "the🎈 sea"
    places = [(b"the", 0), (b"<|user|>", 3), (b"\xf0\x9f", 3), (b"\x8e", 3), (b"\x88", 3), (b" s", 4), (b"ea", 6)]
    assert [(entry.token_bytes, entry.text_offset) for entry in piece.logprobs] == places


def test_the_end_token_counts_and_is_not_shown() -> None:
    """A stop token counts as a completion token, without text and without a logprob."""
    choice = choice_of()
    token_id = LIBRARY.encode("the").ids[0]

    choice.append(SampledToken(token_id, -0.5, ((token_id, -0.5), (EOS_ID, -1.5))))
    choice.append(SampledToken(EOS_ID, -0.1, ()))
    choice.end(FinishReason.STOP)
    piece = choice.take_piece()

    assert piece.num_tokens == 2
    assert [entry.token_bytes for entry in piece.logprobs] == [TOKENIZER.bytes_of(token_id)]
    assert [(top.token, top.logprob) for top in piece.logprobs[0].top] == [(piece.text, -0.5), ("<|end|>", -1.5)]
    assert choice.take_piece() is None


TEXTS = st.text("abc", max_size=24)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3)


def cut_at_once(text: str, stop: list[str]) -> tuple[str, bool]:
    """Cut the whole text at the first position where a stop string ends."""
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
    """Text that cannot be part of a stop string is released immediately."""
    stops = StopStrings(["\n\nEND"])

    assert stops.feed("hello\n") == "hello"
    assert stops.feed("world\n\nE") == "\nworld"
    assert stops.feed("NE") == "\n\nENE"
    assert stops.feed("x\n\nEND and more") == "x"
    assert stops.feed("more") == ""
