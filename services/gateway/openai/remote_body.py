"""A TextRequest as the body that another server takes. Pure.

A setting at its default is left out unless the caller sent it: not every server knows all, and what a caller said is not to
become the server's own default, which is the checkpoint's where that is vLLM.
"""

import pydantic_core

from services.contracts.text import SamplingOptions, TextRequest
from services.gateway.openai.answers import Plain
from services.gateway.openai.sampling import ANY_OBJECT

_NEWER_LIMIT = "max_completion_tokens"
"""OpenAI's name for what was `max_tokens`: its reasoning models take this one only, other servers know the older one."""
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


def body_of(request: TextRequest) -> Plain:
    """Return the body."""
    body: Plain = {"model": request.model, "stream": True, "stream_options": {"include_usage": True}}
    sampling = request.sampling
    body |= {name: getattr(sampling, name) for name in _SAMPLING if _is_said(request, name)}
    optional = {
        "n": request.n if request.n > 1 else None,
        _NEWER_LIMIT if _NEWER_LIMIT in request.settings_sent else "max_tokens": request.max_tokens,
        "stop": list(request.stop),
        "stop_token_ids": list(request.stop_token_ids),
        "ignore_eos": request.ignore_eos,
        "logit_bias": {str(token): bias for token, bias in sampling.logit_bias.items()},
        "response_format": _response_format(request),
    }
    return body | {name: value for name, value in optional.items() if value} | _asked(request)


def _is_said(request: TextRequest, name: str) -> bool:
    return name in request.settings_sent or getattr(request.sampling, name) != getattr(_DEFAULT, name)


def _asked(request: TextRequest) -> Plain:
    """Return what differs between the two routes: the prompt, and how logprobs are asked for."""
    num_top = request.sampling.num_logprobs
    if request.messages:
        turns = [{"role": turn.role, "content": turn.content} for turn in request.messages]
        logprobs = {} if num_top is None else {"logprobs": True, "top_logprobs": num_top}
        variables = dict(request.chat_template_kwargs)
        return {"messages": turns, **logprobs, **({"chat_template_kwargs": variables} if variables else {})}
    prompt = request.prompt if isinstance(request.prompt, str) else list(request.prompt or ())
    return {"prompt": prompt, **({} if num_top is None else {"logprobs": num_top})}


def _response_format(request: TextRequest) -> Plain | None:
    if request.json_schema is None:
        return None
    if request.json_schema == ANY_OBJECT:
        return {"type": "json_object"}
    schema = {"name": "answer", "schema": pydantic_core.from_json(request.json_schema)}
    return {"type": "json_schema", "json_schema": schema | ({"strict": True} if request.is_schema_strict else {})}
