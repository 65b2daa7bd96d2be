"""What the OpenAI door gives, as OpenAPI is to describe it. The values themselves are made in answers.py. No behaviour."""

from typing import Any

from pydantic import BaseModel, Field


class ModelBody(BaseModel):
    """One model that can be asked for."""

    id: str = Field(examples=["tailrace-recommender"])
    object: str = "model"
    created: int = Field(description="Unix seconds")
    owned_by: str = "tailrace"
    max_model_len: int | None = Field(None, description="Tokens of prompt and text together")
    bundle_version: str | None = Field(None, description="Of tailrace-recommender: the live bundle")


class ModelsBody(BaseModel):
    """All models."""

    object: str = "list"
    data: list[ModelBody]


class OpenAiErrorDetail(BaseModel):
    """What is wrong, how to mend it, and where."""

    message: str
    type: str = Field(examples=["invalid_request_error"])
    param: str | None = Field(description="The field")
    code: str = Field(examples=["invalid_value"])


class OpenAiErrorBody(BaseModel):
    """OpenAI's envelope; a stream that fails midway sends it as its last event."""

    error: OpenAiErrorDetail


class PromptDetailsBody(BaseModel):
    """Of the prompt's tokens."""

    cached_tokens: int = Field(description="Those that the prefix cache held")


class UsageBody(BaseModel):
    """Tokens used."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetailsBody


class _ChoiceBody(BaseModel):
    index: int
    finish_reason: str | None = Field(description="stop or length")
    stop_reason: str | None = Field(None, description="deadline, where that is why it ended")


class CompletionChoiceBody(_ChoiceBody):
    """One continuation."""

    text: str
    logprobs: dict[str, Any] | None = Field(None, description="OpenAI's four lists")


class ReplyBody(BaseModel):
    """What the assistant says."""

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
    """With `stream`, the same in pieces: `data: {...}` events with `usage` on request, then `data: [DONE]`."""

    choices: list[CompletionChoiceBody]


class ChatAnswerBody(_AnswerBody):
    """With `stream`, the same in pieces: `delta` in the place of `message`, then `data: [DONE]`."""

    choices: list[ChatChoiceBody]
