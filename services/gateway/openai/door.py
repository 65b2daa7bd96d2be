"""The OpenAI door: /v1/models, /v1/completions, /v1/chat/completions. OpenAI's JSON in, a text writer, OpenAI's JSON out.

    body ─▶ parse ─▶ TextRequests ─▶ text tier | ranked choices ─▶ events ─▶ one answer | a stream of chunks

Holds no rule; errors leave in OpenAI's envelope. The plane is asked for at each request, since it is made after the app.
"""

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

import structlog
from fastapi import FastAPI, Request, Response
from starlette.requests import ClientDisconnect

from services.contracts.access import Scope
from services.contracts.text import TextDone, TextEvent, TextPiece
from services.errors import InvalidRequest, NotFound
from services.gateway.caller import DEADLINE_MS, Call, deadline_ms_from
from services.gateway.door_spans import traced_http
from services.gateway.error_table import ErrorKind, describe
from services.gateway.openai.answers import ChatShape, CompletionShape, Head, Plain, Shape, usage_of
from services.gateway.openai.errors import envelope, plain_error
from services.gateway.openai.event_stream import DONE, EventStream, sse, unless_gone
from services.gateway.openai.listing import list_models
from services.gateway.openai.papers import doc_of
from services.gateway.openai.parse import RECOMMENDER, Asked, Asking, parse_chat, parse_completion
from services.gateway.openai.ranked import DOOR, RankedChoices
from services.gateway.openai.schema import MAX_TEXT_DEADLINE_MS
from services.gateway.openai.writing import Write, whole, written
from services.gateway.plane import DataPlane
from services.gateway.rest_answers import guarded, json_response
from services.gateway.rest_body import read_body
from services.gateway.text_count import NOTHING, counted
from services.gateway.text_report import CANCELLED, CHAT, COMPLETIONS, OK
from services.gateway.text_tier import TextLimits
from services.tracing import Tracing

log = structlog.get_logger()

Parse = Callable[[bytes, Asking], Asked]


def add_openai(app: FastAPI, plane: Callable[[], DataPlane], max_body_bytes: int, tracing: Tracing) -> None:
    """Add the routes to the REST door's app."""
    door = _OpenAiDoor(plane, max_body_bytes, tracing)
    for method, path, endpoint in (
        ("GET", "/v1/models", door.models),
        ("GET", "/v1/models/{model_id:path}", door.model),
        ("POST", "/v1/completions", door.completions),
        ("POST", "/v1/chat/completions", door.chat),
    ):
        app.add_api_route(path, endpoint, methods=[method], response_model=None, **doc_of(path))


@dataclass(frozen=True, slots=True)
class _Route:
    """One way to ask for text. `name` is what metrics call it."""

    name: str
    path: str
    parse: Parse
    shape: Callable[[Head, Asked], Shape]


_ROUTES = {
    COMPLETIONS: _Route(COMPLETIONS, "/v1/completions", parse_completion, lambda h, a: CompletionShape(h, _echoes(a))),
    CHAT: _Route(CHAT, "/v1/chat/completions", parse_chat, lambda head, _: ChatShape(head)),
}


class _OpenAiDoor:
    """The endpoints."""

    def __init__(self, plane: Callable[[], DataPlane], max_body_bytes: int, tracing: Tracing) -> None:
        self._plane = plane
        self._max_body_bytes = max_body_bytes
        self._tracing = tracing

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
        return await self._answer(http, _ROUTES[COMPLETIONS])

    async def chat(self, http: Request) -> Response:
        """Say what the assistant says next."""
        return await self._answer(http, _ROUTES[CHAT])

    async def _answer(self, http: Request, route: _Route) -> Response:
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
            telling = _Telling(route, asked, call.request_id, plane, _writer(plane, ranked, asked, route))
            try:
                return await (telling.stream(http) if asked.stream else telling.at_once(http))
            except ClientDisconnect:
                plane.text_report.ended(route.name, CANCELLED, call.request_id)
                raise

        def refused(_door: str, code: str, message: str, request_id: str) -> None:
            plane.text_report.ended(route.name, code, request_id, message)

        answering = guarded(http, work, refused, scope=Scope.TEXT, enveloped=envelope)
        return await traced_http(self._tracing, http, route.path, answering)


