"""From a body to what is asked of a writer. Pure.

Knows the contract and OpenAI's words for it; knows no HTTP.
"""

import uuid
from collections.abc import Mapping
from typing import Any

from services.contracts.text import ChatMessage, TextRequest
from services.errors import InvalidRequest
from services.gateway.openai.call import RECOMMENDER, Asking, CompletionCall
from services.gateway.openai.prompts import messages_of, prompts_of, variables_of
from services.gateway.openai.refusals import parse_body
from services.gateway.openai.sampling import is_schema_strict, json_schema_of, max_tokens_of, n_of, sampling_of
from services.gateway.openai.schema import ChatBody, CompletionBody
from services.observability.tracing import trace_headers


def parse_completion(body: bytes, asking: Asking) -> CompletionCall:
    """Read a body of /v1/completions. Raises InvalidRequest naming the field."""
    asked = parse_body(CompletionBody, body)
    prompts = prompts_of(asked)
    if asked.echo and (asked.logprobs is not None or not all(isinstance(prompt, str) for prompt in prompts)):
        raise InvalidRequest("echo", "not supported with logprobs or token ids", "leave one of them out")
    requests = (_request(asked, asking, asked.logprobs, prompt=prompt) for prompt in prompts)
    return _told_as(asked, tuple(requests), echoes=tuple(str(prompt) for prompt in prompts) if asked.echo else ())


def parse_chat(body: bytes, asking: Asking) -> CompletionCall:
    """Read a body of /v1/chat/completions. Raises InvalidRequest naming the field."""
    asked = parse_body(ChatBody, body)
    if asked.model == RECOMMENDER:
        raise InvalidRequest("model", f"{RECOMMENDER} does not chat", "send a history as prompt to /v1/completions")
    if asked.top_logprobs and not asked.logprobs:
        raise InvalidRequest("top_logprobs", "needs logprobs", "send logprobs true beside it")
    num_logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
    variables = variables_of(asked)
    return _told_as(asked, (_request(asked, asking, num_logprobs, messages=messages_of(asked), variables=variables),))


def _told_as(
    asked: CompletionBody | ChatBody, requests: tuple[TextRequest, ...], echoes: tuple[str, ...] = ()
) -> CompletionCall:
    return CompletionCall(
        requests=requests,
        stream=asked.stream,
        include_usage=asked.stream_options.include_usage,
        continuous_usage=asked.stream_options.continuous_usage_stats,
        echoes=echoes,
    )


def _request(
    asked: CompletionBody | ChatBody,
    asking: Asking,
    num_logprobs: int | None,
    *,
    prompt: str | tuple[int, ...] | None = None,
    messages: tuple[ChatMessage, ...] = (),
    variables: Mapping[str, Any] | None = None,
) -> TextRequest:
    return TextRequest(
        request_id=f"{asking.request_id}.{uuid.uuid4().hex}",
        model=asked.model,
        prompt=prompt,
        messages=messages,
        chat_template_kwargs=variables or {},
        n=n_of(asked, asking.limits),
        max_tokens=max_tokens_of(asked, asking.limits),
        sampling=sampling_of(asked, num_logprobs),
        stop=(asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop),
        stop_token_ids=tuple(asked.stop_token_ids),
        ignore_eos=asked.ignore_eos,
        json_schema=json_schema_of(asked.response_format),
        is_schema_strict=is_schema_strict(asked.response_format),
        in_pieces=asked.stream,
        priority=asking.caller.priority,
        deadline_unix_s=asking.deadline_unix_s,
        settings_sent=frozenset(asked.model_fields_set),
        trace=trace_headers(),
    )
