"""Bodies of the OpenAI door: requests, which validate, and answers, which only describe for OpenAPI.

Types and ranges are validated here, combinations of fields in parse.py. The fields are OpenAI's, and vLLM's where
OpenAI has none; as in OpenAI's API, a null is an absent field.
"""

import json
import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from services.contracts.message import Answer, InvalidField, Message
from services.contracts.text import TEMPLATE_NAMES

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


def _check_prompts(prompts: tuple[object, ...]) -> None:
    """Reject an empty or mixed list, and too many prompts; a list of numbers is one prompt."""
    if not prompts or (len(prompts) > MAX_PROMPTS and not isinstance(prompts[0], int)):
        raise InvalidField("prompt", f"{len(prompts) or 'no'} prompts", f"send 1 to {MAX_PROMPTS}")
    for index, prompt in enumerate(prompts):
        if type(prompt) is not type(prompts[0]):
            raise InvalidField(f"prompt[{index}]", "another type than prompt[0]", "send texts or token ids, not both")


def _check_variables(variables: dict[str, Any]) -> None:
    """Reject names that the door sets, and variables that are too long as JSON or contain NaN or infinity."""
    if reserved := next((name for name in variables if name in TEMPLATE_NAMES), None):
        raise InvalidField(f"chat_template_kwargs.{reserved}", "set by the door itself", "omit it")
    try:
        num_chars = len(json.dumps(variables, allow_nan=False))
    except ValueError as error:
        raise InvalidField("chat_template_kwargs", "a number is out of range", "send JSON values") from error
    if num_chars > MAX_VARIABLES_CHARS:
        fix = f"send at most {MAX_VARIABLES_CHARS}"
        raise InvalidField("chat_template_kwargs", f"{num_chars} characters of JSON", fix)


def _check_schema(schema: dict[str, Any]) -> None:
    """Reject a schema that would take long to compile."""
    num_bytes = len(json.dumps(schema, ensure_ascii=False, separators=(",", ":")).encode())
    if num_bytes > MAX_SCHEMA_BYTES:
        raise InvalidField("schema", f"{num_bytes} bytes of JSON", f"send at most {MAX_SCHEMA_BYTES}")
    levels = list(_levels(schema))
    objects = [value for level in levels for value in level if isinstance(value, dict)]
    num_keys = sum(map(len, objects))
    if num_keys > MAX_SCHEMA_KEYS:
        raise InvalidField("schema", f"{num_keys} keys in all its objects", f"send at most {MAX_SCHEMA_KEYS}")
    if len(levels) > MAX_SCHEMA_DEPTH:
        raise InvalidField("schema", f"{len(levels)} levels deep", f"nest at most {MAX_SCHEMA_DEPTH}")
    multiple = 1
    for number in (_without_point(subschema["multipleOf"]) for subschema in objects if "multipleOf" in subschema):
        multiple = math.lcm(multiple, number)
        if multiple > MAX_MULTIPLE:
            fix = f"send numbers whose least common multiple, without decimal points, is at most {MAX_MULTIPLE}"
            raise InvalidField("schema", "multipleOf is out of range", fix)


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


