"""The REST door: JSON in, the data plane, JSON out. Holds no rule.

Knows HTTP but not how answers are made. The plane is looked up at each request, since it is created after the app.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from services.contracts.answers import ErrorBody, ErrorDetail, Status
from services.contracts.assignment import AssignRequest
from services.contracts.batch import BatchAnswer, check_batch_size
from services.contracts.erasure import ReceiptBody
from services.contracts.explanation import ExplanationAnswer
from services.contracts.message import convert, encode
from services.contracts.recommend import MAX_DEADLINE_MS, Recommendation, RecommendRequest
from services.errors import InvalidRequest
from services.gateway.access.authorize import OpenAccess
from services.gateway.call.guard import Access
from services.gateway.call.headers import EDGE_LIMIT, Call, batch_size_from, deadline_ms_from, edge_mark_from
from services.gateway.call.http import DOOR, HttpApp, json_response, read_body, refuse_query, text_response
from services.gateway.call.operations import (
    ASSIGNMENT,
    BUNDLE,
    DOCS,
    ERASE_USER,
    ERASURE,
    EXPLANATION,
    HEALTHZ,
    METRICS,
    POPULAR,
    READYZ,
    RECOMMEND,
    RECOMMEND_BATCH,
    RECORD_EVENTS,
    REST_ERRORS,
    SEARCH,
    SIMILAR_ITEMS,
    USER_DATA,
)
from services.gateway.data_plane import DataPlane
from services.gateway.openai.door import add_openai
from services.gateway.overload.long_work import LongWork
from services.gateway.records.describe import describe
from services.gateway.rest.items import add_items
from services.gateway.rest.schema import (
    parse_batch,
    parse_events,
    parse_popular,
    parse_query,
    parse_recommend,
    parse_search,
    parse_similar,
    request_id_of,
)
from services.gateway.tenant_plane import TenantPlane
from services.observability.tracing import Tracing
from services.router.deadline import Arrival

DOCS_PAGE = Path(__file__).with_name("docs.html")
"""The page at /docs: shows /openapi.json, without external scripts or styles."""


def create_rest_app(
    plane: Callable[[], DataPlane],
    render_metrics: Callable[[], bytes],
    max_body_bytes: int,
    *,
    access: Access | None = None,
    tracing: Tracing | None = None,
    echoes_request_id: bool = False,
) -> HttpApp:
    """Create the ASGI app of the REST door and the OpenAI door.

    Args:
        plane: Returns the running data plane.
        render_metrics: Returns the Prometheus text format.
        max_body_bytes: Larger bodies are refused while they are read.
        access: Decides which calls are admitted; default: all.
        tracing: Destination of spans; default: none.
        echoes_request_id: Whether answers carry X-Request-Id; False under Ray Serve, whose proxy already sends it.
    """
    access = access or OpenAccess()
    app = HttpApp(
        "Tailrace",
        REST_ERRORS,
        access=access,
        tracing=tracing or Tracing(),
        echoes_request_id=echoes_request_id,
    )
    door = _RestDoor(plane, render_metrics, max_body_bytes, access)
    app.serve(RECOMMEND, door.recommend, door.recommend_refused)
    app.serve(RECOMMEND_BATCH, door.recommend_batch, door.recommend_refused)
    app.serve(SIMILAR_ITEMS, door.similar, door.recommend_refused)
    app.serve(POPULAR, door.popular, door.recommend_refused)
    app.serve(SEARCH, door.search, door.recommend_refused)
    app.serve(RECORD_EVENTS, door.record, door.events_refused)
    app.serve(BUNDLE, door.bundle)
    app.serve(EXPLANATION, door.explanation)
    app.serve(HEALTHZ, door.healthz)
    app.serve(READYZ, door.readyz)
    app.serve(METRICS, door.metrics)
    app.serve(DOCS, door.docs)
    app.serve(ASSIGNMENT, door.assignment)
    app.serve(ERASE_USER, door.erase_user)
    app.serve(USER_DATA, door.user_data)
    app.serve(ERASURE, door.erasure)
    add_items(app, plane, max_body_bytes)
    add_openai(app, plane, max_body_bytes)
    return app


class _RestDoor:
    """The handlers of the operations."""

    def __init__(
        self, plane: Callable[[], DataPlane], render_metrics: Callable[[], bytes], max_body_bytes: int, access: Access
    ) -> None:
        self._access = access
        self._plane = plane
        self._render_metrics = render_metrics
        self._max_body_bytes = max_body_bytes
        self._docs_page = DOCS_PAGE.read_text()

    @property
    def _reading(self) -> LongWork:
        return self._plane().reading

    async def recommend(self, http: Request, call: Call) -> Response:
        return await self._ranked(http, call, parse_recommend)

    async def similar(self, http: Request, call: Call) -> Response:
        item_id = http.path_params["item_id"]
        return await self._ranked(http, call, lambda body, *more: parse_similar(body, item_id, *more))

    async def _ranked(
        self, http: Request, call: Call, parse: Callable[[bytes, str, int | None], RecommendRequest]
    ) -> Response:
        with self._arrived(http, call) as arrival:
            body = await read_body(http, self._max_body_bytes)
            try:
                refuse_query(http)
                deadline_ms = deadline_ms_from(http.headers, MAX_DEADLINE_MS)
                request = await self._reading.read(body, parse, body, call.request_id, deadline_ms)
            except InvalidRequest:
                sent_id: str | None = await self._reading.read(body, request_id_of, body)
                call.request_id = sent_id or call.request_id
                raise
            return await self._answer(request, arrival, call)

    async def popular(self, http: Request, call: Call) -> Response:
        return await self._ranked_by_query(http, call, parse_popular)

    async def search(self, http: Request, call: Call) -> Response:
        return await self._ranked_by_query(http, call, parse_search)

    async def _ranked_by_query(
        self, http: Request, call: Call, parse: Callable[[list[tuple[str, str]], str, int | None], RecommendRequest]
    ) -> Response:
        with self._arrived(http, call) as arrival:
            deadline_ms = deadline_ms_from(http.headers, MAX_DEADLINE_MS)
            request = parse(http.query_params.multi_items(), call.request_id, deadline_ms)
            return await self._answer(request, arrival, call)

    async def recommend_batch(self, http: Request, call: Call) -> Response:
        with self._arrived(http, call) as arrival:
            body = await read_body(http, self._max_body_bytes)
            refuse_query(http)
            deadline_ms = deadline_ms_from(http.headers, MAX_DEADLINE_MS)
            entries = await self._reading.read(body, parse_batch, body, call.request_id, deadline_ms)
            check_batch_size(len(entries), batch_size_from(http.headers))
            await call.charge(len(entries), "requests", "requests")
            answers = await TenantPlane(self._plane(), call.admitted).recommend_batch(entries, arrival, DOOR)
            return await self._reading.run(None, _batch_response, answers)

    @contextmanager
    def _arrived(self, http: Request, call: Call) -> Iterator[Arrival]:
        """Yield the request's arrival. The answer carries the edge limit of the moment it is sent."""
        arrival = self._plane().edge.arrival(edge_mark_from(http.headers), DOOR)
        try:
            yield arrival
        finally:
            call.answer_headers[EDGE_LIMIT] = self._plane().edge.announcement

    async def _answer(self, request: RecommendRequest, arrival: Arrival, call: Call) -> Response:
        call.request_id = request.request_id
        return json_response(await TenantPlane(self._plane(), call.admitted).recommend(request, arrival, DOOR))

    def recommend_refused(self, call: Call, door: str, code: str, message: str) -> None:
        self._plane().recommend_refused(door, code, message, call.request_id, call.tenant)

    async def record(self, http: Request, call: Call) -> Response:
        body = await read_body(http, self._max_body_bytes)
        refuse_query(http)
        plane = self._plane()
        events = await self._reading.read(body, parse_events, body, plane.max_events_per_request)
        return json_response(await TenantPlane(plane, call.admitted).record(events, DOOR, call.request_id))

    def events_refused(self, call: Call, door: str, code: str, message: str) -> None:
        self._plane().events_refused(door, code, message, call.request_id)

    async def bundle(self, http: Request, call: Call) -> Response:
        sent = parse_query(http.query_params.multi_items(), ("name",))
        return json_response(TenantPlane(self._plane(), call.admitted).bundle(sent.get("name")))

    async def assignment(self, http: Request, call: Call) -> Response:
        sent = convert(AssignRequest, parse_query(http.query_params.multi_items(), AssignRequest.__struct_fields__))
        return json_response(TenantPlane(self._plane(), call.admitted).assign(sent))

    async def erase_user(self, http: Request, call: Call) -> Response:
        plane = TenantPlane(self._plane(), call.admitted)
        receipt = await plane.erase(http.path_params["user_id"], DOOR, call.request_id)
        return json_response(ReceiptBody.of(receipt), 202)

    async def erasure(self, http: Request, call: Call) -> Response:
        receipt = await TenantPlane(self._plane(), call.admitted).receipt(http.path_params["erasure_id"])
        return json_response(ReceiptBody.of(receipt))

    async def user_data(self, http: Request, call: Call) -> Response:
        return json_response(await TenantPlane(self._plane(), call.admitted).export(http.path_params["user_id"]))

    async def explanation(self, http: Request, call: Call) -> Response:
        record = await TenantPlane(self._plane(), call.admitted).explanation(http.path_params["request_id"])
        return json_response(ExplanationAnswer.of(record, describe(record)))

    async def healthz(self, _: Request, __: Call) -> Response:
        return json_response(Status(status="ok"), headers={EDGE_LIMIT: self._plane().edge.announcement})

    async def readyz(self, _: Request, __: Call) -> Response:
        plane = self._plane()
        degraded = ", ".join((*plane.degraded, *self._access.degraded))
        ready = f"ready; degraded: {degraded}" if degraded else "ready"
        return json_response(Status(status=plane.missing or ready), 503 if plane.missing else 200)

    async def metrics(self, _: Request, __: Call) -> Response:
        text = await asyncio.to_thread(self._render_metrics)  # reads files
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def docs(self, _: Request, __: Call) -> Response:
        return HTMLResponse(self._docs_page)


def _batch_response(answers: Sequence[BatchAnswer]) -> Response:
    """Write the answers of a batch individually: the JSON encoder does not release the GIL during a call."""
    answered = (encode(_outcome(answer)) for answer in answers)
    return text_response(b'{"answers":[' + b",".join(answered) + b"]}")


def _outcome(answer: BatchAnswer) -> Recommendation | ErrorBody:
    if isinstance(answer.outcome, Recommendation):
        return answer.outcome
    return ErrorBody(error=ErrorDetail.of(answer.outcome, answer.request_id))
