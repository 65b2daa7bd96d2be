"""The OpenAI door: /v1/models, /v1/completions, /v1/chat/completions. OpenAI's JSON in, a text writer, OpenAI's JSON out.

    body ─▶ parse ─▶ TextRequests ─▶ text tier | ranked choices ─▶ events ─▶ telling ─▶ one answer | a stream of chunks

Holds no rule; errors leave in OpenAI's envelope. The plane is asked for at each request, since it is made after the app.
"""

import time
from collections.abc import Callable

from fastapi import FastAPI, Request, Response

from services.contracts.access import Scope
from services.errors import InvalidRequest, NotFound
from services.gateway.call.headers import DEADLINE_MS, Call, deadline_ms_from
from services.gateway.call.spans import traced_http
from services.gateway.openai.call import Asking
from services.gateway.openai.errors import envelope
from services.gateway.openai.listing import list_models
from services.gateway.openai.openapi import doc_of
from services.gateway.openai.ranked import RankedChoices
from services.gateway.openai.responder import CompletionResponder
from services.gateway.openai.routes import ROUTES, Route, head_of, writer_of
from services.gateway.openai.schema import MAX_TEXT_DEADLINE_MS
from services.gateway.request.data_plane import DataPlane
from services.gateway.rest.answers import guarded, json_response
from services.gateway.rest.body import read_body
from services.gateway.text.metrics import CHAT, COMPLETIONS
from services.gateway.text.tier import TextLimits
from services.observability.tracing import Tracing


def add_openai(app: FastAPI, plane: Callable[[], DataPlane], max_body_bytes: int, tracing: Tracing) -> tuple[str, ...]:
    """Add the routes to the REST door's app, and give their paths."""
    door = _OpenAiDoor(plane, max_body_bytes, tracing)
    routes = (
        ("GET", "/health", door.health),
        ("GET", "/v1/models", door.models),
        ("GET", "/v1/models/{model_id:path}", door.model),
        ("POST", "/v1/completions", door.completions),
        ("POST", "/v1/chat/completions", door.chat),
    )
    for method, path, endpoint in routes:
        app.add_api_route(path, endpoint, methods=[method], response_model=None, **doc_of(path))
    return tuple(path for _, path, _ in routes)


class _OpenAiDoor:
    """The endpoints."""

    def __init__(self, plane: Callable[[], DataPlane], max_body_bytes: int, tracing: Tracing) -> None:
        self._plane = plane
        self._max_body_bytes = max_body_bytes
        self._tracing = tracing

    async def health(self, _: Request) -> Response:
        """The process lives; load generators that know vLLM ask here first."""
        return Response()

    async def models(self, http: Request) -> Response:
        """List what can be asked for."""

        async def work(_: Call) -> Response:
            return json_response({"object": "list", "data": await list_models(self._plane())})

        return await guarded(http, work, scope=Scope.TEXT, enveloped=envelope)

    async def model(self, http: Request) -> Response:
        """Tell of one model."""

        async def work(_: Call) -> Response:
            wanted = http.path_params["model_id"]
            for one in await list_models(self._plane()):
                if one["id"] == wanted:
                    return json_response(one)
            raise NotFound(f"there is no model {wanted!r:.80}", "see /v1/models")

        return await guarded(http, work, scope=Scope.TEXT, enveloped=envelope)

    async def completions(self, http: Request) -> Response:
        """Go on with a prompt, or rank what follows a history."""
        return await self._answer(http, ROUTES[COMPLETIONS])

    async def chat(self, http: Request) -> Response:
        """Say what the assistant says next."""
        return await self._answer(http, ROUTES[CHAT])

    async def _answer(self, http: Request, route: Route) -> Response:
        plane = self._plane()
        arrived_s = plane.clock()

        async def work(call: Call) -> Response:
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
            telling = CompletionResponder(
                route=route.name,
                request_id=call.request_id,
                asked=asked,
                shape=route.shape(head_of(asked, call.request_id), asked),
                write=writer_of(plane, ranked, asked, route.name),
                report=plane.text_report,
                silence_s=limits.silence_s,
            )
            return await telling.answer(http)

        def refused(_door: str, code: str, message: str, request_id: str) -> None:
            plane.text_report.ended(route.name, code, request_id, message)

        answering = guarded(http, work, refused, scope=Scope.TEXT, enveloped=envelope)
        return await traced_http(self._tracing, http, route.path, answering)


def _deadline_ms(http: Request) -> int | None:
    deadline_ms = deadline_ms_from(http.headers)
    if deadline_ms is not None and not 1 <= deadline_ms <= MAX_TEXT_DEADLINE_MS:
        raise InvalidRequest(DEADLINE_MS, f"{deadline_ms} is out of range", f"send 1 to {MAX_TEXT_DEADLINE_MS}")
    return deadline_ms
