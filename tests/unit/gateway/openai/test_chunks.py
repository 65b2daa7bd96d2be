"""Logprobs in the completions form, which identifies tokens by their text."""

import pytest

from services.contracts.text import TokenLogprob
from services.gateway.openai.chunks import completion_logprobs


def token(token_bytes: bytes, logprob: float, *top: TokenLogprob) -> TokenLogprob:
    """Build a token; bytes that are no UTF-8 become a replacement character."""
    text = token_bytes.decode(errors="replace")
    return TokenLogprob(token=text, token_bytes=token_bytes, logprob=logprob, top=top, text_offset=0)


TOP = (token(b"a", -0.1), token(b"b", -3.0))
PARTS = (token(b"\xf0", -0.1), token(b"\xe6", -2.0), token(b"\xe7", -3.0))


@pytest.mark.parametrize(
    ("chosen", "shown"),
    [
        (token(b"c", -9.0, *TOP), {"a": -0.1, "b": -3.0, "c": -9.0}),
        (token(b"a", -0.1, *TOP), {"a": -0.1, "b": -3.0}),
        (token(b"\xe6", -2.0, *PARTS), {"\ufffd": -2.0}),
        (token(b"a", -4.0, *PARTS), {"\ufffd": -0.1, "a": -4.0}),
    ],
)
def test_the_chosen_token_is_among_the_top_ones(chosen: TokenLogprob, shown: dict[str, float]) -> None:
    """It is added if it is not one of them, as in OpenAI's API; of tokens with equal text, as parts of characters, the chosen or the best counts."""
    assert completion_logprobs([chosen], len(chosen.top))["top_logprobs"] == [shown]
