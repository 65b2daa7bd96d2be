"""Requests of the console: switches, drafts of surfaces, erasures, and moves of model names and releases."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType

from services.contracts.message import PRINTABLE, Id, InvalidField, Message

MAX_REASON_CHARS = 500
Reason = Annotated[str, Meta(max_length=MAX_REASON_CHARS, extra_json_schema={"pattern": PRINTABLE})]


class Availability(Message, frozen=True):
    """Shows or hides an item."""

    available: bool


class SavedSurfaces(Message, frozen=True):
    """A text to save as the surfaces file, which had this SHA-256 when it was read."""

    text: str
    sha256: str


class BoostedSurface(Message, frozen=True):
    """A boost to add to a surface of a text."""

    text: str
    surface: str
    item_id: str
    factor: float


class SurfaceForm(Message, frozen=True):
    """A surface of a text whose fields are wanted."""

    text: str
    surface: str


class SurfaceFields(Message, frozen=True):
    """Fields to set in a surface of a text."""

    text: str
    surface: str
    fields: dict[str, Any]


class SurfaceDraft(Message, frozen=True):
    """A surface of a text to preview for a user."""

    text: str
    surface: str
    user_id: Id


class ErasedUser(Message, frozen=True):
    """A user to erase."""

    user_id: Id


class DrillFields(Message, frozen=True):
    """Dependencies to switch off or on; absent: unchanged."""

    llm: Literal["off", "on"] | UnsetType = UNSET
    features: Literal["off", "on"] | UnsetType = UNSET

    def __post_init__(self) -> None:
        """Check that a dependency is named. Raises InvalidField."""
        if self.llm is UNSET and self.features is UNSET:
            raise InvalidField("", "no dependency", 'send {"llm": "off"}')


class Promotion(Message, frozen=True):
    """A promotion; `seen` is the live version on the caller's page."""

    seen: str | None


class Rollback(Message, frozen=True):
    """A rollback from the live version `seen` to the previous version, or to `to`."""

    seen: str
    to: str | None = None
    reason: Reason = ""


class ReleaseStage(Message, frozen=True):
    """A traffic fraction and its minimum duration."""

    share: float
    hold_s: float


class Release(Message, frozen=True):
    """The stages of a release, which advance by analysis or by hand."""

    stages: tuple[ReleaseStage, ...]
    by_hand: bool


class ReleaseMove(Message, frozen=True):
    """A move of the release `seen`, as the list of names returned it, to a stage from 0."""

    seen: str
    stage: int


class ReleaseStop(Message, frozen=True):
    """The end of the release `seen`; `withdraw` also withdraws its version."""

    seen: str
    withdraw: bool
    reason: Reason = ""
