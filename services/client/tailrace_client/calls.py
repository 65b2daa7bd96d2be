"""The calls of the API, the same over both doors: arguments, results, and checks before sending.

Fields carry the server's names, the same in JSON and in messages.
"""

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypedDict, TypeVar

from tailrace_client.items import CatalogueItem, ItemDeleted, ItemsPut, put_fields
from tailrace_client.retry import TailraceError
from tailrace_client.values import FLAG, INT_32, INT_64, NUMBER, OBJECT, TEXT, checked, checked_texts, refusal


@dataclass(frozen=True, slots=True)
class Item:
    """One recommended item. Scores compare only within one response; `source` is the tier that chose the item."""

    item_id: str
    score: float
    title: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Understood:
    """A wish as it was understood, in the catalogue's words: required, excluded, liked.

    `relaxed` names `must` and `must_not` where they would have left no item and were not applied.
    """

    must: tuple[str, ...] = ()
    must_not: tuple[str, ...] = ()
    liked: tuple[str, ...] = ()
    reader: str = ""
    relaxed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """Items, best first, and how they were made; fewer than k if the filters leave fewer.

    Send `request_id` with the events that follow from this recommendation. `newest_event_time_ms` (Unix milliseconds)
    is the user's newest event that the recommendation is based on. `deadline_ms` is the server's, for the last attempt.
    `understood` is None without a wish, and if the wish was not read.
    """

    request_id: str
    items: tuple[Item, ...]
    tier: str
    reason: str
    bundle_version: str
    deadline_ms: int
    stages_ms: Mapping[str, float]
    newest_event_time_ms: int | None = None
    feature_age_ms: int | None = None
    rationale: str | None = None
    rationale_reason: str | None = None
    next: str | None = None
    understood: Understood | None = None
    num_attempts: int = 1


@dataclass(frozen=True, slots=True)
class Event:
    """One user action on an item; `request_id` names the recommendation that it follows from.

    The id is generated here, so that the same event sent again, by this client or by you, takes effect once. Without a
    time the server uses its arrival time.
    """

    user_id: str
    item_id: str
    event_type: str = "click"
    request_id: str | None = None
    event_time_ms: int | None = None
    value: float = 1.0
    event_id: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass(frozen=True, slots=True)
class Recorded:
    """The ids of the recorded events, in the order sent: the broker has acknowledged all of them.

    `accepted` counts an id that was sent several times once. `unknown_items` are the items that the server's live
    catalogue lacks, without duplicates.
    """

    event_ids: tuple[str, ...]
    num_attempts: int = 1
    unknown_items: tuple[str, ...] = ()
    accepted: int = 0


@dataclass(frozen=True, slots=True)
class Explanation:
    """How a recent request was answered: in words, and as `fields` with the server's full record."""

    request_id: str
    outcome: str
    sentences: tuple[str, ...]
    fields: Mapping[str, Any]
    num_attempts: int = 1


@dataclass(frozen=True, slots=True)
class ErasureReceipt:
    """The progress of an erasure, and the data that remains after it.

    `stores` maps names to completion times (Unix milliseconds; None: not yet).
    """

    erasure_id: str
    accepted_time_ms: int
    is_done_online: bool
    is_done: bool
    stores: Mapping[str, int | None]
    remaining: tuple[str, ...]
    num_attempts: int = 1


@dataclass(frozen=True, slots=True)
class UserData:
    """All data that the server keeps about a user, by kind."""

    user_id: str
    fields: Mapping[str, Any]
    num_attempts: int = 1


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


@dataclass(frozen=True, slots=True)
class Assigned:
    """The assignments of a user, or a visitor's session, on every surface now; first without a surface."""

    surfaces: tuple[SurfaceAssignment, ...]
    num_attempts: int = 1


@dataclass(frozen=True, slots=True)
class BatchAnswers:
    """The answers to several requests in order: each a recommendation, or the error of that request."""

    answers: tuple[Recommendation | TailraceError, ...]
    num_attempts: int = 1


