"""The console's routes that change answers.

All refuse calls from other sites' pages, and changes and previews are audited. A route needs the scope of the
equivalent API operation: `items` for items, `erase` for erasures, and `admin` for all other routes.

    GET   /console/items?find=TEXT         items by id, beginning of an id, or title
    PATCH /console/items/ID                {"available": false}: hidden from every answer within a second
    GET   /console/surfaces                the file's text, its SHA-256, and whether it can be saved
    PUT   /console/surfaces                {"text": ..., "sha256": ...}: saves a valid text, unless the file has changed
    POST  /console/surfaces:boost          {"text": ..., "surface": ..., "item_id": ..., "factor": ...}:
                                           the text with the boost, not saved
    POST  /console/surfaces:form           {"text": ..., "surface": ...}: the form fields of the text
    POST  /console/surfaces:set            {"text": ..., "surface": ..., "fields": {"k": 6}}:
                                           the text with these fields, not saved
    POST  /console/surfaces:preview        {"text": ..., "surface": ..., "user_id": ...}: answers now and by the text
    POST  /console/erasures                {"user_id": ...}: erases a user; the audit line omits the user
    GET   /console/erasures/ID             the receipt

Holds no rule: like the other doors, it passes requests to the data plane.
"""

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from services.contracts.access import Scope
from services.contracts.erasure import ReceiptBody
from services.contracts.message import plain_of
from services.errors import InvalidRequest, NotFound
from services.gateway.call.headers import Call
from services.gateway.call.http import HttpApp, json_response, read_message
from services.gateway.call.operations import ERASE_USER, ERASURE, GET_ITEM, PATCH_ITEM
from services.gateway.console.door import console_operation
from services.gateway.console.items import find_items
from services.gateway.console.messages import (
    Availability,
    BoostedSurface,
    ErasedUser,
    SavedSurfaces,
    SurfaceDraft,
    SurfaceFields,
    SurfaceForm,
)
from services.gateway.data_plane import DataPlane
from services.gateway.preview import Previewed
from services.gateway.surfaces.editor import MAX_TEXT_BYTES
from services.gateway.tenant_plane import TenantPlane

DOOR = "console"
_MAX_BODY_BYTES = 2 * MAX_TEXT_BYTES + 2_048
"""Quotes and line breaks take two bytes in JSON."""


def add_editor(app: HttpApp, plane: Callable[[], DataPlane]) -> None:
    """Add the routes to the app. `plane` returns the running data plane."""
    door = _EditorDoor(plane)
    for method, path, scope, handler in (
        ("GET", "/console/items", GET_ITEM.scope, door.find),
        ("PATCH", "/console/items/{item_id}", PATCH_ITEM.scope, door.show),
        ("GET", "/console/surfaces", Scope.ADMIN, door.surfaces),
        ("PUT", "/console/surfaces", Scope.ADMIN, door.save),
        ("POST", "/console/surfaces:boost", Scope.ADMIN, door.boost),
        ("POST", "/console/surfaces:form", Scope.ADMIN, door.form),
        ("POST", "/console/surfaces:set", Scope.ADMIN, door.set),
        ("POST", "/console/surfaces:preview", Scope.ADMIN, door.preview),
        ("POST", "/console/erasures", ERASE_USER.scope, door.erase),
        ("GET", "/console/erasures/{erasure_id}", ERASURE.scope, door.receipt),
    ):
        app.serve(console_operation(method, path, scope, is_audited=method != "GET"), handler)


class _EditorDoor:
    """The handlers of the operations."""

    def __init__(self, plane: Callable[[], DataPlane]) -> None:
        self._plane = plane

    async def find(self, http: Request, _: Call) -> Response:
        items = await find_items(self._plane().names.first.current().items, http.query_params.get("find", ""))
        return json_response({"items": [asdict(item) for item in items]})

    async def show(self, http: Request, _: Call) -> Response:
        sent = await read_message(http, Availability, _MAX_BODY_BYTES)
        state = await self._plane().items.patch(http.path_params["item_id"], {"available": sent.available})
        return json_response({"item_id": state.item_id, "available": state.available})

    async def surfaces(self, _: Request, __: Call) -> Response:
        return json_response(asdict(await asyncio.to_thread(self._plane().surfaces_editor.read)))

    async def save(self, http: Request, _: Call) -> Response:
        sent = await read_message(http, SavedSurfaces, _MAX_BODY_BYTES)
        saving = asyncio.to_thread(self._plane().surfaces_editor.save, _text(sent.text), sent.sha256)
        return json_response(asdict(await saving))

    async def boost(self, http: Request, _: Call) -> Response:
        sent = await read_message(http, BoostedSurface, _MAX_BODY_BYTES)
        if self._plane().names.first.current().items.index(sent.item_id) is None:
            raise NotFound(f"there is no item {sent.item_id!r:.100}", "search for it first")
        boosting = self._plane().surfaces_editor.boosted
        text = await asyncio.to_thread(boosting, _text(sent.text), sent.surface, sent.item_id, sent.factor)
        return json_response({"text": text})

    async def form(self, http: Request, _: Call) -> Response:
        sent = await read_message(http, SurfaceForm, _MAX_BODY_BYTES)
        reading = asyncio.to_thread(self._plane().surfaces_editor.fields, _text(sent.text), sent.surface)
        return json_response({"fields": await reading})

    async def set(self, http: Request, _: Call) -> Response:
        sent = await read_message(http, SurfaceFields, _MAX_BODY_BYTES)
        setting = self._plane().surfaces_editor.with_fields
        text = await asyncio.to_thread(setting, _text(sent.text), sent.surface, sent.fields)
        return json_response({"text": text})

    async def preview(self, http: Request, call: Call) -> Response:
        sent = await read_message(http, SurfaceDraft, _MAX_BODY_BYTES)
        before, after = await self._plane().preview(
            _text(sent.text), sent.surface, sent.user_id, call.admitted, call.request_id
        )
        return json_response({"before": self._previewed(before), "after": self._previewed(after)})

    async def erase(self, http: Request, call: Call) -> Response:
        sent = await read_message(http, ErasedUser, _MAX_BODY_BYTES)
        return json_response(
            ReceiptBody.of(await TenantPlane(self._plane(), call.admitted).erase(sent.user_id, DOOR, call.request_id)),
            202,
        )

    async def receipt(self, http: Request, call: Call) -> Response:
        return json_response(
            ReceiptBody.of(await TenantPlane(self._plane(), call.admitted).receipt(http.path_params["erasure_id"]))
        )

    def _previewed(self, previewed: Previewed) -> dict[str, Any]:
        items = self._plane().names.first.current().items
        ruled = [{**plain_of(item), "title": _title(items, item.item_id)} for item in previewed.ruled]
        return {**plain_of(previewed.answer), "ruled": ruled}


def _title(items: Any, item_id: str) -> str:
    index = items.index(item_id)
    return item_id if index is None else str(items.title(index))


def _text(text: str) -> str:
    if len(text.encode(errors="surrogatepass")) > MAX_TEXT_BYTES:
        raise InvalidRequest("text", "too long", f"write at most {MAX_TEXT_BYTES} bytes")
    return text
