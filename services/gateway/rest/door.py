"""The REST door: JSON in, the data plane, JSON out. Holds no rule; every error leaves in one envelope.

Knows HTTP and nothing of how answers are made. The plane is asked for at each request, since it is made after the app.
"""

import asyncio
from collections.abc import Callable
from dataclasses import asdict

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse
from starlette.exceptions import HTTPException

from services.contracts.access import Scope
from services.gateway.access.authorize import Access, OpenAccess
from services.gateway.call.headers import Call, deadline_ms_from
from services.gateway.call.spans import traced_http
from services.gateway.openai.absent import absent_routes
from services.gateway.openai.door import add_openai
from services.gateway.records.describe import describe
from services.gateway.request.data_plane import DataPlane
from services.gateway.rest.answers import DOOR, guarded, json_response
from services.gateway.rest.body import read_body
from services.gateway.rest.direct_route import DirectRoute
from services.gateway.rest.docs_page import DOCS_PAGE
from services.gateway.rest.openapi import describe_routes, doc_of
from services.gateway.rest.schema import format_recommendation, parse_events, parse_recommend
from services.observability.tracing import Tracing


def create_rest_app(
    plane: Callable[[], DataPlane],
    render_metrics: Callable[[], bytes],
    max_body_bytes: int,
    *,
    access: Access | None = None,
    tracing: Tracing | None = None,
    echoes_request_id: bool = False,
) -> FastAPI:
    """Make the ASGI app.

    Args:
        plane: Gives the running data plane.
        render_metrics: Gives Prometheus' text.
        max_body_bytes: Larger bodies are refused while they are read.
        access: Decides who may come in; everybody, when absent.
        tracing: Where traces go; nowhere, when absent.
        echoes_request_id: Whether answers carry X-Request-Id; not under Ray Serve, whose ingress sends it already.
    """
    app = FastAPI(title="Tailrace", version="1", docs_url=None, redoc_url=None)
    app.state.access = access or OpenAccess()
    app.state.echoes_request_id = echoes_request_id
    tracing = tracing or Tracing()
    door = _RestDoor(plane, render_metrics, max_body_bytes, tracing)
    for method, path, endpoint in (
        ("POST", "/v1/recommendations", door.recommend),
        ("POST", "/v1/events", door.record),
        ("GET", "/v1/bundle", door.bundle),
        ("GET", "/v1/explanations/{request_id:path}", door.explanation),
        ("GET", "/healthz", door.healthz),
        ("GET", "/readyz", door.readyz),
        ("GET", "/metrics", door.metrics),
    ):
        app.router.add_api_route(
            path,
            endpoint,
            methods=[method],
            response_model=None,
            route_class_override=DirectRoute,
            **doc_of(path),
        )
    openai_paths = add_openai(app, plane, max_body_bytes, tracing)
    app.add_api_route("/docs", _docs, methods=["GET"], include_in_schema=False)
    app.add_exception_handler(HTTPException, absent_routes(openai_paths))
    describe_routes(app)
    return app


class _RestDoor:
    """The endpoints."""

    def __init__(
        self,
        plane: Callable[[], DataPlane],
        render_metrics: Callable[[], bytes],
        max_body_bytes: int,
        tracing: Tracing,
    ) -> None:
        self._plane = plane
        self._render_metrics = render_metrics
        self._max_body_bytes = max_body_bytes
        self._tracing = tracing

    async def recommend(self, http: Request) -> Response:
        """Answer what to show a user, before the deadline."""
        plane = self._plane()
        arrived_s = plane.clock()

        async def work(call: Call) -> Response:
            body = await read_body(http, self._max_body_bytes)
            request = parse_recommend(body, call.request_id, deadline_ms_from(http.headers))
            call.request_id = request.request_id
            return json_response(format_recommendation(await plane.recommend(request, arrived_s, DOOR, call.admitted)))

        answering = guarded(http, work, plane.recommend_refused, scope=Scope.RECOMMEND)
        return await traced_http(self._tracing, http, "/v1/recommendations", answering)

    async def record(self, http: Request) -> Response:
        """Record what users did; answers only when the broker has every event."""
        plane = self._plane()

        async def work(call: Call) -> Response:
            drafts = parse_events(await read_body(http, self._max_body_bytes))
            event_ids = await plane.record(drafts, DOOR, call.request_id)
            return json_response({"accepted": len(event_ids), "event_ids": event_ids})

        answering = guarded(http, work, plane.report.events_refused, scope=Scope.EVENTS)
        return await traced_http(self._tracing, http, "/v1/events", answering)

    async def bundle(self, http: Request) -> Response:
        """Tell which bundle answers."""

        async def work(_: Call) -> Response:
            return json_response(asdict(self._plane().bundle()))

        return await guarded(http, work, scope=Scope.RECOMMEND)

    async def explanation(self, http: Request) -> Response:
        """Tell why a recent request was answered as it was."""

        async def work(_: Call) -> Response:
            found = await self._plane().explanations.find(http.path_params["request_id"])
            return json_response({**found.as_plain(), "sentences": describe(found)})

        return await guarded(http, work, scope=Scope.ADMIN)

    async def healthz(self, _: Request) -> Response:
        """The process lives."""
        return json_response({"status": "ok"})

    async def readyz(self, _: Request) -> Response:
        """Recommendations can be answered."""
        is_ready = self._plane().is_ready()
        return json_response({"status": "ready" if is_ready else "no bundle yet"}, 200 if is_ready else 503)

    async def metrics(self, http: Request) -> Response:
        """Prometheus' text, for those who may administer; scrapers have a port of their own."""

        async def work(_: Call) -> Response:
            text = await asyncio.to_thread(self._render_metrics)  # reads files
            return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

        return await guarded(http, work, scope=Scope.ADMIN, audited=False)


async def _docs() -> Response:
    """The OpenAPI page, which loads nothing from elsewhere."""
    return HTMLResponse(DOCS_PAGE)