_EMPTY = "empty, so nothing could be shown"
_SEND_EVENTS = "send an Event, or a list of them"
_MUST_BE_THERE = frozenset({"user_id", "item_id", "event_id"})
_PLACES = {"categories": "filters.categories", "allowed_item_ids": "filters.allowed_item_ids"}
_SHOWN = {"avoid_shown_within": "avoid_shown.within"}
_KINDS = {
    **dict.fromkeys(("user_id", "item_id", "event_type", "event_id", "request_id", "session_id", "surface"), TEXT),
    **dict.fromkeys(("next", "avoid_shown_within", "erasure_id", "wish", "q"), TEXT),
    **dict.fromkeys(("exclude_seen", "rationale"), FLAG),
    **dict.fromkeys(("filters", "rules"), OBJECT),
    "k": INT_32,
    "event_time_ms": INT_64,
    "value": NUMBER,
}
"""The types of fields; all other fields are lists of texts."""


A = TypeVar(
    "A",
    Recommendation,
    BatchAnswers,
    Assigned,
    Recorded,
    Explanation,
    ErasureReceipt,
    UserData,
    CatalogueItem,
    ItemsPut,
    ItemDeleted,
)


class RecommendOptions(TypedDict, total=False):
    """The options of a recommendation besides the user.

    Attributes:
        k: Number of items; 10 if absent.
        session_id: A visitor's session; experiments and canaries assign by it.
        recent_item_ids: Items that the store cannot know yet, oldest first; required without a user.
        exclude_item_ids: Items never to show.
        exclude_seen: Whether to exclude items that the user has seen; if absent, true unless the live bundle learned
            that users repeat items.
        categories: Only items of any of these.
        allowed_item_ids: Only these items.
        filters: An expression over attributes of items: `must`, `should` and `must_not`, as in REST.
        surface: The place in the product whose k, deadline, filter and rules apply.
        rules: Rules that reorder the ranking, as in REST.
        next: Token from the user's previous recommendation; returns the items after it.
        avoid_shown_within: Exclude items shown to the user in this period, such as `1h`.
        rationale: Whether to add a sentence on why these items, if it can be written before the deadline.
        request_id: The request's id; generated if absent.
        wish: The user's wish now, in words, at most 400 characters.
        session_wishes: Earlier wishes of the conversation, oldest first.
    """

    k: int
    session_id: str
    recent_item_ids: Sequence[str]
    exclude_item_ids: Sequence[str]
    exclude_seen: bool
    categories: Sequence[str]
    allowed_item_ids: Sequence[str]
    filters: Mapping[str, Any]
    surface: str
    rules: Mapping[str, Any]
    next: str
    avoid_shown_within: str
    rationale: bool
    request_id: str
    wish: str
    session_wishes: Sequence[str]


_ITEM = "/v1/items/{item_id}"


@dataclass(frozen=True, slots=True)
class ClientCall(Generic[A]):
    """One call: its answer's type, its REST operation, its gRPC method if any, and its fields.

    `in_path` are the parameters of the path by name. `rest_only` are further fields of a body, or the parameters of a
    query. `rpc_only` are the fields of the message that wraps the fields as its `request`; None: no wrapper. `headers`
    are sent as metadata over gRPC.
    """

    answer: type[A]
    verb: str
    path: str
    method: str | None
    fields: dict[str, Any]
    request_id: str | None = None
    rest_only: Mapping[str, Any] = field(default_factory=dict)
    rpc_only: Mapping[str, Any] | None = None
    in_path: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)

    def with_deadline(self, deadline_ms: int) -> dict[str, Any]:
        """Return the fields of one attempt; only recommendations take a deadline."""
        return (
            {**self.fields, "deadline_ms": deadline_ms}
            if self.answer in (Recommendation, BatchAnswers)
            else self.fields
        )


