"""The names that a gateway serves, and the bundle that answers a request."""

import asyncio
from collections.abc import Callable, Sequence

from models.registry.name_record import DEFAULT_NAME
from services.contracts.tenant import local_name, scoped_name, tenant_of_name
from services.errors import InvalidRequest
from services.gateway.request.live_bundle import Live, LiveBundle


class Names:
    """The bundles of each served name. Names follow their records independently of each other."""

    def __init__(self, bundles: Sequence[LiveBundle]) -> None:
        """`bundles` must not be empty; the first serves requests without a name."""
        self._bundles = {bundle.name: bundle for bundle in bundles}
        self.first = bundles[0]

    def find(self, name: str | None, unit_id: str | None, now_ms: float) -> Live:
        """Return the bundle assigned to this user, or visitor session, at this time (Unix ms).

        Raises as `of` does, and DependencyUnavailable if no bundle is live.
        """
        return self.of(name).of_unit(unit_id, now_ms)

    def of(self, name: str | None) -> LiveBundle:
        """Return the bundles of a name, or of the first name for None.

        Raises InvalidRequest listing the tenant's served names.
        """
        found = self.first if name is None else self._bundles.get(name)
        if found is None:
            raise self._unknown(local_name(name or ""), tenant_of_name(name or ""))
        return found

    def full_name(self, name: str | None, tenant: str) -> str | None:
        """Return one of a tenant's names as `of` takes it. Raises InvalidRequest for another tenant's name."""
        if name is None:
            return scoped_name(tenant, DEFAULT_NAME) if tenant else None
        full_name = scoped_name(tenant, name)
        if tenant_of_name(full_name) != tenant:
            raise self._unknown(name, tenant)
        return full_name

    @property
    def is_loaded(self) -> bool:
        return any(bundle.is_loaded for bundle in self._bundles.values())

    @property
    def loaded(self) -> list[Live]:
        return [live for bundle in self._bundles.values() for live in bundle.loaded]

    def loaded_for(self, tenant: str) -> list[Live]:
        """All bundles that serve now under this tenant's names."""
        return [live for live in self.loaded if live.tenant == tenant]

    def before_swap(self, prepare: Callable[[Live], object]) -> None:
        for bundle in self._bundles.values():
            bundle.before_swap(prepare)

    def _unknown(self, name: str, tenant: str) -> InvalidRequest:
        own = [local_name(one) for one in self._bundles if tenant_of_name(one) == tenant]
        return InvalidRequest(
            "name", f"unknown name {name!r:.100}", f"this stack serves {', '.join(own) or 'none yet'}"
        )

    async def start(self) -> None:
        """Load the bundles of the names one after another, then follow the names in the background."""
        for bundle in self._bundles.values():
            await bundle.start()

    async def stop(self) -> None:
        """Stop following; loaded bundles stay."""
        await asyncio.gather(*(bundle.stop() for bundle in self._bundles.values()))
