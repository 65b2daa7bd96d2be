"""The OpenAI door: /v1/models, /v1/completions, /v1/chat/completions.

    body ─▶ parse ─▶ TextRequests ─▶ text tier ─▶ events ─▶ responder ─▶ one answer | a stream of chunks

Errors have OpenAI's envelope. The plane is looked up at each request, since it is created after the app.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from services.errors import NotFound
from services.gateway.call.guard import OnError
from services.gateway.call.headers import Call, deadline_ms_from
from services.gateway.call.http import HttpApp, json_response, read_body
from services.gateway.data_plane import DataPlane
from services.gateway.openai.chunks import AnswerFormat, AnswerHead, ChatFormat, CompletionFormat, Json
from services.gateway.openai.operations import (
    CHAT_COMPLETE,
    COMPLETE,
    HEALTH,
    MODEL,
    MODELS,
    OPENAI_ERRORS,
    OTHER_PATHS,
)
from services.gateway.openai.parse import CallContext, CompletionCall, parse_chat, parse_completion
from services.gateway.openai.responder import CompletionResponder, Generate
from services.gateway.openai.schema import MAX_TEXT_DEADLINE_MS
from services.gateway.text.metrics import CHAT, COMPLETIONS
from services.gateway.text.tier import TextLimits


def add_openai(app: HttpApp, plane: Callable[[], DataPlane], max_body_bytes: int) -> None:
    """Add the operations to the app."""
    door = _OpenAiDoor(plane, max_body_bytes)
    app.serve(HEALTH, door.health)
    app.serve(MODELS, door.models)
    app.serve(MODEL, door.model)
    app.serve(COMPLETE, door.completions, door.count_error(COMPLETIONS))
    app.serve(CHAT_COMPLETE, door.chat, door.count_error(CHAT))
    app.describe_missing(OTHER_PATHS, OPENAI_ERRORS, "use /v1/chat/completions; see /docs for all")


@dataclass(frozen=True, slots=True)
class _TextRoute:
    """One of the two routes that generate text. `name` is the metrics' label."""

    name: str
    parse: Callable[[bytes, CallContext], CompletionCall]
    format: Callable[[AnswerHead, CompletionCall], AnswerFormat]


_COMPLETIONS = _TextRoute(
    COMPLETIONS,
    parse_completion,
    lambda head, call: CompletionFormat(head, {index: call.echo_of(index) for index in range(call.num_choices)}),
)
_CHAT = _TextRoute(CHAT, parse_chat, lambda head, _: ChatFormat(head))


class _OpenAiDoor:
    """The handlers of the operations."""

    def __init__(self, plane: Callable[[], DataPlane], max_body_bytes: int) -> None:
        self._plane = plane
        self._max_body_bytes = max_body_bytes

    async def health(self, _: Request, __: Call) -> Response:
        return Response()

    async def models(self, _: Request, __: Call) -> Response:
        return json_response({"object": "list", "data": await _list_models(self._plane())})

    async def model(self, http: Request, _: Call) -> Response:
        model_id = http.path_params["model_id"]
        for model in await _list_models(self._plane()):
            if model["id"] == model_id:
                return json_response(model)
        raise NotFound(f"there is no model {model_id!r:.80}", "see /v1/models")

    async def completions(self, http: Request, call: Call) -> Response:
        return await self._answer(http, call, _COMPLETIONS)

    async def chat(self, http: Request, call: Call) -> Response:
        return await self._answer(http, call, _CHAT)

    def count_error(self, route: str) -> OnError:
        """Return the function that counts the errors of this route."""

        def count(call: Call, _door: str, code: str, message: str) -> None:
            self._plane().text_report.ended(route, code, call.request_id, message)

        return count

    async def _answer(self, http: Request, call: Call, route: _TextRoute) -> Response:
        plane = self._plane()
        limits = TextLimits() if plane.text is None else plane.text.limits
        deadline_ms = deadline_ms_from(http.headers, MAX_TEXT_DEADLINE_MS)
        context = CallContext(
            request_id=call.request_id,
            caller=call.admitted,
            deadline_unix_s=time.time() + (deadline_ms or limits.deadline_ms) / 1_000,
            limits=limits,
        )
        body = await read_body(http, self._max_body_bytes)
        completion = await plane.reading.read(body, route.parse, body, context)
        field = "n" if len(completion.requests) == 1 else "prompt"
        await call.charge(completion.num_choices, field, "choices")
        responder = CompletionResponder(
            route=route.name,
            request_id=call.request_id,
            call=completion,
            format=route.format(_head_of(completion, call.request_id), completion),
            generate=_generator_for(plane, completion, route.name),
            report=plane.text_report,
            silence_s=limits.silence_s,
        )
        return await responder.answer(http)


def _head_of(completion: CompletionCall, request_id: str) -> AnswerHead:
    return AnswerHead(
        request_id=request_id,
        created_unix_s=int(time.time()),
        model=completion.model,
        num_logprobs=completion.requests[0].sampling.num_logprobs,
    )


def _generator_for(plane: DataPlane, completion: CompletionCall, route: str) -> Generate:
    """Return the text generator. Raises NotFound if no text is served, or InvalidRequest for too many choices."""
    tier = plane.text
    if tier is None:
        raise NotFound(
            f"there is no model {completion.model!r:.80}", "no text is served here: start with --text or --text-url"
        )
    tier.check_fits(completion.num_choices, completion.requests[0].priority)
    return lambda request: tier.write(request, route)


async def _list_models(plane: DataPlane) -> list[Json]:
    """Return the text models. Raises DependencyUnavailable if the text writer does not answer."""
    return [
        {
            "id": model.name,
            "object": "model",
            "created": model.created_unix_s,
            "owned_by": "tailrace",
            "max_model_len": model.max_context_tokens,
        }
        for model in (() if plane.text is None else await plane.text.models())
    ]