def recommend_call(user_id: str | None, options: RecommendOptions) -> ClientCall[Recommendation]:
    """Build the call. Raises TypeError for an unknown option, TailraceError for a wrong value and an empty filter.

    A gRPC message cannot distinguish an empty filter from an absent filter, so the server would apply no filter.
    """
    if unknown := options.keys() - RecommendOptions.__annotations__.keys():
        options_are = ", ".join(sorted(RecommendOptions.__annotations__))
        raise TypeError(f"recommend has no option {', '.join(sorted(unknown))}; the options are {options_are}")
    given = {name: value for name, value in options.items() if value is not None}
    fields = {name: _checked((_PLACES | _SHOWN).get(name, name), value, name) for name, value in given.items()}
    request_id = fields["request_id"] = fields.get("request_id") or uuid.uuid4().hex
    filters = {name: fields.pop(name) for name in _PLACES if name in fields}
    if empty := next((name for name, values in filters.items() if not values), None):
        raise refusal(_PLACES[empty], _EMPTY, "omit it, or name at least one", request_id)
    if filters:
        fields["filters"] = fields.get("filters", {}) | filters
    if (within := fields.pop("avoid_shown_within", None)) is not None:
        fields["avoid_shown"] = {"within": within}
    fields |= {} if user_id is None else {"user_id": checked("user_id", user_id, TEXT)}
    return ClientCall(Recommendation, "POST", "/v1/recommendations", "Recommend", fields, request_id)


def batch_call(requests: Iterable[str | Mapping[str, Any]], options: RecommendOptions) -> ClientCall[BatchAnswers]:
    """Build the call for several requests: user ids, or options with a `user_id`; `options` apply to all.

    Raises as `recommend_call` does.
    """
    if isinstance(requests, str | Mapping) or not isinstance(requests, Iterable):
        raise refusal("requests", f"wrong type: {type(requests).__name__}", "send a list of user ids or of options")
    entries = []
    for index, request in enumerate(requests):
        if not isinstance(request, str | Mapping):
            raise refusal(f"requests[{index}]", f"wrong type: {type(request).__name__}", "send a user id or options")
        own: Any = {"user_id": request} if isinstance(request, str) else dict(request)
        user_id = own.pop("user_id", None)
        entries.append(recommend_call(user_id, {**options, **own}).fields)
    headers = {"x-batch-size": str(len(entries))}
    path, fields = "/v1/recommendations:batch", {"requests": entries}
    return ClientCall(BatchAnswers, "POST", path, "RecommendBatch", fields, headers=headers)


def similar_call(
    item_ids: str | Sequence[str], user_id: str | None, options: RecommendOptions
) -> ClientCall[Recommendation]:
    """Build the call for one item or the items of a cart. Raises as `recommend_call` does."""
    first, *others = checked_texts("item_ids", [item_ids] if isinstance(item_ids, str) else item_ids) or [""]
    call, path = recommend_call(user_id, options), "/v1/items/{item_id}/similar"
    rest_only, rpc_only = {"item_ids": others}, {"item_ids": [first, *others]}
    in_path = {"item_id": first}
    return replace(call, path=path, method="SimilarItems", in_path=in_path, rest_only=rest_only, rpc_only=rpc_only)


def popular_call(
    window: str | None, category: str | None, k: int, session_id: str | None
) -> ClientCall[Recommendation]:
    """Build the call. Raises TailraceError for a wrong value."""
    options: RecommendOptions = {"k": k} if category is None else {"k": k, "categories": [category]}
    if session_id is not None:
        options["session_id"] = session_id
    call = recommend_call(None, options)
    named = {"window": window, "category": category, "session_id": session_id}
    sent = {name: checked(name, value, TEXT) for name, value in named.items() if value is not None}
    rpc_only = {"window": sent.get("window", "")}
    return replace(
        call, verb="GET", path="/v1/popular", method="Popular", rest_only={**sent, "k": k}, rpc_only=rpc_only
    )


def search_call(
    q: str, user_id: str | None, session_id: str | None, surface: str | None, k: int
) -> ClientCall[Recommendation]:
    """Build the call. Raises TailraceError for a wrong value."""
    named = {"session_id": session_id, "surface": surface}
    options = RecommendOptions(k=k, **{name: value for name, value in named.items() if value is not None})  # type: ignore[typeddict-item]
    call = recommend_call(user_id, options)
    rpc_only = {"q": checked("q", q, TEXT)}
    given = {name: value for name, value in call.fields.items() if name != "request_id"}
    return replace(
        call, verb="GET", path="/v1/search", method="Search", rest_only={**given, **rpc_only}, rpc_only=rpc_only
    )


