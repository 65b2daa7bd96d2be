"""The recommendation request and its answer: the frozen types behind all doors.

Does not know JSON, protobuf or time sources. A body becomes a RecommendRequest with the call's id, deadline and
subject; both doors decode the same messages, so they reject the same values with the same field.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from services.contracts.filters import Expression, ExpressionBody, check_size
from services.contracts.message import Answer, Id, InvalidField, Kept, Message, text
from services.contracts.rules import MAX_PLACES, NO_RULES, Rules, SentRules
from services.contracts.tenant import DEFAULT_TENANT, scoped, scoped_surface
from services.errors import InvalidRequest

MAX_K = MAX_PLACES
DEFAULT_K = 10
MAX_IDS_PER_FIELD = 2_000
MAX_DEADLINE_MS = 60_000
MAX_NEXT_CHARS = 1_024
PERIOD = "[1-9][0-9]{0,5}s|[1-9][0-9]{0,3}m|[1-9][0-9]?h|[1-6][0-9]{2}h|([1-9]|[12][0-9]|30)d"
"""A period of at most 30 days, as a pattern."""
_UNIT_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
MAX_SIMILAR_TO = 100
MAX_WISH_CHARS, MAX_SESSION_WISHES = 400, 20
Window = Literal["1h", "24h", "7d"]
"""The sliding windows of popularity, shortest first."""

Ids = Annotated[tuple[Id, ...], Meta(max_length=MAX_IDS_PER_FIELD)]
_SomeIds = Annotated[tuple[Id, ...], Meta(min_length=1, max_length=MAX_IDS_PER_FIELD)]
K = Annotated[int, Meta(ge=1, le=MAX_K)]
Wish = Annotated[str, text(MAX_WISH_CHARS)]
DeadlineMs = Annotated[int, Meta(ge=1, le=MAX_DEADLINE_MS)]
SessionId = Annotated[
    Id | None,
    Meta(
        description="Stable visitor id for experiments and canaries; ignored when user_id is set", examples=["7f3a9c"]
    ),
]


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
    MODEL_LOADING = "model_loading"
    FEATURES_UNAVAILABLE = "features_unavailable"
    STUDENT_FAILED = "student_failed"
    NOT_ON_SURFACE = "not_on_surface"
    SHED = "shed"
    NOT_TRAINED = "not_trained"
    SIMILAR_ASKED = "similar_asked"
    POPULAR_ASKED = "popular_asked"
    SEARCH_ASKED = "search_asked"
    WISH_NOT_READ = "wish_not_read"
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


class SentFilters(Kept):
    """Filters in a body."""

    __slots__ = ()

    @classmethod
    def message(cls) -> type[Message]:
        return Filters


class Filters(ExpressionBody, SentFilters, frozen=True, kw_only=True, dict=True):
    """Restricts the items: to any of `categories`, to `allowed_item_ids`, and to matches of the expression.

    Null means no limit.
    """

    extra_schema: ClassVar = {}

    categories: Annotated[
        _SomeIds | None,
        Meta(description="Items of any of these; each must be in the catalogue", examples=[["Comedy"]]),
    ] = None
    allowed_item_ids: Annotated[
        _SomeIds | None, Meta(description="Only these items; each must be in the catalogue")
    ] = None

    def __post_init__(self) -> None:
        """Check the size of the expression. Raises InvalidField."""
        super().__post_init__()
        if (expression := self.expression) is not None:
            check_size(expression, "", level=1)

    @cached_property
    def expression(self) -> Expression | None:
        """The expression of `must`, `should` and `must_not`; None without clauses."""
        return self.as_expression()

    @classmethod
    def of(cls, expression: Expression | None, **limits: Any) -> "Filters":
        """Return filters with this expression."""
        if expression is None:
            return cls(**limits)
        return cls(must=expression.must, should=expression.should, must_not=expression.must_not, **limits)


class AvoidShown(Message, frozen=True):
    """Excludes recent impressions."""

    within: Annotated[
        str,
        Meta(
            description="A period of at most 30d",
            examples=["1h"],
            extra_json_schema={"pattern": f"^({PERIOD})$"},
        ),
    ]

    def __post_init__(self) -> None:
        """Check the period. Raises InvalidField."""
        if re.fullmatch(PERIOD, self.within) is None:
            raise InvalidField("within", "not a period of at most 30 days", "send for example 90s, 30m, 1h or 7d")

    @property
    def seconds(self) -> int:
        return int(self.within[:-1]) * _UNIT_S[self.within[-1]]


class RecommendBody(Message, frozen=True, kw_only=True):
    """The user, the number of items and the deadline."""

    extra_schema: ClassVar = {
        "if": {"required": ["user_id"], "properties": {"user_id": {"type": "string"}}},
        "else": {"required": ["recent_item_ids"], "properties": {"recent_item_ids": {"minItems": 1}}},
    }

    user_id: Annotated[
        Id | None,
        Meta(description="Absent for an anonymous visitor, who needs recent_item_ids", examples=["196"]),
    ] = None
    session_id: SessionId = None
    surface: Annotated[
        Id | None,
        Meta(description="A configured slot of the product, whose k, deadline, filter and rules apply"),
    ] = None
    k: Annotated[
        K | None, Meta(description=f"Number of items; absent: the surface's, or {DEFAULT_K}", examples=[10])
    ] = None
    recent_item_ids: Annotated[
        Ids,
        Meta(
            description="Oldest first; events that the store cannot know yet, appended to a known user's history. "
            "Items outside the catalogue have no effect"
        ),
    ] = ()
    exclude_item_ids: Annotated[
        Ids, Meta(description="Never show these items; items outside the catalogue have no effect")
    ] = ()
    exclude_seen: Annotated[
        bool | None,
        Meta(
            description="Exclude items that the user has seen; "
            "absent: true unless the live bundle learned that users repeat items"
        ),
    ] = None
    filters: SentFilters | None = None
    rules: Annotated[SentRules | None, Meta(description="How the ranking is reordered")] = None
    deadline_ms: Annotated[
        DeadlineMs | None,
        Meta(
            description="From arrival; or header X-Deadline-Ms. The server limits it and has a default; "
            "the answer uses the tiers that are ready by then",
            examples=[200],
        ),
    ] = None
    request_id: Annotated[Id | None, Meta(description="Or header X-Request-Id; generated if absent")] = None
    next: Annotated[
        Annotated[str, Meta(min_length=1, max_length=MAX_NEXT_CHARS)] | None,
        Meta(description="Token from the previous response; returns the next page"),
    ] = None
    avoid_shown: Annotated[
        AvoidShown | None,
        Meta(description="Exclude items shown to the user lately; the newest 200 items are remembered"),
    ] = None
    rationale: Annotated[
        bool, Meta(description="Add one sentence on why these items, if it can be written before the deadline")
    ] = False
    wish: Annotated[
        Wish | None,
        Meta(
            description="The user's wish now, in words; an answer that read it has `understood`",
            examples=["an old comedy, nothing romantic"],
        ),
    ] = None
    session_wishes: Annotated[
        Annotated[tuple[Wish, ...], Meta(max_length=MAX_SESSION_WISHES)],
        Meta(description="Earlier wishes of the same conversation, oldest first; the server keeps none"),
    ] = ()


class SimilarBody(RecommendBody, frozen=True):
    """The user, if any, and limits on the similar items. All fields are optional."""

    extra_schema: ClassVar = {}

    item_ids: Annotated[
        Annotated[tuple[Id, ...], Meta(max_length=MAX_SIMILAR_TO - 1)],
        Meta(description="Further items besides the item of the path, such as the items of a cart"),
    ] = ()


class SimilarTo(Message, frozen=True):
    """Asks for items similar to these items, such as the item of a page or the items of a cart."""

    item_ids: Annotated[tuple[Id, ...], Meta(min_length=1, max_length=MAX_SIMILAR_TO)]


class PopularIn(Message, frozen=True):
    """Asks for popular items: in one `Window`, or over all windows and the training events."""

    window: Annotated[
        Window | None,
        Meta(
            description="Scores are the users of this window; "
            "absent: fractions over all windows and the training events"
        ),
    ] = None


class PopularQuery(PopularIn, frozen=True, kw_only=True):
    """The query of a request for popular items."""

    category: Annotated[Id | None, Meta(description="Of the catalogue")] = None
    k: Annotated[K, Meta(description="Number of items")] = DEFAULT_K
    session_id: SessionId = None


class SearchFor(Message, frozen=True):
    """Asks for items by words: of their titles, and as a wish."""

    q: Annotated[Wish, Meta(description="Words of a title, or a wish", examples=["toy stry"])]


class SearchQuery(SearchFor, frozen=True, kw_only=True):
    """The query of a search."""

    user_id: Annotated[Id | None, Meta(description="Orders the items for this user")] = None
    session_id: SessionId = None
    surface: Annotated[Id | None, Meta(description="A configured slot of the product")] = None
    k: Annotated[K, Meta(description="Number of items")] = DEFAULT_K


class RecommendRequest(RecommendBody, frozen=True, kw_only=True):
    """Which items to show to a user, how many, and by when: a body with the call's id and subject.

    `deadline_ms` counts from the request's arrival. `subject` is the subject of the list instead of the user.
    `shown_before` are the items of earlier answers and impressions to exclude. `tenant` owns the request; its user,
    session and surface are scoped to it.
    """

    request_id: Id
    filters: Filters = Filters()
    rules: Rules = NO_RULES
    shown_before: tuple[str, ...] = ()
    subject: SimilarTo | PopularIn | SearchFor | None = None
    tenant: str = DEFAULT_TENANT

    def __post_init__(self) -> None:
        """Check that there is a user, a visitor or a subject. Raises InvalidRequest."""
        if self.user_id is None and not self.recent_item_ids and self.subject is None:
            raise InvalidRequest("user_id", "missing", "send user_id, or recent_item_ids for an anonymous visitor")

    @classmethod
    def of(
        cls,
        body: RecommendBody,
        request_id: str,
        deadline_ms: int | None,
        subject: SimilarTo | PopularIn | SearchFor | None = None,
    ) -> "RecommendRequest":
        """Return a body's request; the body's own request id and deadline win. Raises InvalidRequest."""
        fields = {name: getattr(body, name) for name in RecommendBody.__struct_fields__}
        fields["request_id"] = body.request_id or request_id
        fields["deadline_ms"] = deadline_ms if body.deadline_ms is None else body.deadline_ms
        fields["filters"] = body.filters or _NO_FILTERS
        fields["rules"] = NO_RULES if body.rules is None else body.rules
        return cls(**fields, subject=subject)

    def for_tenant(self, tenant: str) -> "RecommendRequest":
        """Return the request with its user, session and surface scoped to this tenant."""
        if not tenant:
            return self
        return msgspec.structs.replace(
            self,
            tenant=tenant,
            user_id=self.user_id and scoped(tenant, self.user_id),
            session_id=self.session_id and scoped(tenant, self.session_id),
            surface=self.surface and scoped_surface(tenant, self.surface),
        )

    @property
    def avoid_shown_s(self) -> int | None:
        """The period of impressions to exclude, in seconds; None: none."""
        return None if self.avoid_shown is None else self.avoid_shown.seconds

    @property
    def unit_id(self) -> str | None:
        """The id that experiments and canaries assign: the user, else the visitor's session; None for neither."""
        return self.user_id or self.session_id

    @property
    def wishes(self) -> tuple[str, ...]:
        """The wishes of the conversation, oldest first; a search is the newest wish."""
        newest = (self.subject.q,) if isinstance(self.subject, SearchFor) else ()
        return self.session_wishes + (() if self.wish is None else (self.wish,)) + newest

    @property
    def num_items(self) -> int:
        return DEFAULT_K if self.k is None else self.k

    @property
    def excluded_item_ids(self) -> tuple[str, ...]:
        """Items never to show: the caller's exclusions, and items shown before."""
        return self.exclude_item_ids + self.shown_before

    def after(self, shown: tuple[str, ...]) -> "RecommendRequest":
        """Return the request with these items excluded too."""
        return msgspec.structs.replace(self, shown_before=self.shown_before + shown) if shown else self

    @property
    def subject_item_ids(self) -> tuple[str, ...]:
        """The items that the list is about; it never contains them."""
        return self.subject.item_ids if isinstance(self.subject, SimilarTo) else ()

    def excluding_seen(self, default: bool) -> "RecommendRequest":
        """Return the request with `exclude_seen` resolved: its own value, or the default; a search shows seen items."""
        if self.exclude_seen is not None:
            return self
        return msgspec.structs.replace(self, exclude_seen=default and not isinstance(self.subject, SearchFor))

    def check_k(self, max_k: int) -> None:
        """Refuse more items than this caller may request. Raises InvalidRequest."""
        if self.num_items > max_k:
            raise InvalidRequest("k", f"{self.num_items} is out of range", f"send 1 to {max_k}")


