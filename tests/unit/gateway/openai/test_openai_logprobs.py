"""Logprobs in the completions form, which tells tokens by their text alone."""

from services.contracts.text import TokenLogprob
from services.gateway.openai.chunks import completion_logprobs


def told(token_bytes: bytes, logprob: float, *top: TokenLogprob, text_offset: int = 0) -> TokenLogprob:
    """A token, as text as good as it can be told."""
    text = token_bytes.decode(errors="replace")
    return TokenLogprob(token=text, token_bytes=token_bytes, logprob=logprob, top=top, text_offset=text_offset)


def test_the_chosen_token_is_among_the_most_probable() -> None:
    """As one more where it is not one of them, as OpenAI promises."""
    rivals = (told(b"a", -0.1), told(b"b", -3.0))

    form = completion_logprobs([told(b"c", -9.0, *rivals), told(b"a", -0.1, *rivals)], 2)

    assert form["top_logprobs"] == [{"a": -0.1, "b": -3.0, "c": -9.0}, {"a": -0.1, "b": -3.0}]


def test_tokens_that_look_alike_do_not_hide_the_best() -> None:
    """Parts of characters are all the same mark: it stands for the chosen one, or else for the most probable."""
    parts = (told(b"\xf0", -0.1), told(b"\xe6", -2.0), told(b"\xe7", -3.0))

    form = completion_logprobs([told(b"\xe6", -2.0, *parts), told(b"a", -4.0, *parts)], 3)

    assert form["top_logprobs"] == [{"\ufffd": -2.0}, {"\ufffd": -0.1, "a": -4.0}]


def test_without_rivals_the_chosen_ones_are_told() -> None:
    """With their places in the text, as the writer told them."""
    form = completion_logprobs([told(b"a", -1.0), told(b"b", -2.0, text_offset=1)], 0)

    assert form == {"tokens": ["a", "b"], "token_logprobs": [-1.0, -2.0], "top_logprobs": None, "text_offset": [0, 1]}
