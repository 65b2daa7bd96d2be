"""Logprobs in OpenAI's two forms: parallel lists for completions, a list of objects for chat. Pure."""

from collections.abc import Sequence
from typing import Any

from services.contracts.text import TokenLogprob

Logprobs = Sequence[TokenLogprob]


def completion_logprobs(tokens: Logprobs, num_top: int, offset: int) -> dict[str, Any]:
    """Give the completions form. `offset` counts the characters of the choice before the first token."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.token)
    return {
        "tokens": [token.token for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [{top.token: top.logprob for top in token.top} for token in tokens] if num_top else None,
        "text_offset": offsets,
    }


def chat_logprobs(tokens: Logprobs) -> dict[str, Any]:
    """Give the chat form."""
    content = [{**_token(token), "top_logprobs": [_token(top) for top in token.top]} for token in tokens]
    return {"content": content, "refusal": None}


def _token(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.token, "logprob": token.logprob, "bytes": list(token.token_bytes)}
