"""Serves operations over HTTP: guards calls, formats errors for the door, answers unknown paths, describes itself.

Starlette without FastAPI, whose dependency resolution costs as much as an answer from memory.
"""

import contextlib
import difflib
import json
import posixpath
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import quote

from opentelemetry.trace import SpanKind
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as Connection

from services.contracts.message import M, Message, decode, encode
from services.errors import (
    ErrorKind,
    InvalidRequest,
    RequestTooLarge,
    TailraceError,
)
from services.gateway.call.guard import Access, Gone, OnError, guard
from services.gateway.call.headers import REQUEST_ID, Call, new_request_id, request_id_from, retry_after
from services.gateway.call.openapi import openapi_document
from services.gateway.call.operation import JSON, ErrorFormat, Operation
from services.gateway.call.path import check_path, parameters_of, pattern_of, sent_path
from services.observability.tracing import Tracing

DOOR = "rest"
_CLIENT_GONE = 499
_AMBIGUOUS_PATH, _NO_PATH, _WRONG_METHOD = 400, 404, 405
_MAX_PATH_CHARS = 120
_ENCODING, _PLAIN = "content-encoding", "identity"

Handler = Callable[[Request, Call], Awaitable[Response]]
"""Answers one admitted call; may raise any error."""


class SentRoute(Route):
    """One method of a path, matched as it was sent: Starlette matches decoded paths and confuses `U/` with `U%2F`."""

    def __init__(self, path: str, endpoint: ASGIApp, method: str) -> None:
        super().__init__(path, endpoint)
        self.methods = {method}  # Starlette would add HEAD to GET
        self._pattern = pattern_of(path)

    def matches(self, connection: Connection) -> tuple[Match, Connection]:
        """Return whether the path and the method match a request, with its decoded parameters."""
        matched = self._pattern.fullmatch(sent_path(connection)) if connection["type"] == "http" else None
        if matched is None:
            return Match.NONE, {}
        match = Match.FULL if connection["method"] in (self.methods or ()) else Match.PARTIAL
        return match, {"endpoint": self.endpoint, "path_params": parameters_of(matched)}