Stop = Annotated[str, Meta(min_length=1, max_length=256)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
PositiveInt = Annotated[int, Meta(ge=1)]
_IDS = {"type": "array", "items": {"type": "integer"}}
_MANY = {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS}
_PROMPT_FORMS = [
    {"type": "string"},
    {**_MANY, "items": {"type": "string"}},
    {**_IDS, "minItems": 1},
    {**_MANY, "items": _IDS},
]


class StreamOptionsBody(Message, frozen=True):
    """Contents of a stream in addition to the text."""

    include_usage: Annotated[bool, Meta(description="A last chunk with the tokens used, and no choice")] = False
    continuous_usage_stats: Annotated[bool, Meta(description="The tokens used so far in every chunk (vLLM's)")] = False
    include_obfuscation: Annotated[bool, Meta(description="Accepted, without effect")] = False


class JsonSchemaBody(Message, frozen=True):
    """A schema that the text must satisfy."""

    name: str = ""
    description: str = ""
    schema: Annotated[
        dict[str, Any],
        Meta(
            description=f"A JSON schema of at most {MAX_SCHEMA_BYTES} bytes, {MAX_SCHEMA_KEYS} keys and "
            f"{MAX_SCHEMA_DEPTH} levels"
        ),
    ] = msgspec.field(default_factory=dict)
    strict: Annotated[bool | None, Meta(description="Sent on to another server; here schemas are always enforced")] = (
        None
    )

    def __post_init__(self) -> None:
        """Check the size of the schema. Raises InvalidField."""
        _check_schema(self.schema)


class ResponseFormatBody(Message, frozen=True):
    """The form that the text must have."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchemaBody | None = None


class GenerationBody(Message, frozen=True, kw_only=True):
    """The settings that completions and chat share."""

    model: Annotated[str, Meta(description="As /v1/models lists it", examples=["SmolLM2-135M-Instruct"])]
    n: Annotated[int, Meta(ge=1, le=2_000, description="Choices per prompt")] = 1
    max_tokens: Annotated[PositiveInt | None, Meta(description="Per choice")] = None
    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=_MAX_TOP_K, description="vLLM's; 0 and -1: all")] = 0
    min_p: Annotated[float, Meta(ge=0, le=1, description="vLLM's")] = 0.0
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=10, description="vLLM's")] = 1.0
    logit_bias: Annotated[
        dict[str, Bias],
        Meta(
            max_length=MAX_BIASED,
            description=f"By token id, at most {MAX_BIASED}",
            extra_json_schema={"propertyNames": {"pattern": "^[0-9]{1,9}$"}},
        ),
    ] = msgspec.field(default_factory=dict)
    seed: Seed | None = None
    stop: Annotated[
        Stop | Annotated[tuple[Stop, ...], Meta(max_length=MAX_STOPS)], Meta(description=f"At most {MAX_STOPS}")
    ] = ()
    stop_token_ids: Annotated[tuple[int, ...], Meta(description="vLLM's")] = ()
    ignore_eos: Annotated[bool, Meta(description="vLLM's")] = False
    stream: bool = False
    stream_options: StreamOptionsBody = StreamOptionsBody()
    response_format: ResponseFormatBody = ResponseFormatBody()
    cache_salt: Annotated[
        str,
        Meta(
            max_length=MAX_SALT_CHARS,
            description="vLLM's: only texts of the same key and salt share cached prefixes; empty: none",
        ),
    ] = ""


class CompletionBody(GenerationBody, frozen=True, kw_only=True):
    """Complete each prompt."""

    prompt: Annotated[
        str | tuple[str | int | tuple[int, ...], ...],
        Meta(
            description="Text or token ids, one prompt or several",
            extra_json_schema={"x-forms": _PROMPT_FORMS},
        ),
    ]
    logprobs: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None,
        Meta(description="How many of the most probable tokens to return"),
    ] = None
    echo: Annotated[bool, Meta(description="Repeat the prompt before each choice")] = False

    def __post_init__(self) -> None:
        """Check numbers and the form of the prompt. Raises InvalidField."""
        super().__post_init__()
        if isinstance(self.prompt, tuple):
            _check_prompts(self.prompt)


class TextPartBody(Message, frozen=True, forbid_unknown_fields=False):
    """One part of a message; `text` is the only supported type."""

    type: Annotated[str, Meta(extra_json_schema={"enum": ["text"]})]
    text: str | None = None

    def __post_init__(self) -> None:
        """Reject images and sounds. Raises InvalidField."""
        if self.type != "text" or self.text is None:
            raise InvalidField("", f"{self.type!r:.40} is not supported", "send only parts of the type text")


class MessageBody(Message, frozen=True):
    """One message."""

    role: Annotated[
        Literal["system", "developer", "user", "assistant"],
        Meta(description="developer is the same as system", examples=["user"]),
    ]
    content: str | Annotated[tuple[TextPartBody, ...], Meta(max_length=MAX_MESSAGES)] = ""
    name: Annotated[str, Meta(description="Accepted, without effect")] = ""

    @property
    def text(self) -> str:
        """The text; parts are joined without a separator."""
        return self.content if isinstance(self.content, str) else "".join(part.text or "" for part in self.content)


class ChatBody(GenerationBody, frozen=True, kw_only=True):
    """Generate the assistant's next message, with the checkpoint's chat template."""

    messages: Annotated[tuple[MessageBody, ...], Meta(min_length=1, max_length=MAX_MESSAGES)]
    chat_template_kwargs: Annotated[
        dict[str, Any],
        Meta(description="vLLM's: variables of the chat template, by name", examples=[{"enable_thinking": False}]),
    ] = msgspec.field(default_factory=dict)
    max_completion_tokens: Annotated[PositiveInt | None, Meta(description="Replaces max_tokens")] = None
    logprobs: bool = False
    top_logprobs: Annotated[Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None, Meta(description="Needs logprobs")] = (
        None
    )

    def __post_init__(self) -> None:
        """Check numbers and the variables. Raises InvalidField."""
        super().__post_init__()
        _check_variables(self.chat_template_kwargs)


class ModelBody(Answer, frozen=True):
    """One model."""

    id: Annotated[str, Meta(examples=["SmolLM2-135M-Instruct"])]
    object: str
    created: Annotated[int, Meta(description="Unix seconds")]
    owned_by: str
    max_model_len: Annotated[int | None, Meta(description="Tokens of prompt and text together")]


class ModelsBody(Answer, frozen=True):
    """All models."""

    object: str
    data: tuple[ModelBody, ...]


class OpenAiErrorDetail(Answer, frozen=True):
    """The error with its fix, type, field and code."""

    component: ClassVar = "OpenAiErrorDetail"

    message: str
    type: Annotated[str, Meta(examples=["invalid_request_error"])]
    param: Annotated[str | None, Meta(description="The field")]
    code: Annotated[str, Meta(examples=["invalid_value"])]


class OpenAiErrorBody(Answer, frozen=True):
    """OpenAI's envelope; a stream that fails sends it as its last event."""

    error: OpenAiErrorDetail


class PromptDetailsBody(Answer, frozen=True):
    """Details of the prompt's tokens."""

    cached_tokens: Annotated[int, Meta(description="Tokens that earlier prompts of this key left in the prefix cache")]


class UsageBody(Answer, frozen=True):
    """Tokens used."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetailsBody


class ChoiceBody(Answer, frozen=True, kw_only=True, omit_defaults=True):
    """The fields that choices of both routes share."""

    index: int
    finish_reason: Annotated[str | None, Meta(description="stop or length")]
    stop_reason: Annotated[str | None, Meta(description="deadline, if the deadline ended the choice")] = None


class CompletionChoiceBody(ChoiceBody, frozen=True, kw_only=True, omit_defaults=True):
    """One continuation."""

    text: str
    logprobs: Annotated[dict[str, Any] | None, Meta(description="OpenAI's four lists")]


class ReplyBody(Answer, frozen=True):
    """The assistant's message."""

    role: str
    content: str
    refusal: Annotated[str | None, Meta(description="Null: this server does not refuse")]


class ChatChoiceBody(ChoiceBody, frozen=True, kw_only=True, omit_defaults=True):
    """One reply."""

    message: ReplyBody
    logprobs: Annotated[dict[str, Any] | None, Meta(description="`content`: one object per token")]


class TextAnswerBody(Answer, frozen=True, kw_only=True):
    """The fields that answers of both routes share."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: Annotated[str | None, Meta(description="Null: this server has none")]
    usage: UsageBody


class CompletionAnswerBody(TextAnswerBody, frozen=True, kw_only=True):
    """With `stream`, the same in chunks: `data: {...}` events with `usage` on request, then `data: [DONE]`."""

    choices: tuple[CompletionChoiceBody, ...]


class ChatAnswerBody(TextAnswerBody, frozen=True, kw_only=True):
    """With `stream`, the same in chunks: `delta` instead of `message`, then `data: [DONE]`."""

    choices: tuple[ChatChoiceBody, ...]
