"""The request body for another OpenAI-compatible server. Pure.

A setting at its default is left out unless the caller sent it: not every server knows all settings, and a value that the
caller sent must not become the server's default, which in vLLM is the checkpoint's.
"""

import pydantic_core

from services.contracts.text import SamplingOptions, TextRequest
from services.gateway.openai.chunks import Json
from services.gateway.openai.parse import ANY_OBJECT

_MAX_COMPLETION_TOKENS = "max_completion_tokens"
"""OpenAI's newer name of `max_tokens`: its reasoning models accept only this one, other servers know the older one."""
_DEFAULT = SamplingOptions()
_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
)


def body_of(request: TextRequest) -> Json:
    """Return the request's body."""
    body: Json = {"model": request.model, "stream": True, "stream_options": {"include_usage": True}}
    sampling = request.sampling
    body |= {name: getattr(sampling, name) for name in _SAMPLING if _is_set(request, name)}
    optional = {
        "n": request.n if request.n > 1 else None,
        _MAX_COMPLETION_TOKENS if _MAX_COMPLETION_TOKENS in request.settings_sent else "max_tokens": request.max_tokens,
        "stop": list(request.stop),
        "stop_token_ids": list(request.stop_token_ids),
        "ignore_eos": request.ignore_eos,
        "logit_bias": {str(token): bias for token, bias in sampling.logit_bias.items()},
        "response_format": _response_format(request),
    }
    return body | {name: value for name, value in optional.items() if value} | _route_fields(request)


def _is_set(request: TextRequest, name: str) -> bool:
    return name in request.settings_sent or getattr(request.sampling, name) != getattr(_DEFAULT, name)


def _route_fields(request: TextRequest) -> Json:
    """Return the fields that differ between the two routes: prompt or messages, and logprobs."""
    num_top = request.sampling.num_logprobs
    if request.messages:
        messages = [{"role": message.role, "content": message.content} for message in request.messages]
        logprobs = {} if num_top is None else {"logprobs": True, "top_logprobs": num_top}
        variables = dict(request.chat_template_kwargs)
        return {"messages": messages, **logprobs, **({"chat_template_kwargs": variables} if variables else {})}
    prompt = request.prompt if isinstance(request.prompt, str) else list(request.prompt or ())
    return {"prompt": prompt, **({} if num_top is None else {"logprobs": num_top})}


def _response_format(request: TextRequest) -> Json | None:
    if request.json_schema is None:
        return None
    if request.json_schema == ANY_OBJECT:
        return {"type": "json_object"}
    schema = {"name": "answer", "schema": pydantic_core.from_json(request.json_schema)}
    return {"type": "json_schema", "json_schema": schema | ({"strict": True} if request.is_schema_strict else {})}
