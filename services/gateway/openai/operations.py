"""The operations of the OpenAI door: paths, bodies, answers and errors.

The source of the routes and the OpenAPI document. Errors have OpenAI's envelope, `{"error": {"message", "type",
"param", "code"}}`, and the status that its clients expect.
"""

import re
from dataclasses import dataclass

from services.contracts.access import Scope
from services.errors import ContextTooLong, ErrorKind, TailraceError
from services.gateway.call.operation import JSON, ErrorFormat, Operation, OperationAnswer, Parameter, json_answer
from services.gateway.call.path import OPENAI_NAMES
from services.gateway.openai.chunks import Json
from services.gateway.openai.schema import (
    MAX_TEXT_DEADLINE_MS,
    ChatAnswerBody,
    ChatBody,
    CompletionAnswerBody,
    CompletionBody,
    ModelBody,
    ModelsBody,
    OpenAiErrorBody,
)


@dataclass(frozen=True, slots=True)
class OpenAiError:
    """One kind of error in the terms of OpenAI's API."""

    status: int
    type: str
    code: str


ERRORS = {
    ErrorKind.INVALID_REQUEST: OpenAiError(400, "invalid_request_error", "invalid_value"),
    ErrorKind.TOO_LARGE: OpenAiError(413, "invalid_request_error", "request_too_large"),
    ErrorKind.UNAUTHENTICATED: OpenAiError(401, "authentication_error", "invalid_api_key"),
    ErrorKind.NOT_ALLOWED: OpenAiError(403, "permission_error", "insufficient_permissions"),
    ErrorKind.NOT_FOUND: OpenAiError(404, "invalid_request_error", "model_not_found"),
    ErrorKind.QUOTA: OpenAiError(429, "rate_limit_error", "rate_limit_exceeded"),
    ErrorKind.OVERLOADED: OpenAiError(429, "rate_limit_error", "overloaded"),
    ErrorKind.UNAVAILABLE: OpenAiError(503, "server_error", "unavailable"),
    ErrorKind.LATE: OpenAiError(504, "timeout_error", "deadline_exceeded"),
    ErrorKind.INTERNAL: OpenAiError(500, "server_error", "internal_error"),
}
CONTEXT_TOO_LONG = "context_length_exceeded"
"""The code that tells clients to shorten the conversation."""


def error_json(error: TailraceError) -> Json:
    """Return the envelope. The message includes the fix, since the envelope has no field for it."""
    known = ERRORS[error.kind]
    code = CONTEXT_TOO_LONG if isinstance(error, ContextTooLong) else known.code
    return _envelope(error.summary, known.type, code, error.field)


def _envelope(message: str, kind: str, code: str, field: str | None = None) -> Json:
    """Return an envelope; `kind` is one of OpenAI's types."""
    return {"error": {"message": message, "type": kind, "param": field, "code": code}}


OPENAI_ERRORS = ErrorFormat(
    model=OpenAiErrorBody,
    status={kind: error.status for kind, error in ERRORS.items()},
    body=lambda error, _: error_json(error),
    no_route=lambda code, problem, fix, _: _envelope(f"{problem}; {fix}", "invalid_request_error", code),
)

OTHER_PATHS = re.compile(rf"/v1/({'|'.join(OPENAI_NAMES)})(/|$)")
"""Paths of OpenAI's API; unknown ones are answered in its envelope too."""
_GENERATION_KINDS = frozenset({ErrorKind.NOT_FOUND, ErrorKind.OVERLOADED, ErrorKind.UNAVAILABLE, ErrorKind.LATE})
_DEADLINE = Parameter(
    name="X-Deadline-Ms",
    where="header",
    schema={"type": "integer", "minimum": 1, "maximum": MAX_TEXT_DEADLINE_MS},
    description="Milliseconds from arrival; the text ends then",
)
_STREAM = "text/event-stream"

HEALTH = Operation(
    name="health",
    method="GET",
    path="/health",
    summary="Report that the process runs, as vLLM does",
    scope=None,
    errors=OPENAI_ERRORS,
    answers={200: OperationAnswer("OK")},
)
MODELS = Operation(
    name="models",
    method="GET",
    path="/v1/models",
    summary="List the models",
    scope=Scope.TEXT,
    errors=OPENAI_ERRORS,
    for_tenants=True,
    kinds=frozenset({ErrorKind.UNAVAILABLE}),
    answers=json_answer(ModelsBody),
)
MODEL = Operation(
    name="model",
    method="GET",
    path="/v1/models/{model_id}",
    summary="Describe a model",
    scope=Scope.TEXT,
    errors=OPENAI_ERRORS,
    for_tenants=True,
    kinds=frozenset({ErrorKind.NOT_FOUND, ErrorKind.UNAVAILABLE}),
    parameters=(
        Parameter(name="model_id", where="path", schema={"type": "string"}, description="As /v1/models lists it"),
    ),
    answers=json_answer(ModelBody),
)
COMPLETE = Operation(
    name="complete",
    method="POST",
    path="/v1/completions",
    summary="Complete a prompt",
    scope=Scope.TEXT,
    errors=OPENAI_ERRORS,
    for_tenants=True,
    kinds=_GENERATION_KINDS,
    parameters=(_DEADLINE,),
    bodies=(CompletionBody,),
    examples=({"model": "SmolLM2-135M-Instruct", "prompt": "The river", "max_tokens": 16},),
    answers={
        200: OperationAnswer("OK; with `stream`, server-sent events", {JSON: CompletionAnswerBody, _STREAM: None})
    },
    is_traced=True,
)
CHAT_COMPLETE = Operation(
    name="chatComplete",
    method="POST",
    path="/v1/chat/completions",
    summary="Answer in a chat",
    scope=Scope.TEXT,
    errors=OPENAI_ERRORS,
    for_tenants=True,
    kinds=_GENERATION_KINDS,
    parameters=(_DEADLINE,),
    bodies=(ChatBody,),
    examples=(
        {
            "model": "SmolLM2-135M-Instruct",
            "messages": [{"role": "user", "content": "Name a river."}],
            "max_tokens": 16,
        },
    ),
    answers={200: OperationAnswer("OK; with `stream`, server-sent events", {JSON: ChatAnswerBody, _STREAM: None})},
    is_traced=True,
)
