"""Who gets what: by surface the model name, its version and the variants of experiments, which a user, or a visitor's session, has now."""

from collections.abc import Mapping
from dataclasses import dataclass

from services.contracts.recommend import check_id
from services.errors import InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignRequest:
    """Whose assignment is asked for; a user goes before a session, as in recommendations."""

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
        """Whom experiments and canaries assign."""
        return self.user_id or self.session_id or ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SurfaceAssignment:
    """What applies on one surface; `surface` is None for requests that name none.

    `name` is the model name, `bundle_version` the version that answers (None: nothing is live), `is_canary` whether that is a release's candidate,
    `variants` the variant by experiment.
    """

    surface: str | None
    name: str
    bundle_version: str | None
    is_canary: bool
    variants: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assigned:
    """Every surface, first that of requests which name none."""

    surfaces: tuple[SurfaceAssignment, ...]
