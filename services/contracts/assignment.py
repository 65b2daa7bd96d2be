"""Assignments: by surface the model name, its version and the experiment variants of a user or a visitor's session."""

from collections.abc import Mapping
from dataclasses import dataclass

from services.contracts.recommend import check_id
from services.errors import InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignRequest:
    """The user or session of an assignment; user_id takes precedence, as in recommendations."""

    user_id: str | None = None
    session_id: str | None = None

    def __post_init__(self) -> None:
        """Check the values. Raises InvalidRequest naming the field."""
        if self.user_id is None and self.session_id is None:
            raise InvalidRequest("user_id", "missing", "send user_id, or session_id for a visitor")
        for name in ("user_id", "session_id"):
            if (sent := getattr(self, name)) is not None:
                check_id(name, sent)

    @property
    def unit_id(self) -> str:
        """The id that experiments and canaries assign."""
        return self.user_id or self.session_id or ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SurfaceAssignment:
    """The assignment on one surface; `surface` is None for requests without a surface.

    `name` is the model name, `bundle_version` the answering version (None: no live version), `is_canary` whether that
    is a release's candidate, `variants` maps each experiment to its variant.
    """

    surface: str | None
    name: str
    bundle_version: str | None
    is_canary: bool
    variants: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assigned:
    """Every surface, first the assignment of requests without a surface."""

    surfaces: tuple[SurfaceAssignment, ...]
