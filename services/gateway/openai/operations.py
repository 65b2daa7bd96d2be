"""The operations of the OpenAI door: paths, bodies, answers and errors. Routes and OpenAPI document are made of them."""

from services.contracts.access import Scope
from services.errors import ErrorKind
from services.gateway.call.operation import JSON, Answer, Operation, Parameter, json_answer
from services.gateway.openai.errors import openai_errors
from services.gateway.openai.schema import (
    MAX_TEXT_DEADLINE_MS,
    ChatAnswerBody,
    ChatBody,
    CompletionAnswerBody,
    CompletionBody,
    ModelBody,
    ModelsBody,
)

PATHS = ("/health", "/v1/models", "/v1/models/{model_id:path}", "/v1/completions", "/v1/chat/completions")
OPENAI_ERRORS = openai_errors(PATHS)

_GENERATION_KINDS = frozenset({ErrorKind.NOT_FOUND, ErrorKind.OVERLOADED, ErrorKind.AWAY, ErrorKind.LATE})
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
    answers={200: Answer("OK")},
)
MODELS = Operation(
    name="models",
    method="GET",
    path="/v1/models",
    summary="List the models",
    scope=Scope.TEXT,
    errors=OPENAI_ERRORS,
    kinds=frozenset({ErrorKind.AWAY}),
    answers=json_answer(ModelsBody),
)
MODEL = Operation(
    name="model",
    method="GET",
    path="/v1/models/{model_id:path}",
    summary="Describe a model",
    scope=Scope.TEXT,
    errors=OPENAI_ERRORS,
    kinds=frozenset({ErrorKind.NOT_FOUND, ErrorKind.AWAY}),
    parameters=(
        Parameter(name="model_id", where="path", schema={"type": "string"}, description="As /v1/models lists it"),
    ),
    answers=json_answer(ModelBody),
)
COMPLETE = Operation(
    name="complete",
    method="POST",
    path="/v1/completions",
    summary="Complete a prompt, or rank what follows a history",
    scope=Scope.TEXT,
    errors=OPENAI_ERRORS,
    kinds=_GENERATION_KINDS,
    parameters=(_DEADLINE,),
    bodies=(CompletionBody,),
    examples=({"model": "tailrace-recommender", "prompt": "50 181 258", "n": 3},),
    answers={200: Answer("OK; with `stream`, server-sent events", {JSON: CompletionAnswerBody, _STREAM: None})},
    is_traced=True,
)
CHAT_COMPLETE = Operation(
    name="chatComplete",
    method="POST",
    path="/v1/chat/completions",
    summary="Answer in a chat",
    scope=Scope.TEXT,
    errors=OPENAI_ERRORS,
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
    answers={200: Answer("OK; with `stream`, server-sent events", {JSON: ChatAnswerBody, _STREAM: None})},
    is_traced=True,
)
