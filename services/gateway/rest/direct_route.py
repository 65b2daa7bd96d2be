"""A route that FastAPI documents and that is served without it: request in, response out.

FastAPI would read dependencies, open exit stacks and check a response model around each call, none of which the doors use; that
costs as much as an answer from memory.
"""

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.types import Receive, Scope, Send


class DirectRoute(APIRoute):
    """Its endpoint takes a Request, gives a Response, and raises nothing that a caller should read."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the endpoint; a method that it does not have is answered by FastAPI."""
        if scope["method"] not in (self.methods or ()):
            await super().handle(scope, receive, send)
            return
        response = await self.endpoint(Request(scope, receive, send))
        await response(scope, receive, send)
