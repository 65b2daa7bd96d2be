"""Bodies of the OpenAI door: request models, which validate, and answer models, which only describe for OpenAPI.

Types and ranges are validated here, combinations of fields in parse.py. The fields are OpenAI's, and vLLM's where
OpenAI has none; as in OpenAI's API, a null is an absent field. Lists are validated up to their first error: reporting
all errors of a long list would take seconds.
"""

import json
import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Annotated, Any, Literal, TypeVar

import pydantic_core
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

MAX_STOPS = 4
MAX_LOGPROBS = 20
MAX_PROMPTS = 64
MAX_MESSAGES = 2_048
MAX_BIASED = 1_024
MAX_VARIABLES_CHARS = 8_192
MAX_SALT_CHARS = 256
MAX_SCHEMA_BYTES = 65_536
MAX_SCHEMA_KEYS = 2_000
MAX_SCHEMA_DEPTH = 64
MAX_MULTIPLE = 10_000
"""Limit of the least common multiple of all `multipleOf` in a schema, without decimal points: an automaton with that
many states is built in memory."""
MAX_TEXT_DEADLINE_MS = 600_000
_MAX_TOP_K = 2**31 - 1
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""The roles of messages, and their names in chat templates."""

T = TypeVar("T")


def _few_prompts(prompt: object) -> object:
    """Reject too many prompts before validating each; a list of numbers is one prompt."""
    if isinstance(prompt, list) and len(prompt) > MAX_PROMPTS and not isinstance(prompt[0], int):
        raise PydanticCustomError("too_long", f"{len(prompt)} prompts; send 1 to {MAX_PROMPTS}")
    return prompt


def _few_biased(logit_bias: object) -> object:
    if isinstance(logit_bias, dict) and len(logit_bias) > MAX_BIASED:
        raise PydanticCustomError("too_long", f"{len(logit_bias)} tokens; send at most {MAX_BIASED}")
    return logit_bias


def _small_variables(variables: dict[str, Any]) -> dict[str, Any]:
    """Reject variables that are too long as JSON, or contain NaN or infinity, which JSON lacks."""
    try:
        num_chars = len(json.dumps(variables, allow_nan=False))
    except ValueError as error:
        raise PydanticCustomError("not_json", "a number is out of range; send JSON values") from error
    if num_chars > MAX_VARIABLES_CHARS:
        raise PydanticCustomError("too_long", f"{num_chars} characters of JSON; send at most {MAX_VARIABLES_CHARS}")
    return variables


def _small_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Reject a schema that would take long to compile."""
    num_bytes = len(pydantic_core.to_json(schema))
    if num_bytes > MAX_SCHEMA_BYTES:
        raise _too_large(f"{num_bytes} bytes of JSON", f"send at most {MAX_SCHEMA_BYTES}")
    levels = list(_levels(schema))
    objects = [value for level in levels for value in level if isinstance(value, dict)]
    num_keys = sum(map(len, objects))
    if num_keys > MAX_SCHEMA_KEYS:
        raise _too_large(f"{num_keys} keys in all its objects", f"send at most {MAX_SCHEMA_KEYS}")
    if len(levels) > MAX_SCHEMA_DEPTH:
        raise _too_large(f"{len(levels)} levels deep", f"nest at most {MAX_SCHEMA_DEPTH}")
    multiple = 1
    for number in (_without_point(one["multipleOf"]) for one in objects if "multipleOf" in one):
        multiple = math.lcm(multiple, number)
        if multiple > MAX_MULTIPLE:
            fix = f"send numbers whose least common multiple, decimal points left out, is at most {MAX_MULTIPLE}"
            raise _too_large("multipleOf is out of range", fix)
    return schema


def _levels(schema: dict[str, Any]) -> Iterator[list[Any]]:
    """Yield the objects and lists of each level."""
    level: list[Any] = [schema]
    while level:
        yield level
        children = (value.values() if isinstance(value, dict) else value for value in level)
        level = [child for values in children for child in values if isinstance(child, dict | list)]


def _without_point(number: object) -> int:
    """Return a number without its decimal point: 25 for 0.25.

    Returns 1 for values that llguidance rejects: anything but a number above 0.
    """
    if isinstance(number, float) and 0 < number < math.inf:
        return int(f"{Decimal(repr(number)).normalize():f}".replace(".", ""))
    return number if isinstance(number, int) and number > 0 else 1


def _too_large(problem: str, fix: str) -> PydanticCustomError:
    return PydanticCustomError("too_long", f"{problem}; {fix}")


def _describe_prompt(schema: dict[str, Any]) -> None:
    """Add the checks of parse.py to the JSON schema: no empty list, and few prompts.

    A list of numbers is one prompt.
    """
    for form in schema["anyOf"]:
        if form["type"] == "array":
            form["minItems"] = 1
            if form["items"]["type"] != "integer":
                form["maxItems"] = MAX_PROMPTS


Quick = Annotated[list[T], Field(fail_fast=True)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]
Prompt = Annotated[str | Quick[str] | Quick[int] | Quick[Quick[int]], BeforeValidator(_few_prompts)]
Bias = Annotated[float, Field(ge=-100, le=100)]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class StreamOptionsBody(_Body):
    """Contents of a stream in addition to the text."""

    include_usage: bool = Field(False, description="A last chunk with the tokens used, and no choice")
    continuous_usage_stats: bool = Field(False, description="The tokens used so far in every chunk (vLLM's)")
    include_obfuscation: bool = Field(False, description="Accepted, without effect")