class HttpApp(Starlette):
    """The ASGI app of the HTTP doors."""

    def __init__(
        self, title: str, errors: ErrorFormat, *, access: Access, tracing: Tracing, echoes_request_id: bool
    ) -> None:
        """Create an app without operations.

        Args:
            title: Title of the OpenAPI document.
            errors: The error format of unknown paths.
            access: Decides which calls are admitted.
            tracing: Destination of spans.
            echoes_request_id: Whether answers carry X-Request-Id; False under Ray Serve, whose proxy already sends it.
        """
        super().__init__(exception_handlers={HTTPException: self._answer_no_route})
        self.router.redirect_slashes = False  # a redirect would bypass the edge and its TLS
        self.access = access
        self.tracing = tracing
        self.echoes_request_id = echoes_request_id
        self._title = title
        self._errors = errors
        self._operations: list[Operation] = []
        self._endpoints: dict[tuple[str, bytes], _Endpoint] = {}
        """By method and path, of operations without parameters."""
        self._document: dict[str, Any] | None = None
        self._not_offered: list[tuple[re.Pattern[str], ErrorFormat, str]] = []
        self.add_route("/openapi.json", self._answer_openapi)

    async def __call__(self, scope: Connection, receive: Receive, send: Send) -> None:
        """Answer one request. Ambiguous paths are refused before anything else.

        A fixed path leads to its operation without Starlette's layers: an operation answers all its errors itself.
        """
        if scope["type"] == "http":
            path = sent_path(scope)
            if (endpoint := self._endpoints.get((scope["method"], path))) is not None:
                await endpoint(scope, receive, send)
                return
            try:
                check_path(path)
            except InvalidRequest as error:
                await self._answer_ambiguous(Request(scope), error)(scope, receive, send)
                return
        await super().__call__(scope, receive, send)

    def serve(self, operation: Operation, handler: Handler, on_error: OnError | None = None) -> None:
        """Add an operation; `on_error` is called for each of its errors."""
        self._operations.append(operation)
        endpoint = _Endpoint(self, operation, handler, on_error)
        self.router.routes.append(SentRoute(operation.path, endpoint, operation.method))
        if "{" not in operation.path:
            self._endpoints[operation.method, operation.path.encode()] = endpoint

    def describe_missing(self, paths: re.Pattern[str], errors: ErrorFormat, fix: str) -> None:
        """Answer unknown paths of this pattern in the format of their door, with this fix."""
        self._not_offered.append((paths, errors, fix))

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document of all operations."""
        if self._document is None:
            self._document = openapi_document(self._title, "1", self._operations)
        return self._document

    async def _answer_openapi(self, _: Request) -> Response:
        return json_response(self.openapi())

    async def _answer_no_route(self, http: Request, error: Exception) -> Response:
        """Answer unknown paths, suggesting the nearest path, and unknown methods, listing the allowed ones."""
        call, path = Call(_request_id_or_new(http)), http.url.path
        if isinstance(error, HTTPException) and error.status_code == _WRONG_METHOD:
            allow = ", ".join(
                sorted({method for route in self._routes_at(http.scope) for method in route.methods or ()})
            )
            status, code, headers = _WRONG_METHOD, "method_not_allowed", {"allow": allow}
            problem, fix = f"{http.method} is not possible at {path:.{_MAX_PATH_CHARS}}", f"use {allow}; see /docs"
        else:
            status, code, headers = _NO_PATH, ErrorKind.NOT_FOUND.value, {}
            problem = f"there is no path {path:.{_MAX_PATH_CHARS}}"
            fix = f"{self._nearest(path[:_MAX_PATH_CHARS])}see /docs for all"
            for paths, _, of_door in self._not_offered:
                if paths.match(path):
                    problem, fix = f"{path:.{_MAX_PATH_CHARS}} is not offered", of_door
        body = self._errors_of(http.scope.get("route"), path).no_route(code, problem, fix, call.request_id)
        response = json_response(body, status, headers)
        response.headers.update(self.echoed(call))
        return response

    def _answer_ambiguous(self, http: Request, error: InvalidRequest) -> Response:
        """Answer an ambiguous path in the error format of the operation that it would lead to."""
        call, plain = Call(_request_id_or_new(http)), posixpath.normpath(f"/{http.scope['path'].lstrip('/')}")
        meant = {
            **http.scope,
            "path": plain,
            "raw_path": quote(plain, errors="surrogateescape").encode(),
            "root_path": "",
        }
        route = next(iter(self._routes_at(meant)), None)
        response = json_response(self._errors_of(route, plain).body(error, call.request_id), _AMBIGUOUS_PATH)
        response.headers.update(self.echoed(call))
        return response

    def _routes_at(self, connection: Connection) -> list[Route]:
        """Return the routes of all methods at this path."""
        routes = (route for route in self.router.routes if isinstance(route, Route))
        return [route for route in routes if route.matches(connection)[0] is not Match.NONE]

    def _nearest(self, path: str) -> str:
        """Return the start of a sentence that suggests the nearest public path; empty without a close match."""
        public = {operation.path: None for operation in self._operations if operation.is_described}
        return "".join(f"the nearest is {near}; " for near in difflib.get_close_matches(path, public, n=1))

    def _errors_of(self, route: Route | None, path: str) -> ErrorFormat:
        """Return the error format of the route's door; without a route, of the door that the path resembles."""
        if route and isinstance(route.endpoint, _Endpoint):
            return route.endpoint.operation.errors
        return next((errors for paths, errors, _ in self._not_offered if paths.match(path)), self._errors)

    def echoed(self, call: Call) -> Mapping[str, str]:
        """Return the header with the request id, if this app is responsible for it."""
        return call.echo if self.echoes_request_id else {}