class ScoredItem(Answer, frozen=True, kw_only=True):
    """One recommended item; `source` is the tier that chose it."""

    component: ClassVar = "ItemBody"

    item_id: str
    score: Annotated[float, Meta(description="Comparable within one answer only")]
    title: str
    source: Annotated[Tier, Meta(description="The tier that chose the item", examples=["llm"])]


class Understood(Answer, frozen=True, kw_only=True):
    """A wish as its reader understood it, in the catalogue's words."""

    must: Annotated[tuple[str, ...], Meta(description="Items have all of these", examples=[["Comedy"]])] = ()
    must_not: Annotated[tuple[str, ...], Meta(description="Items have none of these", examples=[["Romance"]])] = ()
    liked: Annotated[tuple[str, ...], Meta(description="Items with these rank higher")] = ()
    reader: Annotated[str, Meta(description="The reader that read it", examples=["keywords"])]
    relaxed: Annotated[
        tuple[str, ...],
        Meta(description="`must`, then `must_not`: not applied, because no item would be left", examples=[["must"]]),
    ] = ()


class Recommendation(Answer, frozen=True, kw_only=True, omit_defaults=True):
    """The items, and how they were made."""

    request_id: Annotated[str, Meta(description="Send it with the events that follow from this answer")]
    items: Annotated[tuple[ScoredItem, ...], Meta(description="Best first; fewer than k when the filters leave fewer")]
    tier: Annotated[
        Tier,
        Meta(description="The tier that answered; lower tiers complete a list that it cannot fill", examples=["llm"]),
    ]
    reason: Annotated[Reason, Meta(description="Why that tier answered", examples=["llm_in_time"])]
    bundle_version: Annotated[str, Meta(description="The bundle that answered")]
    newest_event_time_ms: Annotated[
        int | None,
        Meta(description="Unix milliseconds of the user's newest event that the answer is based on; null: none"),
    ]
    feature_age_ms: Annotated[int | None, Meta(description="That event's age when the answer was sent")]
    deadline_ms: Annotated[int, Meta(description="The deadline that applied")]
    stages_ms: Annotated[Mapping[str, float], Meta(description="Milliseconds by stage")]
    rationale: Annotated[
        str | None, Meta(description="One sentence on why these items; absent when not requested or not written")
    ] = None
    next: Annotated[
        str | None,
        Meta(description="Send it as `next` for the following items, within an hour; absent: the list ends here"),
    ] = None
    rationale_reason: Annotated[
        RationaleOutcome | None,
        Meta(description="written, or why not: late, busy, failed, no_text; absent when not requested"),
    ] = None
    understood: Annotated[
        Understood | None, Meta(description="Absent without a wish, and when the wish was not read")
    ] = None


_NO_FILTERS = Filters()