class _Telling:
    """One answer on its way out."""

    def __init__(self, route: _Route, asked: Asked, request_id: str, plane: DataPlane, write: Write) -> None:
        self._route = route
        self._asked = asked
        self._request_id = request_id
        self._report = plane.text_report
        self._write = write
        head = Head(
            request_id=request_id,
            created_unix_s=int(time.time()),
            model=asked.model,
            num_logprobs=asked.requests[0].sampling.num_logprobs,
        )
        self._shape = route.shape(head, asked)

    async def at_once(self, http: Request) -> Response:
        """Give the whole answer."""
        choices, done = await unless_gone(http, whole(self._asked, self._write))
        self._report.ended(self._route.name, OK, self._request_id)
        return json_response(self._shape.whole(choices, usage_of(done)))

    async def stream(self, http: Request) -> Response:
        """Give the chunks; whatever fails before the first event is an error with its own status."""
        events = written(self._asked, self._write)
        first = await unless_gone(http, anext(events))
        return EventStream(self._chunks(first, events), events)

    async def _chunks(self, first: TextEvent, events: AsyncGenerator[TextEvent, None]) -> AsyncGenerator[str, None]:
        code, asked, so_far = CANCELLED, self._asked, counted(NOTHING, first)
        try:
            async with aclosing(events):
                for plain in self._shape.opening(asked.num_choices):
                    yield sse(_with_usage(plain, asked, so_far))
                async for event in events:
                    so_far = counted(so_far, event)
                    if isinstance(event, TextPiece):
                        yield sse(_with_usage(self._shape.chunk(event), asked, so_far))
                if asked.include_usage:
                    yield sse(self._shape.usage_chunk(usage_of(so_far)))
                code = OK
                yield DONE
        except Exception as error:  # the status is long gone: say it in the stream, and end it
            answer = describe(error)
            code = answer.kind.value
            if answer.kind is ErrorKind.INTERNAL:
                log.exception("unexpected_error", request_id=self._request_id, door=DOOR)
            yield sse(plain_error(answer))
        finally:
            self._report.ended(self._route.name, code, self._request_id)


def _with_usage(plain: Plain, asked: Asked, so_far: TextDone) -> Plain:
    """Add what a chunk is to say of the usage: with include_usage the field is there, and null until the last."""
    if asked.continuous_usage:
        return {**plain, "usage": usage_of(so_far)}
    return {**plain, "usage": None} if asked.include_usage else plain


def _writer(plane: DataPlane, ranked: RankedChoices, asked: Asked, route: _Route) -> Write:
    """Choose who writes. Raises NotFound, or NotAllowed for the recommender."""
    if asked.model == RECOMMENDER:
        ranked.check()
        return ranked.write
    tier = plane.text
    if tier is None:
        raise NotFound(
            f"there is no model {asked.model!r:.80}", "no text is served here: start with --text or --text-url"
        )
    return lambda request: tier.write(request, route.name)


def _echoes(asked: Asked) -> dict[int, str]:
    return {index: echo for index in range(asked.num_choices) if (echo := _echo(asked, index))}


def _echo(asked: Asked, index: int) -> str:
    return asked.echoes[index // asked.n] if asked.echoes else ""


def _deadline_ms(http: Request) -> int | None:
    deadline_ms = deadline_ms_from(http.headers)
    if deadline_ms is not None and not 1 <= deadline_ms <= MAX_TEXT_DEADLINE_MS:
        raise InvalidRequest(DEADLINE_MS, f"{deadline_ms} is out of range", f"send 1 to {MAX_TEXT_DEADLINE_MS}")
    return deadline_ms
