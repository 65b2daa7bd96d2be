"""From a body's bytes to the fields that mean something here; whatever else was sent is refused by name, with the fix.

without effect        bookkeeping of OpenAI's own service: dropped
not supported         would change the answer, so that dropping it would be a lie: refused, unless it says "off"
unknown               refused, since a mistyped setting would be silently ignored otherwise
"""

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import pydantic_core
from pydantic import BaseModel, ValidationError

from services.errors import InvalidRequest
from services.gateway.call.field_path import field_path

B = TypeVar("B", bound=BaseModel)

WITHOUT_EFFECT = frozenset(
    {
        *("user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "prompt_cache_options", "parallel_tool_calls", "request_id", "cache_salt"),
        "spaces_between_special_tokens",
    }
)
"""Fields that change no answer of ours."""

_TOOLS = "leave it out; nothing is called from here"
NOT_SUPPORTED: Mapping[str, str] = {
    "tools": _TOOLS,
    "tool_choice": _TOOLS,
    "functions": _TOOLS,
    "function_call": _TOOLS,
    "modalities": 'leave it out, or send ["text"]',
    "audio": "leave it out; text is all that is written here",
    "prediction": "leave it out",
    "reasoning_effort": "leave it out; the model writes what it writes",
    "verbosity": "say it in the prompt",
    "web_search_options": "leave it out",
    "moderation": "leave it out; nothing is moderated here",
    "skip_special_tokens": "leave it out; special tokens stand for no text here",
    "add_generation_prompt": "leave it out; the assistant always speaks next",
    "suffix": "send what stands before the text alone, as prompt",
    "best_of": "send n, and choose",
    "use_beam_search": "leave it out; beams are for the model tailrace-recommender",
    "min_tokens": "send ignore_eos to write on to max_tokens",
    "prompt_logprobs": "leave it out; logprobs are for what is written",
    "guided_json": 'send response_format {"type": "json_schema", ...}',
    "guided_regex": 'send response_format {"type": "json_schema", ...}',
    "guided_choice": 'send response_format {"type": "json_schema", ...} with an enum',
    "guided_grammar": 'send response_format {"type": "json_schema", ...}',
    "structured_outputs": 'send response_format {"type": "json_schema", ...}',
}
"""Fields that others know, each with what to do instead."""

_OFF: tuple[object, ...] = (False, 0, "", "none", "auto", [], {}, ["text"])
_MEANS_OFF: Mapping[str, tuple[object, ...]] = {
    "best_of": (*_OFF, 1),
    "skip_special_tokens": (True,),
    "add_generation_prompt": (True,),
}
"""Fields that say in words of their own that nothing else is wanted than what is done here."""
_AS_IT_IS = frozenset({"schema", "chat_template_kwargs"})
"""Objects whose nulls are values."""
_TYPE_NAME = re.compile(r"^(str|int|float|bool|dict|constrained-str|list\[.*|.*\[.*\].*)$")


def parse_body(kind: type[B], body: bytes) -> B:
    """Read a body. Raises InvalidRequest naming the field."""
    try:
        sent = pydantic_core.from_json(body)
    except ValueError as error:
        raise InvalidRequest("body", "not JSON", "send one JSON object") from error
    if not isinstance(sent, dict):
        raise InvalidRequest("body", "not a JSON object", "send one JSON object")
    try:
        return kind.model_validate(_meant(kind, sent))
    except ValidationError as error:
        raise _refusal(error) from error


def _meant(kind: type[BaseModel], sent: dict[str, Any]) -> dict[str, Any]:
    """Leave out what is null or without effect. Raises InvalidRequest for what is not supported."""
    for name, fix in NOT_SUPPORTED.items():
        value = sent.get(name)
        if value is not None and value not in _MEANS_OFF.get(name, _OFF):
            raise InvalidRequest(name, "not supported here", fix)
    dropped = WITHOUT_EFFECT | NOT_SUPPORTED.keys()
    meant: dict[str, Any] = _without_nulls({name: value for name, value in sent.items() if name not in dropped})
    if unknown := next((name for name in meant if name not in kind.model_fields), None):
        raise InvalidRequest(unknown, "unknown", f"the fields are {', '.join(sorted(kind.model_fields))}")
    if "messages" in kind.model_fields and isinstance(meant.get("messages"), list):
        meant["messages"] = [_turn(place, turn) for place, turn in enumerate(meant["messages"])]
    return meant


def _without_nulls(value: Any) -> Any:
    """Leave out the nulls of an object and of the objects in it, but not of those whose nulls are values."""
    if not isinstance(value, dict):
        return value
    return {name: one if name in _AS_IT_IS else _without_nulls(one) for name, one in value.items() if one is not None}


def _turn(place: int, turn: Any) -> Any:
    """Leave out a message's nulls. Raises InvalidRequest for what only tools need."""
    if not isinstance(turn, dict):
        return turn
    for name in ("tool_calls", "function_call", "tool_call_id", "audio"):
        if turn.get(name):
            raise InvalidRequest(f"messages[{place}].{name}", "not supported here", "send messages of text alone")
    return {name: value for name, value in turn.items() if value is not None and name not in {"tool_calls", "refusal"}}


def _refusal(error: ValidationError) -> InvalidRequest:
    found = error.errors(include_url=False, include_context=False, include_input=False)
    first = max(found, key=lambda one: len(_places(one["loc"]))) if len(found) > 1 else found[0]
    field, message = field_path(_places(first["loc"])), first["msg"]
    if first["type"] == "extra_forbidden":
        return InvalidRequest(field, "unknown", "leave it out")
    if first["type"] == "missing":
        return InvalidRequest(field, "missing", f"send {field}")
    return InvalidRequest(field, "wrong type or value", message.replace("Input should", "it should"))


def _places(location: tuple[Any, ...]) -> list[Any]:
    """Leave out the names of types by which pydantic tells alternatives apart."""
    return [part for part in location if isinstance(part, int) or not _TYPE_NAME.match(part)]
