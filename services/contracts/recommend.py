"""The recommendation request and its answer: the frozen types behind all doors.

Knows nothing of JSON, protobuf or time sources. The doors parse into these types and format from them; values are
validated here, so that all doors refuse the same values with the same messages.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from services.contracts.filters import Expression
from services.contracts.plain import MAX_TEXT_CHARS
from services.contracts.rules import MAX_PLACES, NO_RULES, Rules
from services.errors import InvalidRequest

MAX_ID_CHARS = MAX_TEXT_CHARS
MAX_K = MAX_PLACES
DEFAULT_K = 10
MAX_IDS_PER_FIELD = 2_000
MAX_DEADLINE_MS = 60_000
MAX_NEXT_CHARS = 1_024
MAX_AVOID_SHOWN_S = 30 * 86_400
PERIOD = "[1-9][0-9]{0,5}s|[1-9][0-9]{0,3}m|[1-9][0-9]?h|[1-6][0-9]{2}h|([1-9]|[12][0-9]|30)d"
"""A period of at most 30 days, as a pattern."""
_UNIT_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
MAX_SIMILAR_TO = 100
WINDOWS = ("1h", "24h", "7d")
"""The sliding windows of popularity, shortest first."""


class Tier(StrEnum):
    """The tier that made the answer, in order of quality."""

    PRECOMPUTED = "precomputed"
    LLM = "llm"
    STUDENT = "student"
    SIMILAR = "similar"
    POPULAR = "popular"


class Reason(StrEnum):
    """Why that tier answered."""

    PRECOMPUTED_FRESH = "precomputed_fresh"
    LLM_IN_TIME = "llm_in_time"
    UNKNOWN_USER = "unknown_user"
    SHORT_HISTORY = "short_history"
    STUDENT_SUFFICES = "student_suffices"
    LLM_OVERLOADED = "llm_overloaded"
    LLM_TOO_SLOW = "llm_too_slow"
    LLM_LATE = "llm_late"
    LLM_UNAVAILABLE = "llm_unavailable"
    LLM_FAILED = "llm_failed"
    BUNDLE_MISMATCH = "bundle_mismatch"
    FEATURES_UNAVAILABLE = "features_unavailable"
    STUDENT_FAILED = "student_failed"
    NOT_ON_SURFACE = "not_on_surface"
    SHED = "shed"
    NOT_TRAINED = "not_trained"
    SIMILAR_ASKED = "similar_asked"
    POPULAR_ASKED = "popular_asked"
    EVERYTHING_SEEN = "everything_seen"
    NOTHING_ALLOWED = "nothing_allowed"


class RationaleOutcome(StrEnum):
    """How writing the rationale ended."""

    WRITTEN = "written"
    LATE = "late"
    BUSY = "busy"
    FAILED = "failed"
    NO_TEXT = "no_text"


@dataclass(frozen=True, slots=True)
class Rationale:
    """One sentence on why these items were recommended; `sentence` is None unless the outcome is WRITTEN."""

    outcome: RationaleOutcome
    sentence: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """Restricts the items: to any of `categories`, to `allowed_item_ids`, and to matches of `expression`.

    None means no limit.
    """

    categories: tuple[str, ...] | None = None
    allowed_item_ids: tuple[str, ...] | None = None
    expression: Expression | None = None


@dataclass(frozen=True, slots=True)
class SimilarTo:
    """Asks for items similar to these items, such as the item of a page or the items of a cart."""

    item_ids: tuple[str, ...]

    def __post_init__(self) -> None:
        """Check the values. Raises InvalidRequest naming the field."""
        if not 1 <= len(self.item_ids) <= MAX_SIMILAR_TO:
            raise InvalidRequest("item_ids", f"{len(self.item_ids)} items", f"name 1 to {MAX_SIMILAR_TO}")
        check_ids("item_ids", self.item_ids)


@dataclass(frozen=True, slots=True)
class PopularIn:
    """Asks for popular items: in one of `WINDOWS`, or over all windows and the training events."""

    window: str | None = None

    def __post_init__(self) -> None:
        """Check the value. Raises InvalidRequest naming the field."""
        if self.window is not None and self.window not in WINDOWS:
            raise InvalidRequest("window", f"unknown window {self.window!r:.60}", f"send {', '.join(WINDOWS)} or none")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecommendRequest:
    """Which items to show to a user, how many, and by when.

    `user_id` is None for an anonymous visitor, whose `recent_item_ids` (oldest first) then are the history; for a known
    user they are appended to the stored history. `deadline_ms` counts from the request's arrival. `surface` names the
    place in the product whose `k`, deadline, filter and rules apply; None in these means the surface's, or the default.
    `next` is the token of this user's previous answer: the items of that answer and its predecessors are excluded.
    `avoid_shown_s` excludes items shown to the user in that many seconds, as far as the features remember them.
    `shown_before` are the items that these two exclude. `session_id` identifies a visitor to experiments and canaries,
    and changes nothing else. `exclude_seen` None uses the live bundle's default. `subject` is the subject of the list
    instead of the user. `rationale` asks for one sentence on why these items, written in the time left before the
    deadline.
    """

    request_id: str
    user_id: str | None = None
    session_id: str | None = None
    k: int | None = None
    recent_item_ids: tuple[str, ...] = ()
    exclude_item_ids: tuple[str, ...] = ()
    exclude_seen: bool | None = None
    filters: Filters = field(default_factory=Filters)
    deadline_ms: int | None = None
    rationale: bool = False
    surface: str | None = None
    rules: Rules = NO_RULES
    next: str | None = None
    avoid_shown_s: int | None = None
    shown_before: tuple[str, ...] = ()
    subject: SimilarTo | PopularIn | None = None

    def __post_init__(self) -> None:
        """Check the values. Raises InvalidRequest naming the field."""
        if self.user_id is None and not self.recent_item_ids and self.subject is None:
            raise InvalidRequest("user_id", "missing", "send user_id, or recent_item_ids for an anonymous visitor")
        if self.user_id is not None:
            check_id("user_id", self.user_id)
        if self.session_id is not None:
            check_id("session_id", self.session_id)
        check_id("request_id", self.request_id)
        if self.k is not None and not 1 <= self.k <= MAX_K:
            raise InvalidRequest("k", f"{self.k} is out of range", f"send 1 to {MAX_K}")
        if self.deadline_ms is not None and not 1 <= self.deadline_ms <= MAX_DEADLINE_MS:
            raise InvalidRequest("deadline_ms", f"{self.deadline_ms} is out of range", f"send 1 to {MAX_DEADLINE_MS}")
        if self.surface is not None:
            check_id("surface", self.surface)
        if self.next is not None and not 1 <= len(self.next) <= MAX_NEXT_CHARS:
            raise InvalidRequest("next", f"{len(self.next)} characters long", f"send 1 to {MAX_NEXT_CHARS}")
        if self.avoid_shown_s is not None and not 1 <= self.avoid_shown_s <= MAX_AVOID_SHOWN_S:
            raise InvalidRequest("avoid_shown.within", "out of range", "send 1s to 30d")
        check_ids("recent_item_ids", self.recent_item_ids)
        check_ids("exclude_item_ids", self.exclude_item_ids)
        for name, ids in (
            ("filters.categories", self.filters.categories),
            ("filters.allowed_item_ids", self.filters.allowed_item_ids),
        ):
            if ids is not None:
                check_ids(name, ids)
                if not ids:
                    raise InvalidRequest(name, "empty, so nothing could be shown", "leave it out, or name at least one")

    @property
    def unit_id(self) -> str | None:
        """The id that experiments and canaries assign: the user, else the visitor's session; None for neither."""
        return self.user_id or self.session_id

    @property
    def num_items(self) -> int:
        """The number of items wanted."""
        return DEFAULT_K if self.k is None else self.k

    @property
    def excluded_item_ids(self) -> tuple[str, ...]:
        """Items never to show: the caller's exclusions, and items shown before."""
        return self.exclude_item_ids + self.shown_before

    def after(self, shown: tuple[str, ...]) -> "RecommendRequest":
        """Return the request with these items excluded too."""
        return replace(self, shown_before=self.shown_before + shown) if shown else self

    @property
    def subject_item_ids(self) -> tuple[str, ...]:
        """The items that the list is about; it never contains them."""
        return self.subject.item_ids if isinstance(self.subject, SimilarTo) else ()

    def excluding_seen(self, default: bool) -> "RecommendRequest":
        """Return the request with `exclude_seen` resolved: its own value, or the default."""
        return self if self.exclude_seen is not None else replace(self, exclude_seen=default)

    def check_k(self, max_k: int) -> None:
        """Refuse more items than this caller may request. Raises InvalidRequest."""
        if self.num_items > max_k:
            raise InvalidRequest("k", f"{self.num_items} is out of range", f"send 1 to {max_k}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredItem:
    """One recommended item. Scores are comparable only within one answer; `source` is the tier that chose the item."""

    item_id: str
    score: float
    title: str
    source: Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The answer. `items` may be fewer than k when the filters leave fewer.

    `newest_event_time_ms` is the event time (Unix ms) of the user's newest event that the answer is based on, None
    without events; `feature_age_ms` is its age when the answer was sent. `stages_ms` maps stage name to milliseconds.
    `rationale` is None unless the request asked for it. `next` is the token for the following items; None: the list
    ends here, or too many items have been shown.
    """

    request_id: str
    items: tuple[ScoredItem, ...]
    tier: Tier
    reason: Reason
    bundle_version: str
    newest_event_time_ms: int | None
    feature_age_ms: int | None
    deadline_ms: int
    stages_ms: Mapping[str, float]
    rationale: Rationale | None = None
    next: str | None = None


def seconds_of(field_name: str, period: str) -> int:
    """Return the seconds of a period such as 90s, 30m, 1h or 7d. Raises InvalidRequest."""
    if re.fullmatch(PERIOD, period) is None:
        problem = f"{period[:20]!r} is no period of at most 30 days"
        raise InvalidRequest(field_name, problem, "send for example 90s, 30m, 1h or 7d")
    return int(period[:-1]) * _UNIT_S[period[-1]]


def check_id(field_name: str, value: str) -> None:
    """Refuse an identifier that is empty, too long or not printable. Raises InvalidRequest."""
    if not value:
        raise InvalidRequest(field_name, "empty", "send at least one character")
    if len(value) > MAX_ID_CHARS:
        raise InvalidRequest(field_name, f"{len(value)} characters long", f"send at most {MAX_ID_CHARS}")
    if not value.isprintable():
        raise InvalidRequest(field_name, "has control characters", "send printable characters only")


def check_ids(field_name: str, values: tuple[str, ...]) -> None:
    """Refuse a list of identifiers that is too long or holds a bad one. Raises InvalidRequest."""
    if len(values) > MAX_IDS_PER_FIELD:
        raise InvalidRequest(field_name, f"{len(values)} entries", f"send at most {MAX_IDS_PER_FIELD}")
    for position, value in enumerate(values):
        check_id(f"{field_name}[{position}]", value)
