"""The console's routes: the page's files and the small JSON API that the page reads.

Errors have the REST door's envelope.
    GET  /                      the page            GET  /console/page/NAME    its files
    GET  /console/live          SLOs, steps of the charts, drills               scope recommend
    GET  /console/bundle        the live bundle and its evaluation              scope recommend
    GET  /console/models        who has which model in memory                   scope admin
    GET  /console/users         some users in the store                         scope admin
    GET  /console/history       a user's history with titles                    scope admin
    POST /console/drills        {"llm": "off", "features": "on"}                scope admin, audited

The editor's routes are in `editor.py`.

The routes are not part of the public API, so OpenAPI excludes them. The page's files are read once and served with an
ETag and a strict content security policy, without a build step. One file is generated: the texts of tiers and reasons,
which the OpenAPI document uses too.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from services.contracts.access import Scope
from services.contracts.message import plain_of
from services.gateway.call.headers import Call
from services.gateway.call.http import HttpApp, json_response, read_message
from services.gateway.call.operation import Operation
from services.gateway.call.operations import REST_ERRORS
from services.gateway.console.messages import DrillFields
from services.gateway.console.service import ConsoleService
from services.gateway.drills import DrillTarget
from services.gateway.reasons import REASONS, TIERS

PAGE_DIR = Path(__file__).parent / "page"
INDEX = "index.html"
REASONS_FILE = "reasons.js"
HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
_MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_MAX_BODY_BYTES = 1_024


def add_console(app: HttpApp, service: ConsoleService) -> None:
    """Add the page and its API to the app."""
    door = _ConsoleDoor(service)
    app.serve(console_operation("GET", "/"), door.index)
    app.serve(console_operation("GET", "/console/page/{name}"), door.file)
    app.serve(console_operation("GET", "/console/live", Scope.RECOMMEND), door.live)
    app.serve(console_operation("GET", "/console/bundle", Scope.RECOMMEND), door.bundle)
    app.serve(console_operation("GET", "/console/models", Scope.ADMIN), door.models)
    app.serve(console_operation("GET", "/console/users", Scope.ADMIN), door.users)
    app.serve(console_operation("GET", "/console/history", Scope.ADMIN), door.history)
    app.serve(console_operation("POST", "/console/drills", Scope.ADMIN, is_audited=True), door.drills)


def console_operation(method: str, path: str, scope: Scope | None = None, *, is_audited: bool = False) -> Operation:
    """Return an operation that OpenAPI excludes; browsers do not store its answers."""
    return Operation(
        name=path,
        method=method,
        path=path,
        summary="",
        scope=scope,
        errors=REST_ERRORS,
        answers={},
        headers={} if scope is None else {**HEADERS, "cache-control": "no-store"},
        is_audited=is_audited,
        is_described=False,
    )


class _ConsoleDoor:
    """The handlers of the operations."""

    def __init__(self, service: ConsoleService) -> None:
        self._service = service
        self._page = load_page()

    async def index(self, http: Request, _: Call) -> Response:
        return self._page[INDEX].answer(http.headers.get("if-none-match"))

    async def file(self, http: Request, _: Call) -> Response:
        name = http.path_params["name"]
        if name not in self._page:
            raise HTTPException(404)
        return self._page[name].answer(http.headers.get("if-none-match"))

    async def live(self, _: Request, __: Call) -> Response:
        return json_response(asdict(self._service.now()))

    async def bundle(self, _: Request, __: Call) -> Response:
        return json_response(asdict(await self._service.bundle()))

    async def models(self, _: Request, __: Call) -> Response:
        return json_response({"models": [asdict(model) for model in await self._service.models()]})

    async def users(self, _: Request, __: Call) -> Response:
        return json_response({"users": [asdict(user) for user in await self._service.users()]})

    async def history(self, http: Request, _: Call) -> Response:
        return json_response(asdict(await self._service.history(http.query_params.get("user_id", ""))))

    async def drills(self, http: Request, _: Call) -> Response:
        sent = plain_of(await read_message(http, DrillFields, _MAX_BODY_BYTES))
        wanted = {DrillTarget(name): state == "off" for name, state in sent.items()}
        return json_response({"drills": await self._service.switch(wanted)})


@dataclass(frozen=True, slots=True)
class StaticFile:
    """One file with its ETag."""

    body: bytes
    media_type: str
    etag: str

    def answer(self, if_none_match: str | None) -> Response:
        """Return the file, or 304 if the caller has this version."""
        headers = {**HEADERS, "etag": self.etag}
        known = {tag.strip().removeprefix("W/") for tag in (if_none_match or "").split(",")}
        if self.etag in known:
            return Response(status_code=304, headers=headers)
        return Response(self.body, headers=headers, media_type=self.media_type)


def load_page(folder: Path = PAGE_DIR) -> Mapping[str, StaticFile]:
    """Return the page's files by name, including the generated file."""
    bodies = {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.suffix in _MEDIA_TYPES}
    return {name: _static_file(name, body) for name, body in {**bodies, REASONS_FILE: _reasons_module()}.items()}


def _static_file(name: str, body: bytes) -> StaticFile:
    return StaticFile(body, _MEDIA_TYPES[Path(name).suffix], f'"{hashlib.sha256(body).hexdigest()[:20]}"')


def _reasons_module() -> bytes:
    """Return the table of tiers and reasons as a JavaScript module."""
    tiers = {tier.value: {"title": text.title, "meaning": text.meaning} for tier, text in TIERS.items()}
    reasons = {reason.value: text.meaning for reason, text in REASONS.items()}
    return f"export const TIER_TEXTS = {json.dumps(tiers)}\nexport const REASONS = {json.dumps(reasons)}\n".encode()
