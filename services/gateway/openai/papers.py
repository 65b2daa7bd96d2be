"""How OpenAPI describes the OpenAI door: its bodies, its answers, its refusals. Knows the schemas and no behaviour."""

from typing import Any

from pydantic import BaseModel, Field

from services.gateway.openai.schema import ChatBody, CompletionBody

REF = "#/components/schemas/{model}"
BODIES: tuple[type[BaseModel], ...] = (CompletionBody, ChatBody)
"""The bodies that the door parses itself, so that FastAPI cannot see them."""


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


_REFUSALS = {
    400: "The body is wrong; the message says which field, and the fix",
    401: "No valid API key",
    403: "The key lacks the scope text",
    404: "There is no such model",
    413: "The body is too large",
    429: "Overloaded, or a quota is used up; see Retry-After",
    503: "The text writer is away; see Retry-After",
    504: "The deadline passed before the first token",
}
_HEADERS = [
    {
        "name": "X-Deadline-Ms",
        "in": "header",
        "schema": {"type": "integer", "minimum": 1, "maximum": 600_000},
        "description": "Milliseconds from arrival; what is written by then is the text",
    },
    {
        "name": "X-Request-Id",
        "in": "header",
        "schema": {"type": "string", "maxLength": 256},
        "description": "Echoed, logged, and part of the answer's id",
    },
]


def doc_of(path: str) -> dict[str, Any]:
    """Give the arguments by which FastAPI documents the route at this path."""
    match path:
        case "/v1/completions":
            example = {"model": "tailrace-recommender", "prompt": "50 181 258", "n": 3}
            return _doc("Write on, or rank what follows", CompletionAnswerBody, CompletionBody, example)
        case "/v1/chat/completions":
            message = {"role": "user", "content": "Name a river."}
            example = {"model": "SmolLM2-135M-Instruct", "messages": [message], "max_tokens": 16}
            return _doc("Answer in a chat", ChatAnswerBody, ChatBody, example)
        case "/health":
            return {"summary": "Tell that the process lives"}
        case "/v1/models":
            return {"summary": "List the models", "responses": {200: {"model": ModelsBody}, **_refused(401, 403, 503)}}
        case _:
            return {"summary": "Tell of a model", "responses": {200: {"model": ModelBody}, **_refused(401, 403, 404)}}


def _refused(*statuses: int) -> dict[int, dict[str, Any]]:
    return {status: {"model": OpenAiErrorBody, "description": _REFUSALS[status]} for status in statuses}


def _doc(summary: str, answer: type[BaseModel], body: type[BaseModel], example: dict[str, Any]) -> dict[str, Any]:
    schema = {"$ref": REF.format(model=body.__name__)}
    content = {"schema": schema, "examples": {"example 1": {"value": example}}}
    return {
        "summary": summary,
        "responses": {200: {"model": answer}, **_refused(*_REFUSALS)},
        "openapi_extra": {
            "parameters": _HEADERS,
            "requestBody": {"required": True, "content": {"application/json": content}},
        },
    }
