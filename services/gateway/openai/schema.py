"""The OpenAI door's JSON: what it takes. Types and ranges are judged here, meaning in parse.py; answers are in answers.py.

The fields are OpenAI's, and vLLM's where OpenAI has none. A null is an absent field, as it is there.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_STOPS = 4
MAX_LOGPROBS = 20
MAX_TEXT_DEADLINE_MS = 600_000

Stop = Annotated[str, Field(min_length=1, max_length=256)]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class StreamOptionsBody(_Body):
    """What a stream tells beside the text."""

    include_usage: bool = Field(False, description="A last chunk with the tokens used, and no choice")
    continuous_usage_stats: bool = Field(False, description="The tokens used so far in every chunk (vLLM's)")
    include_obfuscation: bool = Field(False, description="Taken, without effect")


class JsonSchemaBody(BaseModel):
    """A schema that the text must satisfy."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    name: str = ""
    description: str = ""
    schema_: dict[str, Any] = Field({}, alias="schema", description="A JSON schema")
    strict: bool | None = Field(None, description="Taken, without effect: schemas always hold")


class ResponseFormatBody(_Body):
    """Which shape the text must have."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchemaBody | None = None


class _WritingBody(_Body):
    model: str = Field(description="As /v1/models lists it", examples=["SmolLM2-135M-Instruct"])
    n: int = Field(1, ge=1, le=2_000, description="Choices per prompt")
    max_tokens: int | None = Field(None, ge=1, description="Per choice")
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, description="vLLM's; 0 and -1: all")
    min_p: float = Field(0.0, ge=0, le=1, description="vLLM's")
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0, le=10, description="vLLM's")
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] = Field({}, description="By token id")
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] = Field([], description=f"At most {MAX_STOPS}")
    stop_token_ids: list[int] = Field([], description="vLLM's")
    ignore_eos: bool = Field(False, description="vLLM's")
    stream: bool = False
    stream_options: StreamOptionsBody = StreamOptionsBody()
    response_format: ResponseFormatBody = ResponseFormatBody()


class CompletionBody(_WritingBody):
    """Go on with each prompt. With the model `tailrace-recommender` a prompt is a history, and a choice is an item."""

    prompt: str | list[str] | list[int] | list[list[int]] = Field(
        description="Text or token ids, one or several; for tailrace-recommender item ids, oldest first, with spaces between"
    )
    logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="How many of the most probable tokens to name"
    )
    echo: bool = Field(False, description="Give the prompt's text before each choice")


class TextPartBody(BaseModel):
    """One part of a message; `text` is the only type there is here."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    type: str
    text: str | None = None


class MessageBody(_Body):
    """One turn."""

    role: str = Field(description="system, developer (the same), user or assistant", examples=["user"])
    content: str | list[TextPartBody] = ""
    name: str = Field("", description="Taken, without effect")


class ChatBody(_WritingBody):
    """Say what the assistant says next, in the words of the checkpoint's own chat template."""

    messages: Annotated[list[MessageBody], Field(min_length=1)]
    max_completion_tokens: int | None = Field(None, ge=1, description="As max_tokens, which it replaces")
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="Needs logprobs")
