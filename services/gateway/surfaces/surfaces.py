"""The surfaces in force, read again when their file changes, as the keys are.

A file that is broken, cannot be read or is gone changes nothing: the surfaces before it stay in force, a log line says what is wrong, and a
metric says so until it is mended. At the start the file must be right.
"""

import asyncio
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from pathlib import Path

import structlog

from models.files import stamp_of
from models.name_record import DEFAULT_NAME
from services.contracts.plain import nearest
from services.errors import ConfigError, InvalidRequest
from services.gateway.periodic_task import PeriodicTask
from services.gateway.surfaces.surface import NO_SURFACE, Surface, parse_surface

log = structlog.get_logger()

POLL_S = 1.0
MAX_SURFACES = 64
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


class SurfacesState(IntEnum):
    """Which surfaces are in force, as the metric says it."""

    CURRENT = 0
    """Those of the file."""
    OUTDATED = 1
    """Those of the last file that was right: the present one is refused, or gone."""


class Surfaces:
    """Finds a surface by its name. Reads the file at construction and again whenever it changes; without one there are none."""

    def __init__(
        self,
        path: Path | None,
        models: Sequence[str] = (DEFAULT_NAME,),
        check: Callable[[Surface], None] = lambda _: None,
        on_state: Callable[[SurfacesState], None] = lambda _: None,
    ) -> None:
        """Read the file. Raises ConfigError.

        Args:
            path: The file.
            models: The names of bundles that this stack serves.
            check: Raises InvalidRequest for a surface that names what the items lack. Called at `start` and for each later file.
            on_state: Called with the state at construction and at each change of the file.
        """
        self._path = path
        self._models = models
        self._check = check
        self._on_state = on_state
        self._stamp = None if path is None else stamp_of(path)
        self._surfaces: Mapping[str, Surface] = {} if path is None else self._read(path)
        self._on_state(SurfacesState.CURRENT)
        self._following = PeriodicTask(lambda: asyncio.to_thread(self.refresh), POLL_S)

    @property
    def path(self) -> Path | None:
        """The file; None where there is none."""
        return self._path

    @property
    def in_force(self) -> Mapping[str, Surface]:
        """The surfaces by name."""
        return self._surfaces

    def find(self, name: str | None) -> Surface:
        """Return the surface of this name, and for None the one without a name. Raises InvalidRequest that offers the nearest names."""
        if name is None:
            return NO_SURFACE
        found = self._surfaces.get(name)
        if found is None:
            fix = nearest(name, self._surfaces) if self._surfaces else "leave it out, no surfaces are set up"
            raise InvalidRequest("surface", f"unknown surface {name!r}", fix)
        return found

    async def start(self) -> None:
        """Check the surfaces, and follow the file from now on. Call in the serving loop, when a bundle may be loaded."""
        if self._path is not None:
            try:
                self._check_all(self._path, self._surfaces)
            except (
                ConfigError
            ) as error:  # they were in force before a restart, and a missing item must not keep a gateway from starting
                self._refuse(error)
            self._following.start()

    async def stop(self) -> None:
        """Stop following; the surfaces stay."""
        await self._following.stop()

    def refresh(self) -> None:
        """Read the file again if it has changed; log a broken one once."""
        assert self._path is not None, "without a file nothing is followed"
        stamp = stamp_of(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            surfaces = self._read(self._path)
            self._check_all(self._path, surfaces)
        except ConfigError as error:
            self._refuse(error)
            return
        self._surfaces = surfaces
        log.info("surfaces_read", num_surfaces=len(surfaces))
        self._on_state(SurfacesState.CURRENT)

    def read_draft(self, text: str) -> Mapping[str, Surface]:
        """Return the surfaces of a text as they would be in force. Raises InvalidRequest for what would be refused in the file."""
        surfaces = parse_surfaces(text)
        _check_models(surfaces, self._models)
        for surface in surfaces.values():
            self._check(surface)
        return surfaces

    def _check_all(self, path: Path, surfaces: Mapping[str, Surface]) -> None:
        for surface in surfaces.values():
            try:
                self._check(surface)
            except InvalidRequest as error:
                raise ConfigError(f"surfaces file {path}: {error}") from error

    def _read(self, path: Path) -> Mapping[str, Surface]:
        """Read a file of surfaces. Raises ConfigError naming the entry and what is allowed."""
        try:
            surfaces = parse_surfaces(path.read_text(encoding="utf-8"))
            _check_models(surfaces, self._models)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"surfaces file {path}: cannot be read ({error})") from error
        except InvalidRequest as error:
            raise ConfigError(f"surfaces file {path}: {error}") from error
        return surfaces

    def _refuse(self, error: ConfigError) -> None:
        log.error("surfaces_refused", error=str(error), kept=sorted(self._surfaces))
        self._on_state(SurfacesState.OUTDATED)


def _check_models(surfaces: Mapping[str, Surface], models: Sequence[str]) -> None:
    """Refuse a surface of a model that is not served. Raises InvalidRequest."""
    for name, surface in surfaces.items():
        if surface.model is not None and surface.model not in models:
            problem, fix = f"unknown model {surface.model!r}", f"this stack serves {', '.join(models)} (TAILRACE_NAMES)"
            raise InvalidRequest(f"{name}.model", problem, fix)


def parse_surfaces(text: str) -> Mapping[str, Surface]:
    """Read the text of such a file. Raises InvalidRequest naming the entry, or `text` for the whole."""
    try:
        entries = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InvalidRequest("text", f"not TOML ({error})", "mend it there") from error
    if len(entries) > MAX_SURFACES:
        raise InvalidRequest("text", f"{len(entries)} surfaces", f"write at most {MAX_SURFACES}")
    if wrong := next((name for name in entries if not _NAME.fullmatch(name)), None):
        raise InvalidRequest("text", f"{wrong!r} is no name", "use a to z, 0 to 9, dot, dash and underscore")
    return {name: parse_surface(name, plain) for name, plain in entries.items()}