class JsonSchemaBody(BaseModel):
    """A schema that the text must satisfy."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    name: str = ""
    description: str = ""
    schema_: Annotated[dict[str, Any], AfterValidator(_small_schema)] = Field(
        {},
        alias="schema",
        description=f"A JSON schema of at most {MAX_SCHEMA_BYTES} bytes, {MAX_SCHEMA_KEYS} keys and "
        f"{MAX_SCHEMA_DEPTH} levels",
    )
    strict: bool | None = Field(None, description="Sent on to another server; here schemas are always enforced")


class ResponseFormatBody(_Body):
    """The form that the text must have."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchemaBody | None = None


class _GenerationBody(_Body):
    model: str = Field(description="As /v1/models lists it", examples=["SmolLM2-135M-Instruct"])
    n: int = Field(1, ge=1, le=2_000, description="Choices per prompt")
    max_tokens: int | None = Field(None, ge=1, description="Per choice")
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, le=_MAX_TOP_K, description="vLLM's; 0 and -1: all")
    min_p: float = Field(0.0, ge=0, le=1, description="vLLM's")
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0, le=10, description="vLLM's")
    logit_bias: Annotated[dict[str, Bias], BeforeValidator(_few_biased)] = Field(
        {},
        description=f"By token id, at most {MAX_BIASED}",
        json_schema_extra={"propertyNames": {"pattern": "^[0-9]{1,9}$"}, "maxProperties": MAX_BIASED},
    )
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Stop | Annotated[Quick[Stop], Field(max_length=MAX_STOPS)] = Field([], description=f"At most {MAX_STOPS}")
    stop_token_ids: Quick[int] = Field([], description="vLLM's")
    ignore_eos: bool = Field(False, description="vLLM's")
    stream: bool = False
    stream_options: StreamOptionsBody = StreamOptionsBody()
    response_format: ResponseFormatBody = ResponseFormatBody()
    cache_salt: Annotated[str, Field(max_length=MAX_SALT_CHARS)] = Field(
        "", description="vLLM's: only texts of the same key and salt share cached prefixes; empty: none"
    )


class CompletionBody(_GenerationBody):
    """Complete each prompt."""

    prompt: Prompt = Field(json_schema_extra=_describe_prompt, description="Text or token ids, one prompt or several")
    logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="How many of the most probable tokens to return"
    )
    echo: bool = Field(False, description="Repeat the prompt before each choice")


class TextPartBody(BaseModel):
    """One part of a message; `text` is the only supported type."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    type: str = Field(json_schema_extra={"enum": ["text"]})
    text: str | None = None


class MessageBody(_Body):
    """One message."""

    role: str = Field(
        description="developer is the same as system", examples=["user"], json_schema_extra={"enum": list(ROLES)}
    )
    content: str | Annotated[Quick[TextPartBody], Field(max_length=MAX_MESSAGES)] = ""
    name: str = Field("", description="Accepted, without effect")


class ChatBody(_GenerationBody):
    """Generate the assistant's next message, with the checkpoint's chat template."""

    messages: Annotated[Quick[MessageBody], Field(min_length=1, max_length=MAX_MESSAGES)]
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_small_variables)] = Field(
        {}, description="vLLM's: variables of the chat template, by name", examples=[{"enable_thinking": False}]
    )
    max_completion_tokens: int | None = Field(None, ge=1, description="Replaces max_tokens")
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="Needs logprobs")


class ModelBody(BaseModel):
    """One model."""

    id: str = Field(examples=["SmolLM2-135M-Instruct"])
    object: str = "model"
    created: int = Field(description="Unix seconds")
    owned_by: str = "tailrace"
    max_model_len: int | None = Field(None, description="Tokens of prompt and text together")


class ModelsBody(BaseModel):
    """All models."""

    object: str = "list"
    data: list[ModelBody]


class OpenAiErrorDetail(BaseModel):
    """The error with its fix, type, field and code."""

    model_config = ConfigDict(extra="forbid")

    message: str
    type: str = Field(examples=["invalid_request_error"])
    param: str | None = Field(description="The field")
    code: str = Field(examples=["invalid_value"])


class OpenAiErrorBody(BaseModel):
    """OpenAI's envelope; a stream that fails sends it as its last event."""

    model_config = ConfigDict(extra="forbid")

    error: OpenAiErrorDetail


class PromptDetailsBody(BaseModel):
    """Details of the prompt's tokens."""

    cached_tokens: int = Field(description="Tokens that earlier prompts of this key left in the prefix cache")


class UsageBody(BaseModel):
    """Tokens used."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetailsBody


class _ChoiceBody(BaseModel):
    index: int
    finish_reason: str | None = Field(description="stop or length")
    stop_reason: str | None = Field(None, description="deadline, if the deadline ended the choice")


class CompletionChoiceBody(_ChoiceBody):
    """One continuation."""

    text: str
    logprobs: dict[str, Any] | None = Field(None, description="OpenAI's four lists")


class ReplyBody(BaseModel):
    """The assistant's message."""

    role: str = "assistant"
    content: str


class ChatChoiceBody(_ChoiceBody):
    """One reply."""

    message: ReplyBody
    logprobs: dict[str, Any] | None = Field(None, description="`content`: one object per token")


class _AnswerBody(BaseModel):
    id: str
    object: str
    created: int
    model: str
    usage: UsageBody


class CompletionAnswerBody(_AnswerBody):
    """With `stream`, the same in chunks: `data: {...}` events with `usage` on request, then `data: [DONE]`."""

    choices: list[CompletionChoiceBody]


class ChatAnswerBody(_AnswerBody):
    """With `stream`, the same in chunks: `delta` instead of `message`, then `data: [DONE]`."""

    choices: list[ChatChoiceBody]
