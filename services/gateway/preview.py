"""Previews: answers a user by the surface in force and by a draft, with nothing saved, recorded or counted.

No impression is sent, so previews affect neither exposure counts nor training data. Exploration and experiments are
off: the two answers differ only by their surfaces.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

from services.contracts.access import Caller
from services.contracts.explanation import RuledItem
from services.contracts.nearest import nearest
from services.contracts.recommend import Recommendation, RecommendRequest
from services.contracts.tenant import DEFAULT_TENANT, tenant_of_surface
from services.errors import InvalidRequest
from services.gateway.recommend import Recommend, SurfaceFinder
from services.gateway.records.answer import AnswerRecord, AnswerSink
from services.gateway.records.explanations import ruled_items
from services.gateway.surfaces.surface import NO_SURFACE, Surface
from services.gateway.surfaces.surfaces import Surfaces
from services.router.deadline import Arrival

_DOOR = "console"


@dataclass(frozen=True, slots=True)
class Previewed:
    """An answer, and its first items before and after the surface's rules; empty if the surface has no rules."""

    answer: Recommendation
    ruled: tuple[RuledItem, ...]


class PreviewSurface:
    """Tries draft surfaces on users."""

    def __init__(
        self,
        surfaces: Surfaces,
        recommend_by: Callable[[SurfaceFinder, AnswerSink], Recommend],
        clock: Callable[[], float],
    ) -> None:
        """`recommend_by` builds the ordinary request path with the given surfaces and sink."""
        self._surfaces = surfaces
        self._recommend_by = recommend_by
        self._clock = clock

    async def __call__(
        self, text: str, name: str, user_id: str, caller: Caller, request_id: str
    ) -> tuple[Previewed, Previewed]:
        """Return the user's answers by the surface in force (or by none, for a new name) and by the draft of this name.

        Raises InvalidRequest for a draft that could not be saved, and every error of an ordinary request.
        """
        if tenant_of_surface(name) != caller.tenant:
            raise InvalidRequest("surface", f"{name!r:.100} belongs to a tenant", "preview a surface of your own")
        drafted = await asyncio.to_thread(self._surfaces.read_draft, text)
        if name not in drafted:
            raise InvalidRequest("surface", f"unknown surface {name!r:.100}", nearest(name, drafted))
        request = RecommendRequest(request_id=request_id, user_id=user_id, surface=name)
        before = await self._answer(self._surfaces.in_force.get(name, NO_SURFACE), request, caller)
        return before, await self._answer(drafted[name], request, caller)

    async def _answer(self, surface: Surface, request: RecommendRequest, caller: Caller) -> Previewed:
        records: list[AnswerRecord] = []
        recommend = self._recommend_by(_Only(replace(surface, explore=None)), records.append)
        answer = await recommend(request, Arrival(self._clock()), _DOOR, caller)
        return Previewed(answer, ruled_items(records[0]))


@dataclass(frozen=True, slots=True)
class _Only:
    """Returns the same surface for every request."""

    surface: Surface

    def find(self, name: str | None, unit_id: str | None, tenant: str = DEFAULT_TENANT) -> Surface:
        return self.surface
