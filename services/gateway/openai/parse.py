"""From a body to what is asked of a writer: one TextRequest per prompt, and how the caller wants it told. Pure.

Knows the contract and OpenAI's words for it; knows no HTTP.
"""

import json
import uuid
from dataclasses import dataclass

from services.contracts.access import Caller
from services.contracts.text import ChatMessage, SamplingOptions, TextRequest
from services.errors import InvalidRequest
from services.gateway.openai.refusals import parse_body
from services.gateway.openai.schema import ChatBody, CompletionBody, ResponseFormatBody, TextPartBody
from services.gateway.text_tier import TextLimits
from services.tracing import trace_headers

RECOMMENDER = "tailrace-recommender"
"""The live bundle, under the name by which OpenAI clients ask it."""

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_MAX_PROMPTS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """What a call says beside its body. `deadline_unix_s` is when its text must be done."""

    request_id: str
    caller: Caller
    deadline_unix_s: float
    limits: TextLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is to be written, and how it is to be told. Choice c of prompt p has the index p * n + c."""

    requests: tuple[TextRequest, ...]
    stream: bool
    include_usage: bool
    continuous_usage: bool
    echoes: tuple[str, ...] = ()

    @property
    def model(self) -> str:
        """Who is to write."""
        return self.requests[0].model

    @property
    def n(self) -> int:
        """Choices per prompt."""
        return self.requests[0].n

    @property
    def num_choices(self) -> int:
        """Choices in all."""
        return self.n * len(self.requests)


def parse_completion(body: bytes, asking: Asking) -> Asked:
    """Read a body of /v1/completions. Raises InvalidRequest naming the field."""
    asked = parse_body(CompletionBody, body)
    prompts = _prompts(asked)
    if asked.echo and (asked.logprobs is not None or not all(isinstance(prompt, str) for prompt in prompts)):
        raise InvalidRequest("echo", "not supported with logprobs or token ids", "leave one of them out")
    return Asked(
        requests=tuple(
            _request(asked, asking, num_logprobs=asked.logprobs, prompt=prompt, max_tokens=asked.max_tokens)
            for prompt in prompts
        ),
        stream=asked.stream,
        include_usage=asked.stream_options.include_usage,
        continuous_usage=asked.stream_options.continuous_usage_stats,
        echoes=tuple(str(prompt) for prompt in prompts) if asked.echo else (),
    )


def parse_chat(body: bytes, asking: Asking) -> Asked:
    """Read a body of /v1/chat/completions. Raises InvalidRequest naming the field."""
    asked = parse_body(ChatBody, body)
    if asked.model == RECOMMENDER:
        raise InvalidRequest("model", f"{RECOMMENDER} does not chat", "send a history as prompt to /v1/completions")
    if asked.top_logprobs and not asked.logprobs:
        raise InvalidRequest("top_logprobs", "needs logprobs", "send logprobs true beside it")
    messages = tuple(
        ChatMessage(role=_role(turn.role, place), content=_content(turn.content, place))
        for place, turn in enumerate(asked.messages)
    )
    request = _request(
        asked,
        asking,
        num_logprobs=(asked.top_logprobs or 0) if asked.logprobs else None,
        messages=messages,
        max_tokens=asked.max_completion_tokens or asked.max_tokens,
    )
    return Asked(
        requests=(request,),
        stream=asked.stream,
        include_usage=asked.stream_options.include_usage,
        continuous_usage=asked.stream_options.continuous_usage_stats,
    )


def _request(
    asked: CompletionBody | ChatBody,
    asking: Asking,
    *,
    num_logprobs: int | None,
    max_tokens: int | None,
    prompt: str | tuple[int, ...] | None = None,
    messages: tuple[ChatMessage, ...] = (),
) -> TextRequest:
    _check_size(asked, asking.limits, max_tokens)
    return TextRequest(
        request_id=f"{asking.request_id}.{uuid.uuid4().hex}",
        model=asked.model,
        prompt=prompt,
        messages=messages,
        n=asked.n,
        max_tokens=max_tokens,
        sampling=_sampling(asked, num_logprobs),
        stop=(asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop),
        stop_token_ids=tuple(asked.stop_token_ids),
        ignore_eos=asked.ignore_eos,
        json_schema=_json_schema(asked.response_format),
        in_pieces=asked.stream,
        priority=asking.caller.priority,
        deadline_unix_s=asking.deadline_unix_s,
        trace=trace_headers(),
    )


def _check_size(asked: CompletionBody | ChatBody, limits: TextLimits, max_tokens: int | None) -> None:
    if asked.model == RECOMMENDER:
        return
    if asked.n > limits.max_choices:
        raise InvalidRequest("n", f"{asked.n} is out of range", f"send 1 to {limits.max_choices}")
    if max_tokens is not None and max_tokens > limits.max_tokens:
        raise InvalidRequest("max_tokens", f"{max_tokens} is out of range", f"send 1 to {limits.max_tokens}")


def _sampling(asked: CompletionBody | ChatBody, num_logprobs: int | None) -> SamplingOptions:
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


def _token_id(token: str) -> int:
    if not (token.isascii() and token.isdigit() and len(token) <= 9):
        raise InvalidRequest("logit_bias", f"{token!r:.40} is no token id", "send token ids as keys")
    return int(token)


def _json_schema(wanted: ResponseFormatBody) -> str | None:
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return "{}"
    if wanted.json_schema is None:
        raise InvalidRequest("response_format.json_schema", "missing", "send the schema, or the type json_object")
    return json.dumps(wanted.json_schema.schema_)


def _prompts(asked: CompletionBody) -> list[str | tuple[int, ...]]:
    """Give each prompt. A list of numbers is one prompt of token ids."""
    sent = asked.prompt
    if isinstance(sent, str):
        return [sent]
    if sent and all(isinstance(part, int) for part in sent):
        return [tuple(part for part in sent if isinstance(part, int))]
    prompts = [part if isinstance(part, str) else tuple(part) for part in sent if not isinstance(part, int)]
    if not 1 <= len(prompts) <= _MAX_PROMPTS:
        raise InvalidRequest("prompt", f"{len(prompts)} prompts", f"send 1 to {_MAX_PROMPTS}")
    return prompts


def _role(role: str, place: int) -> str:
    if role not in _ROLES:
        raise InvalidRequest(f"messages[{place}].role", f"{role!r:.40} is not supported", f"send {', '.join(_ROLES)}")
    return _ROLES[role]


def _content(content: str | list[TextPartBody], place: int) -> str:
    """Give a message's text; parts are put together as they are."""
    if isinstance(content, str):
        return content
    for number, part in enumerate(content):
        if part.type != "text" or part.text is None:
            where = f"messages[{place}].content[{number}]"
            raise InvalidRequest(where, f"{part.type!r:.40} is not supported", "send parts of the type text alone")
    return "".join(part.text or "" for part in content)
