"""Paths and methods that do not exist, told to OpenAI's clients in OpenAI's envelope and to everybody else in the REST door's.

OpenAI's clients ask below /v1. What is there of the REST door's own (a wrong method on it, say) stays the REST door's.
"""

from collections.abc import Awaitable, Callable, Sequence

from fastapi import Request, Response

from services.gateway.openai.answers import Plain
from services.gateway.openai.errors import error_body
from services.gateway.rest.answers import no_route

_BASE = "/v1/"


def absent_routes(paths: Sequence[str]) -> Callable[[Request, Exception], Awaitable[Response]]:
    """Make the handler of 404 and 405 for an app whose OpenAI door has these paths."""
    here = ", ".join(paths)

    def told(code: str, message: str) -> Plain:
        said = f"{message}; of OpenAI's paths these are: {here}; see /docs for all"
        return error_body(said, "invalid_request_error", code)

    async def answer(http: Request, error: Exception) -> Response:
        return await no_route(http, error, told if _is_openais(http, paths) else None)

    return answer


def _is_openais(http: Request, paths: Sequence[str]) -> bool:
    """Tell by the route whose path it is, though not its method; where there is none, by the path."""
    route = http.scope.get("route")
    return http.url.path.startswith(_BASE) if route is None else route.path in paths
