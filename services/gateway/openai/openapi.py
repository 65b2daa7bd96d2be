"""How OpenAPI describes the OpenAI door's routes: bodies, answers, refusals, headers. Knows the schemas and no behaviour."""

from typing import Any

from pydantic import BaseModel

from services.gateway.openai.answer_bodies import (
    ChatAnswerBody,
    CompletionAnswerBody,
    ModelBody,
    ModelsBody,
    OpenAiErrorBody,
)
from services.gateway.openai.schema import ChatBody, CompletionBody

REF = "#/components/schemas/{model}"
BODIES: tuple[type[BaseModel], ...] = (CompletionBody, ChatBody)
"""The bodies that the door parses itself, so that FastAPI cannot see them."""

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
    """Return the arguments by which FastAPI documents the route at this path."""
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
