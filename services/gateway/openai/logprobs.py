"""Logprobs in OpenAI's two forms: parallel lists for completions, a list of objects for chat. Pure."""

from collections.abc import Sequence
from typing import Any

from services.contracts.text import TokenLogprob

Logprobs = Sequence[TokenLogprob]


def completion_logprobs(tokens: Logprobs, num_top: int) -> dict[str, Any]:
    """Return the completions form. The chosen token is always among the most probable ones, as one more where it is not."""
    return {
        "tokens": [token.token for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [_by_token(token) for token in tokens] if num_top else None,
        "text_offset": [token.text_offset for token in tokens],
    }


def chat_logprobs(tokens: Logprobs) -> dict[str, Any]:
    """Return the chat form."""
    content = [{**_token(token), "top_logprobs": [_token(top) for top in token.top]} for token in tokens]
    return {"content": content, "refusal": None}


def _by_token(token: TokenLogprob) -> dict[str, float]:
    """Return the logprobs at a token's place. Of tokens that look alike, being parts of characters, the chosen or the best counts."""
    by_token: dict[str, float] = {}
    for top in token.top:
        by_token.setdefault(top.token, top.logprob)
    return by_token | {token.token: token.logprob}


def _token(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.token, "logprob": token.logprob, "bytes": list(token.token_bytes)}
