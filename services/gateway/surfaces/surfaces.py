"""The surfaces in force, reloaded when their file changes (`followed_file.py`). The file must be valid at the start."""

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from models.registry.name_record import DEFAULT_NAME
from services.contracts.nearest import nearest
from services.contracts.tenant import DEFAULT_TENANT, local_surface, scoped_name, tenant_of_name, tenant_of_surface
from services.errors import ConfigError, InvalidRequest
from services.gateway.followed_file import FileState, FollowedFile
from services.gateway.surfaces.surface import Surface, default_surface, parse_surface

MAX_SURFACES = 64
_NAME = re.compile(r"([a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?/)?[a-z0-9][a-z0-9._-]{0,63}")


class Surfaces(FollowedFile[Mapping[str, Surface]]):
    """Finds a surface by its name.

    Reads the file at construction and whenever it changes; without a file `in_force` is empty.
    """

    def __init__(
        self,
        path: Path | None,
        models: Sequence[str] = (DEFAULT_NAME,),
        check: Callable[[Surface], None] = lambda _: None,
        on_state: Callable[[FileState], None] = lambda _: None,
    ) -> None:
        """Read the file. Raises ConfigError.

        Args:
            path: The file.
            models: The served bundle names.
            check: Raises InvalidRequest for a surface with unknown item attributes. Called at `start` and at each poll.
            on_state: Called with the state at construction and at each change.
        """
        self.models = models
        self._served = frozenset(models)
        self._check_surface = check
        super().__init__(path, "surfaces", self._read_surfaces, {}, self._check_surfaces, on_state)

    def find(self, name: str | None, tenant: str = DEFAULT_TENANT) -> Surface:
        """Return this tenant's surface of this name, or the default for None.

        A served model that no surface is named after is a surface with the default settings. Raises InvalidRequest
        suggesting the nearest of the tenant's names.
        """
        if name is None:
            return default_surface(tenant)
        surface = self.in_force.get(name)
        model = scoped_name(tenant, local_surface(name))
        is_own = tenant_of_surface(name) == tenant == tenant_of_name(model)
        if surface is None and is_own and model in self._served:
            return Surface(name=name, model=model)
        if surface is None or tenant_of_surface(name) != tenant:
            own = [local_surface(full_name) for full_name in self.in_force if tenant_of_surface(full_name) == tenant]
            fix = nearest(local_surface(name), own) if own else "leave it out, no surfaces are set up"
            raise InvalidRequest("surface", f"unknown surface {local_surface(name)!r}", fix)
        return surface

    def read_draft(self, text: str) -> Mapping[str, Surface]:
        """Return the surfaces of a text as they would be in force.

        Raises InvalidRequest for a text that the file would be rejected for.
        """
        surfaces = parse_surfaces(text)
        _check_models(surfaces, self.models)
        for surface in surfaces.values():
            self._check_surface(surface)
        return surfaces

    def _read_surfaces(self, path: Path) -> Mapping[str, Surface]:
        """Read a surfaces file. Raises ConfigError naming the entry and the allowed values."""
        try:
            surfaces = parse_surfaces(path.read_text(encoding="utf-8"))
            _check_models(surfaces, self.models)
        except (OSError, UnicodeDecodeError) as error:
            problem = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"TAILRACE_SURFACES_FILE: {path} cannot be read ({problem}); name a TOML file in UTF-8"
            ) from error
        except InvalidRequest as error:
            raise ConfigError(f"TAILRACE_SURFACES_FILE: {path}: {error}") from error
        return surfaces

    def _check_surfaces(self, surfaces: Mapping[str, Surface]) -> None:
        try:
            for surface in surfaces.values():
                self._check_surface(surface)
        except InvalidRequest as error:
            raise ConfigError(f"TAILRACE_SURFACES_FILE: {self.path}: {error}") from error


def _check_models(surfaces: Mapping[str, Surface], models: Sequence[str]) -> None:
    """Reject a surface whose model is not served, or belongs to another tenant. Raises InvalidRequest."""
    for name, surface in surfaces.items():
        if surface.model is not None and tenant_of_name(surface.model) != tenant_of_surface(name):
            problem = f"model {surface.model!r} belongs to another tenant"
            raise InvalidRequest(f"{name}.model", problem, "name a model of the surface's own tenant")
        if surface.model is not None and surface.model not in models:
            problem, fix = f"unknown model {surface.model!r}", f"this stack serves {', '.join(models)} (TAILRACE_NAMES)"
            raise InvalidRequest(f"{name}.model", problem, fix)


def parse_surfaces(text: str) -> Mapping[str, Surface]:
    """Read the text of a surfaces file. Raises InvalidRequest naming the entry, or `text` for the whole text."""
    try:
        entries = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("text", f"not TOML ({error})", "correct the text there") from error
    if len(entries) > MAX_SURFACES:
        raise InvalidRequest("text", f"{len(entries)} surfaces", f"write at most {MAX_SURFACES}")
    if wrong := next((name for name in entries if not _NAME.fullmatch(name)), None):
        raise InvalidRequest(
            "text",
            f"{wrong!r} is no name",
            "use a to z, 0 to 9, dot, dash and underscore, after the tenant and a slash for a tenant's surface",
        )
    return {name: parse_surface(name, plain) for name, plain in entries.items()}
