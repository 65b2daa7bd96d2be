"""The OpenAI door: /v1/models, /v1/completions, /v1/chat/completions. OpenAI's JSON in, a text writer, OpenAI's JSON out.

    body ─▶ parse ─▶ TextRequests ─▶ text tier | ranked choices ─▶ events ─▶ telling ─▶ one answer | a stream of chunks

Holds no rule; errors are in OpenAI's envelope. The plane is looked up at each request, since it is made after the app.
"""

import time
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response

from services.errors import InvalidRequest, NotFound
from services.gateway.call.headers import DEADLINE_MS, Call, deadline_ms_from
from services.gateway.call.http import HttpApp, OnError, json_response, read_body
from services.gateway.data_plane import DataPlane
from services.gateway.openai.call import Asking
from services.gateway.openai.listing import list_models
from services.gateway.openai.operations import CHAT_COMPLETE, COMPLETE, HEALTH, MODEL, MODELS, OPENAI_ERRORS
from services.gateway.openai.ranked import RankedChoices
from services.gateway.openai.responder import CompletionResponder
from services.gateway.openai.routes import ROUTES, Route, head_of, writer_of
from services.gateway.openai.schema import MAX_TEXT_DEADLINE_MS
from services.gateway.text.metrics import CHAT, COMPLETIONS
from services.gateway.text.tier import TextLimits


def add_openai(app: HttpApp, plane: Callable[[], DataPlane], max_body_bytes: int) -> None:
    """Add the operations to the app; unknown paths below /v1/ are answered in OpenAI's envelope."""
    door = _OpenAiDoor(plane, max_body_bytes)
    app.serve(HEALTH, door.health)
    app.serve(MODELS, door.models)
    app.serve(MODEL, door.model)
    app.serve(COMPLETE, door.completions, door.count_error(COMPLETIONS))
    app.serve(CHAT_COMPLETE, door.chat, door.count_error(CHAT))
    app.set_errors_below("/v1/", OPENAI_ERRORS)


class _OpenAiDoor:
    """The handlers of the operations."""

    def __init__(self, plane: Callable[[], DataPlane], max_body_bytes: int) -> None:
        self._plane = plane
        self._max_body_bytes = max_body_bytes

    async def health(self, _: Request, __: Call) -> Response:
        return Response()

    async def models(self, _: Request, __: Call) -> Response:
        return json_response({"object": "list", "data": await list_models(self._plane())})

    async def model(self, http: Request, _: Call) -> Response:
        wanted = http.path_params["model_id"]
        for one in await list_models(self._plane()):
            if one["id"] == wanted:
                return json_response(one)
        raise NotFound(f"there is no model {wanted!r:.80}", "see /v1/models")

    async def completions(self, http: Request, call: Call) -> Response:
        return await self._answer(http, call, ROUTES[COMPLETIONS])

    async def chat(self, http: Request, call: Call) -> Response:
        return await self._answer(http, call, ROUTES[CHAT])

    def count_error(self, route: str) -> OnError:
        """Return the function that counts the errors of this route."""

        def count(_door: str, code: str, message: str, request_id: str) -> None:
            self._plane().text_report.ended(route, code, request_id, message)

        return count

    async def _answer(self, http: Request, call: Call, route: Route) -> Response:
        plane = self._plane()
        arrived_s = plane.clock()
        limits = TextLimits() if plane.text is None else plane.text.limits
        deadline_ms = _deadline_ms(http)
        asking = Asking(
            request_id=call.request_id,
            caller=call.admitted,
            deadline_unix_s=time.time() + (deadline_ms or limits.deadline_ms) / 1_000,
            limits=limits,
        )
        asked = route.parse(await read_body(http, self._max_body_bytes), asking)
        ranked = RankedChoices(
            plane=plane,
            request_id=call.request_id,
            caller=call.admitted,
            arrived_s=arrived_s,
            deadline_ms=deadline_ms,
        )
        responder = CompletionResponder(
            route=route.name,
            request_id=call.request_id,
            asked=asked,
            shape=route.shape(head_of(asked, call.request_id), asked),
            write=writer_of(plane, ranked, asked, route.name),
            report=plane.text_report,
            silence_s=limits.silence_s,
        )
        return await responder.answer(http)


def _deadline_ms(http: Request) -> int | None:
    deadline_ms = deadline_ms_from(http.headers)
    if deadline_ms is not None and not 1 <= deadline_ms <= MAX_TEXT_DEADLINE_MS:
        raise InvalidRequest(DEADLINE_MS, f"{deadline_ms} is out of range", f"send 1 to {MAX_TEXT_DEADLINE_MS}")
    return deadline_ms
