"""How a body wants its text written: sampling, length, shape. Pure."""

import json

from services.contracts.text import SamplingOptions
from services.errors import InvalidRequest
from services.gateway.openai.call import RECOMMENDER
from services.gateway.openai.schema import ChatBody, CompletionBody, ResponseFormatBody
from services.gateway.text.tier import TextLimits

ANY_OBJECT = '{"type": "object"}'
"""The schema that `json_object` stands for: callers read fields from it."""


def max_tokens_of(asked: CompletionBody | ChatBody, limits: TextLimits) -> int | None:
    """Return the most tokens of a choice, None where nothing is said. Raises InvalidRequest naming the field that says it."""
    field, max_tokens = "max_tokens", asked.max_tokens
    if isinstance(asked, ChatBody) and asked.max_completion_tokens is not None:
        field, max_tokens = "max_completion_tokens", asked.max_completion_tokens
    if max_tokens is not None and max_tokens > limits.max_tokens and asked.model != RECOMMENDER:
        raise InvalidRequest(field, f"{max_tokens} is out of range", f"send 1 to {limits.max_tokens}")
    return max_tokens


def n_of(asked: CompletionBody | ChatBody, limits: TextLimits) -> int:
    """Return the choices per prompt. Raises InvalidRequest for too many."""
    if asked.n > limits.max_choices and asked.model != RECOMMENDER:
        raise InvalidRequest("n", f"{asked.n} is out of range", f"send 1 to {limits.max_choices}")
    return asked.n


def sampling_of(asked: CompletionBody | ChatBody, num_logprobs: int | None) -> SamplingOptions:
    """Return how tokens are chosen. Raises InvalidRequest for a bias of no token."""
    return SamplingOptions(
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=max(0, asked.top_k),
        min_p=asked.min_p,
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        repetition_penalty=asked.repetition_penalty,
        logit_bias={_token_id(token): bias for token, bias in asked.logit_bias.items()},
        seed=asked.seed,
        num_logprobs=num_logprobs,
    )


def json_schema_of(wanted: ResponseFormatBody) -> str | None:
    """Return the schema that the text must satisfy, as JSON. Raises InvalidRequest where it is missing or no JSON."""
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return ANY_OBJECT
    if wanted.json_schema is None:
        raise InvalidRequest("response_format.json_schema", "missing", "send the schema, or the type json_object")
    try:
        return json.dumps(wanted.json_schema.schema_, allow_nan=False)
    except ValueError as error:
        where = "response_format.json_schema.schema"
        raise InvalidRequest(where, "a number is out of range", "send a JSON schema") from error


def is_schema_strict(wanted: ResponseFormatBody) -> bool:
    """Tell whether the schema was asked for as OpenAI's strict one, which it enforces alone."""
    return wanted.json_schema is not None and bool(wanted.json_schema.strict)


def _token_id(token: str) -> int:
    if not (token.isascii() and token.isdigit() and len(token) <= 9):
        raise InvalidRequest("logit_bias", f"{token!r:.40} is no token id", "send token ids as keys")
    return int(token)
