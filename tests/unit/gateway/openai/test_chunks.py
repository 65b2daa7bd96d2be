"""Logprobs in the completions form, which identifies tokens by their text."""

from services.contracts.text import TokenLogprob
from services.gateway.openai.chunks import completion_logprobs


def token(token_bytes: bytes, logprob: float, *top: TokenLogprob, text_offset: int = 0) -> TokenLogprob:
    """Build a token; bytes that are no UTF-8 become a replacement character."""
    text = token_bytes.decode(errors="replace")
    return TokenLogprob(token=text, token_bytes=token_bytes, logprob=logprob, top=top, text_offset=text_offset)


def test_the_chosen_token_is_among_the_top_ones() -> None:
    """It is added if it is not one of them, as in OpenAI's API."""
    top = (token(b"a", -0.1), token(b"b", -3.0))

    logprobs = completion_logprobs([token(b"c", -9.0, *top), token(b"a", -0.1, *top)], 2)

    assert logprobs["top_logprobs"] == [{"a": -0.1, "b": -3.0, "c": -9.0}, {"a": -0.1, "b": -3.0}]


def test_of_tokens_with_equal_text_the_chosen_or_the_best_counts() -> None:
    """Parts of characters all become the replacement character."""
    parts = (token(b"\xf0", -0.1), token(b"\xe6", -2.0), token(b"\xe7", -3.0))

    logprobs = completion_logprobs([token(b"\xe6", -2.0, *parts), token(b"a", -4.0, *parts)], 3)

    assert logprobs["top_logprobs"] == [{"\ufffd": -2.0}, {"\ufffd": -0.1, "a": -4.0}]
