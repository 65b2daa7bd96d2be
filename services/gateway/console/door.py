"""The console's routes: the page's files and the small JSON API that the page reads. Errors have the REST door's envelope.

    GET  /                      the page            GET  /console/page/NAME    its files
    GET  /console/live          SLOs, steps of the charts, drills               scope recommend
    GET  /console/bundle        the live bundle and its evaluation              scope recommend
    GET  /console/users         some users that the store holds                 scope admin
    GET  /console/history       a user's history with titles                    scope admin
    POST /console/drills        {"llm": "off", "features": "on"}                scope admin, audited

The routes are no part of the public API, so OpenAPI leaves them out.
"""

from collections.abc import Awaitable, Callable
from dataclasses import asdict

import pydantic_core
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from services.contracts.access import Scope
from services.errors import InvalidRequest
from services.gateway.call.headers import Call
from services.gateway.console.service import ConsoleService
from services.gateway.console.static import HEADERS, INDEX, load_page
from services.gateway.rest.answers import guarded, json_response, no_route
from services.gateway.rest.body import read_body
from services.gateway.tiers.drills import Part

_MAX_BODY_BYTES = 1_024
_STATES = {"off": True, "on": False}


def add_console(app: FastAPI, service: ConsoleService) -> None:
    """Add the page and its API to the REST door's app."""
    door = _ConsoleDoor(service)
    for method, path, endpoint in (
        ("GET", "/", door.index),
        ("GET", "/console/page/{name}", door.file),
        ("GET", "/console/live", door.live),
        ("GET", "/console/bundle", door.bundle),
        ("GET", "/console/users", door.users),
        ("GET", "/console/history", door.history),
        ("POST", "/console/drills", door.drills),
    ):
        app.add_api_route(path, endpoint, methods=[method], response_model=None, include_in_schema=False)


class _ConsoleDoor:
    """The endpoints."""

    def __init__(self, service: ConsoleService) -> None:
        self._service = service
        self._page = load_page()

    async def index(self, http: Request) -> Response:
        """Return the page."""
        return self._page[INDEX].answer(http.headers.get("if-none-match"))

    async def file(self, http: Request, name: str) -> Response:
        """Return one of the page's files."""
        if name not in self._page:
            return await no_route(http, HTTPException(404))
        return self._page[name].answer(http.headers.get("if-none-match"))

    async def live(self, http: Request) -> Response:
        """Return the live view."""

        async def work(_: Call) -> Response:
            return json_response(asdict(self._service.now()))

        return await _guarded(http, work, Scope.RECOMMEND)

    async def bundle(self, http: Request) -> Response:
        """Return the live bundle."""

        async def work(_: Call) -> Response:
            return json_response(asdict(await self._service.bundle()))

        return await _guarded(http, work, Scope.RECOMMEND)

    async def users(self, http: Request) -> Response:
        """Return some users."""

        async def work(_: Call) -> Response:
            return json_response({"users": [asdict(user) for user in await self._service.users()]})

        return await _guarded(http, work, Scope.ADMIN)

    async def history(self, http: Request) -> Response:
        """Return a user's history."""

        async def work(_: Call) -> Response:
            return json_response(asdict(await self._service.history(http.query_params.get("user_id", ""))))

        return await _guarded(http, work, Scope.ADMIN)

    async def drills(self, http: Request) -> Response:
        """Switch parts off or on."""

        async def work(_: Call) -> Response:
            refuse_other_sites(http.headers.get("sec-fetch-site"))
            wanted = parse_drills(await read_body(http, _MAX_BODY_BYTES))
            return json_response({"drills": await self._service.switch(wanted)})

        return await _guarded(http, work, Scope.ADMIN, audited=True)


def refuse_other_sites(fetch_site: str | None) -> None:
    """Refuse a call that another site's page makes from a visitor's browser (CSRF). Raises InvalidRequest.

    Browsers send `Sec-Fetch-Site` (W3C Fetch Metadata); other programs do not.
    """
    if fetch_site not in (None, "same-origin", "none"):
        raise InvalidRequest(
            "sec-fetch-site", f"a page of another site ({fetch_site})", "use the console's own page, or no browser"
        )


def parse_drills(body: bytes) -> dict[Part, bool]:
    """Return which parts are to be off (True) or on (False). Raises InvalidRequest naming the field."""
    try:
        sent = pydantic_core.from_json(body)
    except ValueError as error:
        raise InvalidRequest("body", "not JSON", 'send {"llm": "off"}') from error
    if not isinstance(sent, dict) or not sent:
        raise InvalidRequest("body", "not an object that names a part", 'send {"llm": "off"}')
    return {_part(name): _state(name, state) for name, state in sent.items()}


def _part(name: str) -> Part:
    if name not in set(Part):
        raise InvalidRequest(name, "unknown", f"the parts are {', '.join(Part)}")
    return Part(name)


def _state(name: str, state: object) -> bool:
    if not isinstance(state, str) or state not in _STATES:
        raise InvalidRequest(name, "neither on nor off", 'send "on" or "off"')
    return _STATES[state]


async def _guarded(
    http: Request, work: Callable[[Call], Awaitable[Response]], scope: Scope, *, audited: bool = False
) -> Response:
    response = await guarded(http, work, scope=scope, audited=audited)
    response.headers.update({**HEADERS, "cache-control": "no-store"})
    return response