class _Endpoint:
    """One operation as an ASGI app."""

    def __init__(self, app: HttpApp, operation: Operation, handler: Handler, on_error: OnError | None) -> None:
        self.operation = operation
        self._app = app
        self._handler = handler
        self._on_error = on_error

    async def __call__(self, connection: Connection, receive: Receive, send: Send) -> None:
        operation, http = self.operation, Request(connection, receive, send)
        if operation.scope is None:
            response = await self._handler(http, Call(new_request_id()))
        elif operation.is_traced and not self._app.tracing.is_off:
            response = await self._traced(http)
        else:
            response = await self._guarded(http)
        response.headers.update(operation.headers)
        await response(connection, receive, send)

    async def _traced(self, http: Request) -> Response:
        """Guard the call inside a span, by OpenTelemetry's HTTP conventions; continues the caller's trace, if any."""
        tracing, path = self._app.tracing, self.operation.path
        about = {"http.request.method": http.method, "http.route": path, "url.path": http.url.path}
        with tracing.entry(f"{http.method} {path}", http.headers, SpanKind.SERVER, about) as span:
            response = await self._guarded(http)
            span.set_attribute("http.response.status_code", response.status_code)
            return response

    async def _guarded(self, http: Request) -> Response:
        """Guard the call; errors have the format of the operation's door."""
        operation, call = self.operation, Call(new_request_id())

        async def admit() -> None:
            call.request_id = _request_id(http)
            await self._app.access.authorize(call, http.headers, operation)

        async def answer() -> Response:
            try:
                return await self._handler(http, call)
            except ClientDisconnect as error:
                raise Gone from error

        def refuse(failure: TailraceError) -> Response:
            return error_response(failure, call.request_id, operation.errors)

        act = _act(http, operation) if operation.is_audited else None
        try:
            response = await guard(
                call, admit, answer, refuse, door=DOOR, act=act, origin=lambda: _origin(http), on_error=self._on_error
            )
        except Gone:
            return Response(status_code=_CLIENT_GONE)
        response.headers.update({**call.limits, **self._app.echoed(call), **call.answer_headers})
        return response


def _act(http: Request, operation: Operation) -> str:
    """Return a call's name in the audit line; a private operation's path may hold a user id."""
    return f"{http.method} {operation.path if operation.is_private else http.url.path}"


def _origin(http: Request) -> str:
    """Return the caller's address, as the edge saw it."""
    return http.headers.get("x-forwarded-for") or (http.client.host if http.client else "unknown")


def json_response(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response with a message or plain values as compact JSON.

    Raises ValueError for NaN and infinity in plain values.
    """
    return text_response(encode(body) if isinstance(body, Message) else json_text(body), status, headers)


def json_text(body: object) -> str:
    """Return plain values as compact JSON. Raises ValueError for NaN and infinity."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def text_response(text: str | bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(text, status, headers, media_type=JSON)


def error_response(error: TailraceError, request_id: str, errors: ErrorFormat) -> Response:
    """Return an error response, with the headers for retries and authentication."""
    headers: dict[str, str] = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = retry_after(error.retry_after_s)
    if error.kind is ErrorKind.UNAUTHENTICATED:
        headers["www-authenticate"] = "Bearer"
    return json_response(errors.body(error, request_id), errors.status[error.kind], headers)


async def read_body(http: Request, max_bytes: int) -> bytes:
    """Read the body up to the limit, whether its length is declared or not.

    Raises RequestTooLarge beyond it, InvalidRequest for a compressed body. Starlette's `stream` takes half as long
    again for a request of one message: 99 instead of 63 us of CPU.
    """
    if (encoding := http.headers.get(_ENCODING, _PLAIN).strip().lower()) not in ("", _PLAIN):
        raise InvalidRequest(_ENCODING, f"{encoding!r:.40} is not supported", "send the body uncompressed")
    declared = http.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise RequestTooLarge(max_bytes)
    body, has_more = bytearray(), True
    while has_more:
        message = await http.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body += message.get("body", b"")
        has_more = message.get("more_body", False)
        if len(body) > max_bytes:
            raise RequestTooLarge(max_bytes)
    return bytes(body)


async def read_message(http: Request, kind: type[M], max_bytes: int) -> M:
    """Read a body as a message. Raises InvalidRequest naming the first wrong field, or RequestTooLarge."""
    return decode(kind, await read_body(http, max_bytes))


def refuse_query(http: Request) -> None:
    """Reject query parameters of calls that read only the body. Raises InvalidRequest naming the first."""
    for name in http.query_params if http.scope["query_string"] else ():
        raise InvalidRequest(
            name, "a query parameter, which this call does not take", "send it as a field of the JSON body"
        )


def _request_id(http: Request) -> str:
    """Return the caller's request id, or a new id. Raises InvalidRequest.

    Starlette decodes headers as Latin-1, but ids are UTF-8.
    """
    sent = http.headers.get(REQUEST_ID)
    try:
        return request_id_from(None if sent is None else sent.encode("latin-1").decode())
    except UnicodeDecodeError as error:
        raise InvalidRequest(REQUEST_ID, "not UTF-8", "send UTF-8") from error


def _request_id_or_new(http: Request) -> str:
    """Return the caller's request id, or a new id if it is missing or malformed."""
    with contextlib.suppress(InvalidRequest):
        return _request_id(http)
    return new_request_id()
