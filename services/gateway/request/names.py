"""The names that a gateway serves, and which of their bundles answers a request."""

import asyncio
from collections.abc import Callable, Sequence

from services.errors import InvalidRequest
from services.gateway.request.live_bundle import Live, LiveBundle


class Names:
    """The bundles of each served name. Names follow their records independently of each other."""

    def __init__(self, bundles: Sequence[LiveBundle]) -> None:
        """Take at least one; the first is that of requests which name none."""
        self._bundles = {bundle.name: bundle for bundle in bundles}
        self.first = bundles[0]

    def find(self, name: str | None, unit_id: str | None, now_ms: float) -> Live:
        """Return the bundle that answers this user, or visitor's session, at this time (Unix ms). Raises as `of` does, and DependencyUnavailable where nothing is live."""
        return self.of(name).of_unit(unit_id, now_ms)

    def of(self, name: str | None) -> LiveBundle:
        """Return the bundles of a name, for None of the first. Raises InvalidRequest with the names that there are."""
        found = self.first if name is None else self._bundles.get(name)
        if found is None:
            raise InvalidRequest("name", f"unknown name {name!r:.100}", f"this stack serves {', '.join(self._bundles)}")
        return found

    @property
    def is_loaded(self) -> bool:
        """Whether one of the names is answered."""
        return any(bundle.is_loaded for bundle in self._bundles.values())

    @property
    def loaded(self) -> list[Live]:
        """All bundles that serve now."""
        return [live for bundle in self._bundles.values() for live in bundle.loaded]

    def before_swap(self, prepare: Callable[[Live], object]) -> None:
        """Call `prepare` with each bundle; see LiveBundle."""
        for bundle in self._bundles.values():
            bundle.before_swap(prepare)

    async def start(self) -> None:
        """Load what the names serve, one after another, then follow them in the background."""
        for bundle in self._bundles.values():
            await bundle.start()

    async def stop(self) -> None:
        """Stop following; what is loaded stays."""
        await asyncio.gather(*(bundle.stop() for bundle in self._bundles.values()))
