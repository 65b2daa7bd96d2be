"""The experiments in force: variants of surfaces by `experiments.toml`, reloaded on change (`followed_file.py`).

A salted hash of the user id, or of a visitor's session id, decides: the same at every door, in every replica, in the
standby and after a restart. A file that names an unknown surface or model is rejected. An experiment whose surface or
model disappears later is suspended, so that no impression records a variant that was not shown.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

from services.contracts.experiments import Assignment, Experiment, Experiments, read_experiments
from services.contracts.nearest import nearest
from services.contracts.tenant import DEFAULT_TENANT, tenant_of_name, tenant_of_surface
from services.errors import ConfigError
from services.gateway.followed_file import FileState, FollowedFile
from services.gateway.surfaces.surface import Surface
from services.gateway.surfaces.surfaces import Surfaces

_Files = tuple[Mapping[str, Surface], Mapping[str, Experiment]]


class RunningExperiments(FollowedFile[Mapping[str, Experiment]]):
    """Finds a surface as assigned to a user. Without a file, surfaces are unchanged."""

    def __init__(
        self,
        path: Path | None,
        surfaces: Surfaces,
        on_state: Callable[[FileState], None] = lambda _: None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Read the file. Raises ConfigError.

        Args:
            path: The file.
            surfaces: The surfaces that experiments vary.
            on_state: Called with the state at construction and at each change.
            wall_clock: Returns Unix seconds.
        """
        self._surfaces = surfaces
        self._wall_clock = wall_clock
        super().__init__(
            path, "experiments", lambda file: read_experiments(file).by_name, {}, self._check_names, on_state
        )
        self._sorted: tuple[_Files, Mapping[str, Experiments]] = (({}, {}), {})

    def find(self, name: str | None, unit_id: str | None, tenant: str = DEFAULT_TENANT) -> Surface:
        """Return this tenant's surface of this name as assigned to this user (or session).

        Raises InvalidRequest suggesting the nearest of the tenant's names.
        """
        surface = self._surfaces.find(name, tenant)
        if name is None or unit_id is None or not self.in_force:
            return surface
        surfaces, by_surface = self._by_surface()
        return surface.varied(self._assigned(by_surface, name, unit_id), surfaces)

    def assigned(
        self, unit_id: str, tenant: str = DEFAULT_TENANT
    ) -> Mapping[str, tuple[Surface, tuple[Assignment, ...]]]:
        """Return every surface of this tenant as assigned to this user (or session), with the assignments."""
        surfaces, by_surface = self._by_surface()
        own = [name for name in surfaces if tenant_of_surface(name) == tenant]
        assignments = {name: self._assigned(by_surface, name, unit_id) for name in own}
        return {name: (surfaces[name].varied(assigned, surfaces), assigned) for name, assigned in assignments.items()}

    def _assigned(self, by_surface: Mapping[str, Experiments], name: str, unit_id: str) -> tuple[Assignment, ...]:
        running = by_surface.get(name)
        return () if running is None else running.assign(name, unit_id, self._now_ms)

    def _by_surface(self) -> tuple[Mapping[str, Surface], Mapping[str, Experiments]]:
        """Return the surfaces in force and their valid experiments by surface; recomputed when either file changes."""
        surfaces, experiments = self._surfaces.in_force, self.in_force
        (old_surfaces, old_experiments), by_surface = self._sorted
        if old_surfaces is not surfaces or old_experiments is not experiments:
            valid = {
                name: experiment
                for name, experiment in experiments.items()
                if not any(self._unknown(name, experiment, surfaces))
            }
            by_surface = {}
            for surface in surfaces:
                if running := {
                    name: experiment for name, experiment in valid.items() if surface in experiment.surfaces
                }:
                    by_surface[surface] = Experiments(running)
            self._sorted = (surfaces, experiments), by_surface
        return surfaces, by_surface

    @property
    def _now_ms(self) -> int:
        return int(self._wall_clock() * 1_000)

    def _check_names(self, experiments: Mapping[str, Experiment]) -> None:
        """Reject experiments with unknown names, except ended ones. Raises ConfigError."""
        for name, experiment in experiments.items():
            if experiment.ends_ms is None or self._now_ms < experiment.ends_ms:
                for where, value, known in self._unknown(name, experiment, self._surfaces.in_force):
                    raise ConfigError(f"{self.path}: {where}: {value!r} is unknown; {nearest(value, known)}")

    def _unknown(
        self, name: str, experiment: Experiment, surfaces: Mapping[str, Surface]
    ) -> Iterator[tuple[str, str, Collection[str]]]:
        """Yield each entry with an unknown name: its path, the name, and the known names of the same tenant."""
        tenant = tenant_of_surface(min(experiment.surfaces, default=""))
        own = [surface for surface in surfaces if tenant_of_surface(surface) == tenant]
        models = [model for model in self._surfaces.models if tenant_of_name(model) == tenant]
        needed: list[tuple[str, str | None, Collection[str]]] = [
            ("surfaces", surface, own) for surface in sorted(experiment.surfaces)
        ]
        for key, variant in experiment.variants.items():
            needed += [(f"variants.{key}.rules", variant.rules, own)]
            needed += [(f"variants.{key}.name", variant.name, models)]
        for where, value, known in needed:
            if value is not None and value not in known:
                yield f"experiments.{name}.{where}", value, known
