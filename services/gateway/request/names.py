"""The names that a gateway serves, and the bundle that answers a request."""

import asyncio
from collections.abc import Callable, Sequence

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

        Raises InvalidRequest listing the served names.
        """
        found = self.first if name is None else self._bundles.get(name)
        if found is None:
            raise InvalidRequest("name", f"unknown name {name!r:.100}", f"this stack serves {', '.join(self._bundles)}")
        return found

    @property
    def is_loaded(self) -> bool:
        """Whether at least one name has a live bundle."""
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
        """Load the bundles of the names one after another, then follow the names in the background."""
        for bundle in self._bundles.values():
            await bundle.start()

    async def stop(self) -> None:
        """Stop following; loaded bundles stay."""
        await asyncio.gather(*(bundle.stop() for bundle in self._bundles.values()))