def assignment_call(user_id: str | None, session_id: str | None) -> ClientCall[Assigned]:
    """Build the call. Raises TailraceError for a wrong value."""
    named = {"user_id": user_id, "session_id": session_id}
    sent = {name: checked(name, value, TEXT) for name, value in named.items() if value is not None}
    return ClientCall(Assigned, "GET", "/v1/assignment", "Assign", sent, rest_only=sent)


def record_call(events: Event | Iterable[Event]) -> ClientCall[Recorded]:
    """Build the call. Raises TailraceError for a wrong value."""
    if not isinstance(events, Iterable | Event) or isinstance(events, Mapping):
        raise refusal("events", f"wrong type: {type(events).__name__}", _SEND_EVENTS)
    listed = [events] if isinstance(events, Event) else list(events)
    fields = {"events": [_event_fields(f"events[{index}]", event) for index, event in enumerate(listed)]}
    return ClientCall(Recorded, "POST", "/v1/events", "RecordEvents", fields)


def explain_call(request_id: str) -> ClientCall[Explanation]:
    """Build the call; the gRPC door has none. Raises TailraceError for a wrong value."""
    in_path = {"request_id": checked("request_id", request_id, TEXT)}
    return ClientCall(Explanation, "GET", "/v1/explanations/{request_id}", None, {}, in_path=in_path)


def erase_call(user_id: str) -> ClientCall[ErasureReceipt]:
    """Build the call. Raises TailraceError for a wrong value."""
    fields = {"user_id": checked("user_id", user_id, TEXT)}
    return ClientCall(ErasureReceipt, "DELETE", "/v1/users/{user_id}", "EraseUser", fields, in_path=fields)


def erasure_call(erasure_id: str) -> ClientCall[ErasureReceipt]:
    """Build the call. Raises TailraceError for a wrong value."""
    fields = {"erasure_id": checked("erasure_id", erasure_id, TEXT)}
    return ClientCall(ErasureReceipt, "GET", "/v1/erasures/{erasure_id}", "GetErasure", fields, in_path=fields)


def user_data_call(user_id: str) -> ClientCall[UserData]:
    """Build the call; the gRPC door has none. Raises TailraceError for a wrong value."""
    in_path = {"user_id": checked("user_id", user_id, TEXT)}
    return ClientCall(UserData, "GET", "/v1/users/{user_id}/data", None, {}, in_path=in_path)


def put_items_call(items: CatalogueItem | Iterable[CatalogueItem]) -> ClientCall[ItemsPut]:
    """Build the call. Raises TailraceError for a wrong value."""
    return ClientCall(ItemsPut, "PUT", "/v1/items", "PutItems", put_fields(items))


def patch_item_call(item_id: str, changes: Mapping[str, Any]) -> ClientCall[CatalogueItem]:
    """Build the call. Raises TailraceError for a wrong value."""
    in_path = {"item_id": checked("item_id", item_id, TEXT)}
    return ClientCall(CatalogueItem, "PATCH", _ITEM, "PatchItem", {**changes, **in_path}, in_path=in_path)


def get_item_call(item_id: str) -> ClientCall[CatalogueItem]:
    """Build the call. Raises TailraceError for a wrong value."""
    fields = {"item_id": checked("item_id", item_id, TEXT)}
    return ClientCall(CatalogueItem, "GET", _ITEM, "GetItem", fields, in_path=fields)


def delete_item_call(item_id: str) -> ClientCall[ItemDeleted]:
    """Build the call. Raises TailraceError for a wrong value."""
    fields = {"item_id": checked("item_id", item_id, TEXT)}
    return ClientCall(ItemDeleted, "DELETE", _ITEM, "DeleteItems", fields, in_path=fields)


def _checked(path: str, value: Any, name: str) -> Any:
    return checked(path, value, _KINDS[name]) if name in _KINDS else checked_texts(path, value)


def _event_fields(path: str, event: Event) -> dict[str, Any]:
    if not isinstance(event, Event):
        raise refusal(path, f"wrong type: {type(event).__name__}", _SEND_EVENTS)
    fields = {name: getattr(event, name) for name in Event.__slots__}
    sent = {name: value for name, value in fields.items() if value is not None or name in _MUST_BE_THERE}
    return {name: _checked(f"{path}.{name}", value, name) for name, value in sent.items()}
