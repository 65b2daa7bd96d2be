"""The data plane as one tenant's callers reach it: the only place where their ids become scoped ids, and back.

    door ─▶ TenantPlane(plane, caller) ─▶ ids scoped to caller.tenant ─▶ the operations, which know no tenants
                                       ◀─ ids as the caller knows them ◀─

Doors reach operations through it for every tenant: the default tenant's ids stay as they are, but another tenant's
names stay unknown. An operation that gets an id otherwise refuses it (`Recommend`) or needs a tenant to be called.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from services.contracts.access import Caller
from services.contracts.answers import BundleInfo
from services.contracts.assignment import AssignRequest, AssignResponse
from services.contracts.batch import BatchAnswer, BatchEntry
from services.contracts.erasure import ErasureProgress
from services.contracts.events import EventBody, RecordEventsResponse
from services.contracts.explanation import ExplanationRecord
from services.contracts.message import check_id
from services.contracts.recommend import Recommendation, RecommendRequest
from services.contracts.tenant import local, local_name, local_surface, scoped, without_prefix
from services.gateway.data_plane import DataPlane
from services.gateway.events.items import ItemOperations
from services.router.deadline import Arrival


@dataclass(frozen=True, slots=True)
class TenantPlane:
    """The operations of one caller's tenant."""

    plane: DataPlane
    caller: Caller

    @property
    def tenant(self) -> str:
        return self.caller.tenant

    async def recommend(self, request: RecommendRequest, arrival: Arrival, door: str) -> Recommendation:
        return await self.plane.recommend(request.for_tenant(self.tenant), arrival, door, self.caller)

    async def recommend_batch(self, entries: Sequence[BatchEntry], arrival: Arrival, door: str) -> list[BatchAnswer]:
        """Answer a batch; see RecommendBatch."""
        own = [
            replace(entry, request=entry.request.for_tenant(self.tenant))
            if isinstance(entry.request, RecommendRequest)
            else entry
            for entry in entries
        ]
        return await self.plane.recommend_batch(own, arrival, door, self.caller)

    async def record(self, drafts: Sequence[EventBody], door: str, request_id: str) -> RecordEventsResponse:
        return await self.plane.record(drafts, self.tenant, door, request_id)

    def assign(self, request: AssignRequest) -> AssignResponse:
        """Return the assignment of a user or session; see Assign."""
        return self.plane.assign(scoped(self.tenant, request.unit_id), self.tenant)

    def bundle(self, name: str | None) -> BundleInfo:
        """Return the description of the live bundle of one of the tenant's names; see DataPlane."""
        full_name = self.plane.names.full_name(name, self.tenant)
        info = self.plane.bundle(full_name)
        return msgspec.structs.replace(info, name=local_name(info.name))

    async def explanation(self, request_id: str) -> ExplanationRecord:
        """Return how one of the tenant's requests was answered; see Explanations."""
        check_id("request_id", request_id)
        record = await self.plane.explanations.find(scoped(self.tenant, request_id))
        return msgspec.structs.replace(
            record,
            request_id=local(record.request_id),
            user_id=record.user_id and local(record.user_id),
            surface=record.surface and local_surface(record.surface),
        )

    @property
    def items(self) -> ItemOperations:
        return self.plane.items.of(self.tenant)

    async def erase(self, user_id: str, door: str, request_id: str) -> ErasureProgress:
        return await self.plane.users.erase(user_id, self.tenant, door, request_id)

    async def receipt(self, erasure_id: str) -> ErasureProgress:
        return await self.plane.users.receipt(erasure_id, self.tenant)

    async def export(self, user_id: str) -> Mapping[str, Any]:
        """Return all data of a user; see ExportUser."""
        check_id("user_id", user_id)
        exported: Mapping[str, Any] = without_prefix(self.tenant, await self.plane.export(scoped(self.tenant, user_id)))
        return exported
