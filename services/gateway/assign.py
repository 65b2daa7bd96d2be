"""The surfaces, bundles and variants that a user's requests would get now. Reads only memory."""

from collections.abc import Callable, Sequence

from services.contracts.assignment import AssignResponse, SurfaceAssignment
from services.contracts.experiments import Assignment
from services.contracts.tenant import local_name, local_surface
from services.errors import DependencyUnavailable
from services.gateway.request.names import Names
from services.gateway.surfaces.experiments import RunningExperiments
from services.gateway.surfaces.surface import Surface


class Assign:
    """Computes assignments from the same state that real requests use."""

    def __init__(self, names: Names, experiments: RunningExperiments, wall_clock: Callable[[], float]) -> None:
        self._names = names
        self._experiments = experiments
        self._wall_clock = wall_clock

    def __call__(self, unit_id: str, tenant: str) -> AssignResponse:
        """Return this user's (or session's) assignment on every surface of the tenant."""
        nowhere = self._experiments.find(None, unit_id, tenant)
        assignments = [self._on(nowhere, unit_id, ())]
        assigned = self._experiments.assigned(unit_id, tenant)
        assignments += [self._on(surface, unit_id, made) for surface, made in assigned.values()]
        return AssignResponse(surfaces=tuple(assignments))

    def _on(self, surface: Surface, unit_id: str, assigned: Sequence[Assignment]) -> SurfaceAssignment:
        bundles = self._names.of(surface.model)
        try:
            version = bundles.of_unit(unit_id, self._wall_clock() * 1_000).version
        except DependencyUnavailable:
            version = None
        canary = bundles.canary
        return SurfaceAssignment(
            surface=surface.name and local_surface(surface.name),
            name=local_name(bundles.name),
            bundle_version=version,
            is_canary=canary is not None and version == canary.version,
            variants={assignment.experiment: assignment.variant for assignment in assigned},
        )
