"""Converts a validated body to a CompletionCall: prompts or messages, sampling, length and response format. Pure.

Knows the text contract and OpenAI's fields; knows no HTTP.
"""

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.contracts.access import Caller
from services.contracts.text import ChatMessage, SamplingOptions, TextRequest
from services.errors import InvalidRequest
from services.gateway.openai.body import parse_body
from services.gateway.openai.schema import (
    ChatBody,
    CompletionBody,
    ResponseFormatBody,
)
from services.gateway.text.tier import TextLimits
from services.observability.tracing import trace_headers

ANY_OBJECT = '{"type": "object"}'
"""The schema of the `json_object` response format."""
_ROLES = {"developer": "system"}
"""Roles with another name in chat templates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallContext:
    """The parts of a call outside its body. The text must be done at `deadline_unix_s`."""

    request_id: str
    caller: Caller
    deadline_unix_s: float
    limits: TextLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionCall:
    """A parsed body: one TextRequest per prompt, and the form of the answer.

    Choice c of prompt p has the index p * n + c.
    """

    requests: tuple[TextRequest, ...]
    stream: bool
    include_usage: bool
    continuous_usage: bool
    echoes: tuple[str, ...] = ()

    @property
    def model(self) -> str:
        return self.requests[0].model

    @property
    def n(self) -> int:
        """Choices per prompt."""
        return self.requests[0].n

    @property
    def num_choices(self) -> int:
        """Choices of all prompts."""
        return self.n * len(self.requests)

    def echo_of(self, index: int) -> str:
        """Return the prompt to repeat before this choice; empty without echo."""
        return self.echoes[index // self.n] if self.echoes else ""


def parse_completion(content: bytes, context: CallContext) -> CompletionCall:
    """Parse a body of /v1/completions. Raises InvalidRequest naming the field."""
    body, sent = parse_body(CompletionBody, content)
    prompts = _prompts(body)
    if body.echo and (body.logprobs is not None or not all(isinstance(prompt, str) for prompt in prompts)):
        raise InvalidRequest("echo", "not supported with logprobs or token ids", "leave one of them out")
    requests = tuple(_text_request(body, sent, context, body.logprobs, prompt=prompt) for prompt in prompts)
    return _completion_call(body, requests, echoes=tuple(str(prompt) for prompt in prompts) if body.echo else ())


def parse_chat(content: bytes, context: CallContext) -> CompletionCall:
    """Parse a body of /v1/chat/completions. Raises InvalidRequest naming the field."""
    body, sent = parse_body(ChatBody, content)
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs", "needs logprobs", "send logprobs true too")
    num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    messages = tuple(
        ChatMessage(role=_ROLES.get(message.role, message.role), content=message.text) for message in body.messages
    )
    request = _text_request(body, sent, context, num_logprobs, messages=messages, variables=body.chat_template_kwargs)
    return _completion_call(body, (request,))


def _completion_call(
    body: CompletionBody | ChatBody, requests: tuple[TextRequest, ...], echoes: tuple[str, ...] = ()
) -> CompletionCall:
    return CompletionCall(
        requests=requests,
        stream=body.stream,
        include_usage=body.stream_options.include_usage,
        continuous_usage=body.stream_options.continuous_usage_stats,
        echoes=echoes,
    )


def _text_request(
    body: CompletionBody | ChatBody,
    sent: frozenset[str],
    context: CallContext,
    num_logprobs: int | None,
    *,
    prompt: str | tuple[int, ...] | None = None,
    messages: tuple[ChatMessage, ...] = (),
    variables: Mapping[str, Any] | None = None,
) -> TextRequest:
    return TextRequest(
        request_id=f"{context.request_id}.{uuid.uuid4().hex}",
        model=body.model,
        key_id=context.caller.key_id,
        cache_salt=body.cache_salt,
        prompt=prompt,
        messages=messages,
        chat_template_kwargs=variables or {},
        n=_n(body, context.limits),
        max_tokens=_max_tokens(body, context.limits),
        sampling=_sampling(body, num_logprobs),
        stop=(body.stop,) if isinstance(body.stop, str) else body.stop,
        stop_token_ids=body.stop_token_ids,
        ignore_eos=body.ignore_eos,
        json_schema=_json_schema(body.response_format),
        is_schema_strict=_is_schema_strict(body.response_format),
        in_pieces=body.stream,
        priority=context.caller.priority,
        tenant=context.caller.tenant,
        weight=context.caller.weight,
        deadline_unix_s=context.deadline_unix_s,
        settings_sent=sent,
        trace=trace_headers(),
    )


def _prompts(body: CompletionBody) -> tuple[str | tuple[int, ...], ...]:
    """Return each prompt; a list of numbers is one prompt of token ids."""
    sent = body.prompt
    return (sent,) if isinstance(sent, str) or isinstance(sent[0], int) else sent  # type: ignore[return-value]


def _max_tokens(body: CompletionBody | ChatBody, limits: TextLimits) -> int | None:
    """Return the maximum tokens of a choice; None if not sent. Raises InvalidRequest naming the field that was sent."""
    field, max_tokens = "max_tokens", body.max_tokens
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        field, max_tokens = "max_completion_tokens", body.max_completion_tokens
    if max_tokens is not None and max_tokens > limits.max_tokens:
        raise InvalidRequest(field, f"{max_tokens} is out of range", f"send 1 to {limits.max_tokens}")
    return max_tokens


def _n(body: CompletionBody | ChatBody, limits: TextLimits) -> int:
    """Return the choices per prompt. Raises InvalidRequest for too many."""
    if body.n > limits.max_choices:
        raise InvalidRequest("n", f"{body.n} is out of range", f"send 1 to {limits.max_choices}")
    return body.n


def _sampling(body: CompletionBody | ChatBody, num_logprobs: int | None) -> SamplingOptions:
    """Return the sampling options. Raises InvalidRequest for a bias whose key is not a token id."""
    return SamplingOptions(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=max(0, body.top_k),
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias={_token_id(token): bias for token, bias in body.logit_bias.items()},
        seed=body.seed,
        num_logprobs=num_logprobs,
    )


def _token_id(token: str) -> int:
    if not (token.isascii() and token.isdigit() and len(token) <= 9):
        raise InvalidRequest("logit_bias", f"{token!r:.40} is no token id", "send token ids as keys")
    return int(token)


def _json_schema(response_format: ResponseFormatBody) -> str | None:
    """Return the schema that the text must satisfy, as JSON. Raises InvalidRequest if it is missing or invalid JSON."""
    if response_format.type == "text":
        return None
    if response_format.type == "json_object":
        return ANY_OBJECT
    if response_format.json_schema is None:
        raise InvalidRequest("response_format.json_schema", "missing", "send the schema, or the type json_object")
    try:
        return json.dumps(response_format.json_schema.schema, allow_nan=False)
    except ValueError as error:
        where = "response_format.json_schema.schema"
        raise InvalidRequest(where, "a number is out of range", "send a JSON schema") from error


def _is_schema_strict(response_format: ResponseFormatBody) -> bool:
    """Return whether the schema was sent with OpenAI's `strict`, the only kind that OpenAI enforces."""
    return response_format.json_schema is not None and bool(response_format.json_schema.strict)
