"""Parses a body into a validated message. Fields without meaning here are dropped or rejected by name.

without effect        bookkeeping of OpenAI's service: dropped
not supported         would change the answer: rejected with a fix, unless its value switches the feature off
unknown               rejected, since a mistyped setting would otherwise be ignored silently
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import pydantic_core

from services.contracts.message import convert
from services.errors import InvalidRequest
from services.gateway.openai.schema import GenerationBody

B = TypeVar("B", bound=GenerationBody)

WITHOUT_EFFECT = frozenset(
    {
        *("user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "prompt_cache_options", "parallel_tool_calls", "request_id"),
        "spaces_between_special_tokens",
    }
)
"""Fields without effect on an answer."""

_TOOLS = "omit it; this server calls no tools"
NOT_SUPPORTED: Mapping[str, str] = {
    "tools": _TOOLS,
    "tool_choice": _TOOLS,
    "functions": _TOOLS,
    "function_call": _TOOLS,
    "modalities": 'omit it, or send ["text"]',
    "audio": "omit it; this server writes only text",
    "prediction": "omit it",
    "reasoning_effort": "omit it; the model has no such setting",
    "verbosity": "describe it in the prompt",
    "web_search_options": "omit it",
    "moderation": "omit it; this server does not moderate",
    "skip_special_tokens": "omit it; special tokens have no text here",
    "add_generation_prompt": "omit it; the assistant always speaks next",
    "suffix": "send only the text before the gap, as prompt",
    "best_of": "send n, and choose",
    "use_beam_search": "omit it; texts are sampled",
    "min_tokens": "send ignore_eos to write on to max_tokens",
    "prompt_logprobs": "omit it; logprobs cover only written tokens",
    "guided_json": 'send response_format {"type": "json_schema", ...}',
    "guided_regex": 'send response_format {"type": "json_schema", ...}',
    "guided_choice": 'send response_format {"type": "json_schema", ...} with an enum',
    "guided_grammar": 'send response_format {"type": "json_schema", ...}',
    "structured_outputs": 'send response_format {"type": "json_schema", ...}',
}
"""Unsupported fields of other servers, each with the alternative."""

_OFF: tuple[object, ...] = (False, 0, "", "none", "auto", [], {}, ["text"])
_OFF_VALUES: Mapping[str, tuple[object, ...]] = {
    "best_of": (*_OFF, 1),
    "skip_special_tokens": (True,),
    "web_search_options": (),
    "add_generation_prompt": (True,),
}
"""Fields whose values that match the door's behaviour are others. `{}` asks for a search of the web."""
_KEPT_NULLS = frozenset({"schema", "chat_template_kwargs"})
"""Objects whose nulls are values."""


def parse_body(kind: type[B], body: bytes) -> tuple[B, frozenset[str]]:
    """Return a validated body, and the names of the settings that were sent. Raises InvalidRequest naming the field."""
    try:
        sent = pydantic_core.from_json(body)
    except ValueError as error:
        is_deep = "recursion limit" in str(error)
        problem = "nested more than 200 levels deep" if is_deep else f"not JSON: {error}"
        raise InvalidRequest("body", problem, "send one JSON object" + " of fewer levels" * is_deep) from error
    if not isinstance(sent, dict):
        raise InvalidRequest("body", "not a JSON object", "send one JSON object")
    fields = _effective(kind, sent)
    return convert(kind, fields), frozenset(fields)


def _effective(kind: type[GenerationBody], sent: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with an effect, without nulls. Raises InvalidRequest for unsupported fields."""
    for name, fix in NOT_SUPPORTED.items():
        value = sent.get(name)
        if value is not None and value not in _OFF_VALUES.get(name, _OFF):
            raise InvalidRequest(name, "not supported here", fix)
    dropped = WITHOUT_EFFECT | NOT_SUPPORTED.keys()
    fields: dict[str, Any] = _without_nulls({name: value for name, value in sent.items() if name not in dropped})
    if "messages" in kind.__struct_fields__ and isinstance(fields.get("messages"), list):
        fields["messages"] = [_message(index, message) for index, message in enumerate(fields["messages"])]
    return fields


def _without_nulls(value: Any) -> Any:
    """Drop the nulls of an object and of nested objects, except where a null is a value."""
    if not isinstance(value, dict):
        return value
    present = {name: field for name, field in value.items() if field is not None}
    return {name: field if name in _KEPT_NULLS else _without_nulls(field) for name, field in present.items()}


def _message(index: int, message: Any) -> Any:
    """Drop a message's nulls. Raises InvalidRequest for tool fields."""
    if not isinstance(message, dict):
        return message
    for name in ("tool_calls", "function_call", "tool_call_id", "audio"):
        if message.get(name):
            raise InvalidRequest(f"messages[{index}].{name}", "not supported here", "send messages of text only")
    dropped = {"tool_calls", "refusal"}
    return {name: value for name, value in message.items() if value is not None and name not in dropped}
