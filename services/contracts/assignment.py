"""Assignments: by surface the model name, its version and the experiment variants of a user or a visitor's session."""

from collections.abc import Mapping
from typing import Annotated, ClassVar

from msgspec import Meta

from services.contracts.message import Answer, Id, InvalidField, Message


class AssignRequest(Message, frozen=True, kw_only=True):
    """The user or session of an assignment; user_id takes precedence, as in recommendations."""

    user_id: Annotated[Id | None, Meta(description="The user; required without session_id")] = None
    session_id: Annotated[Id | None, Meta(description="A visitor's session; ignored when user_id is set")] = None

    def __post_init__(self) -> None:
        """Check the values. Raises InvalidField."""
        super().__post_init__()
        if self.user_id is None and self.session_id is None:
            raise InvalidField("user_id", "missing", "send user_id, or session_id for a visitor")

    @property
    def unit_id(self) -> str:
        """The id that experiments and canaries assign."""
        return self.user_id or self.session_id or ""


class SurfaceAssignment(Answer, frozen=True, kw_only=True):
    """The assignment on one surface."""

    surface: Annotated[str | None, Meta(description="Null: requests without a surface")]
    name: Annotated[str, Meta(description="The model name")]
    bundle_version: Annotated[str | None, Meta(description="The answering version; null: no live version")]
    is_canary: Annotated[bool, Meta(description="Whether that is the candidate of a release in progress")]
    variants: Annotated[
        Mapping[str, str], Meta(description="The variant by experiment", examples=[{"fresher": "control"}])
    ]


class AssignResponse(Answer, frozen=True):
    """The assignment of a user, or a visitor's session, now."""

    component: ClassVar = "AssignedBody"

    surfaces: Annotated[
        tuple[SurfaceAssignment, ...], Meta(description="All surfaces; first requests without a surface")
    ]
