from google.protobuf import struct_pb2 as _struct_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Filters(_message.Message):
    __slots__ = ("categories", "allowed_item_ids", "must", "should", "must_not")
    CATEGORIES_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_ITEM_IDS_FIELD_NUMBER: _ClassVar[int]
    MUST_FIELD_NUMBER: _ClassVar[int]
    SHOULD_FIELD_NUMBER: _ClassVar[int]
    MUST_NOT_FIELD_NUMBER: _ClassVar[int]
    categories: _containers.RepeatedScalarFieldContainer[str]
    allowed_item_ids: _containers.RepeatedScalarFieldContainer[str]
    must: _containers.RepeatedCompositeFieldContainer[Clause]
    should: _containers.RepeatedCompositeFieldContainer[Clause]
    must_not: _containers.RepeatedCompositeFieldContainer[Clause]
    def __init__(self, categories: _Optional[_Iterable[str]] = ..., allowed_item_ids: _Optional[_Iterable[str]] = ..., must: _Optional[_Iterable[_Union[Clause, _Mapping]]] = ..., should: _Optional[_Iterable[_Union[Clause, _Mapping]]] = ..., must_not: _Optional[_Iterable[_Union[Clause, _Mapping]]] = ...) -> None: ...

class Clause(_message.Message):
    __slots__ = ("key", "eq", "range", "exists", "must", "should", "must_not")
    KEY_FIELD_NUMBER: _ClassVar[int]
    EQ_FIELD_NUMBER: _ClassVar[int]
    IN_FIELD_NUMBER: _ClassVar[int]
    RANGE_FIELD_NUMBER: _ClassVar[int]
    EXISTS_FIELD_NUMBER: _ClassVar[int]
    MUST_FIELD_NUMBER: _ClassVar[int]
    SHOULD_FIELD_NUMBER: _ClassVar[int]
    MUST_NOT_FIELD_NUMBER: _ClassVar[int]
    key: str
    eq: _struct_pb2.Value
    range: Range
    exists: bool
    must: _containers.RepeatedCompositeFieldContainer[Clause]
    should: _containers.RepeatedCompositeFieldContainer[Clause]
    must_not: _containers.RepeatedCompositeFieldContainer[Clause]
    def __init__(self, key: _Optional[str] = ..., eq: _Optional[_Union[_struct_pb2.Value, _Mapping]] = ..., range: _Optional[_Union[Range, _Mapping]] = ..., exists: _Optional[bool] = ..., must: _Optional[_Iterable[_Union[Clause, _Mapping]]] = ..., should: _Optional[_Iterable[_Union[Clause, _Mapping]]] = ..., must_not: _Optional[_Iterable[_Union[Clause, _Mapping]]] = ..., **kwargs) -> None: ...

class Range(_message.Message):
    __slots__ = ("gte", "gt", "lte", "lt")
    GTE_FIELD_NUMBER: _ClassVar[int]
    GT_FIELD_NUMBER: _ClassVar[int]
    LTE_FIELD_NUMBER: _ClassVar[int]
    LT_FIELD_NUMBER: _ClassVar[int]
    gte: float
    gt: float
    lte: float
    lt: float
    def __init__(self, gte: _Optional[float] = ..., gt: _Optional[float] = ..., lte: _Optional[float] = ..., lt: _Optional[float] = ...) -> None: ...

class Rules(_message.Message):
    __slots__ = ("boosts", "pins", "blocks", "caps", "diversity", "decay", "freshness")
    class Boost(_message.Message):
        __slots__ = ("where", "factor")
        WHERE_FIELD_NUMBER: _ClassVar[int]
        FACTOR_FIELD_NUMBER: _ClassVar[int]
        where: Clause
        factor: float
        def __init__(self, where: _Optional[_Union[Clause, _Mapping]] = ..., factor: _Optional[float] = ...) -> None: ...
    class Pin(_message.Message):
        __slots__ = ("item_id", "position")
        ITEM_ID_FIELD_NUMBER: _ClassVar[int]
        POSITION_FIELD_NUMBER: _ClassVar[int]
        item_id: str
        position: int
        def __init__(self, item_id: _Optional[str] = ..., position: _Optional[int] = ...) -> None: ...
    class Cap(_message.Message):
        __slots__ = ("attribute", "most")
        ATTRIBUTE_FIELD_NUMBER: _ClassVar[int]
        MOST_FIELD_NUMBER: _ClassVar[int]
        attribute: str
        most: int
        def __init__(self, attribute: _Optional[str] = ..., most: _Optional[int] = ...) -> None: ...
    class Freshness(_message.Message):
        __slots__ = ("half_life_h", "factor")
        HALF_LIFE_H_FIELD_NUMBER: _ClassVar[int]
        FACTOR_FIELD_NUMBER: _ClassVar[int]
        half_life_h: float
        factor: float
        def __init__(self, half_life_h: _Optional[float] = ..., factor: _Optional[float] = ...) -> None: ...
    BOOSTS_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CAPS_FIELD_NUMBER: _ClassVar[int]
    DIVERSITY_FIELD_NUMBER: _ClassVar[int]
    DECAY_FIELD_NUMBER: _ClassVar[int]
    FRESHNESS_FIELD_NUMBER: _ClassVar[int]
    boosts: _containers.RepeatedCompositeFieldContainer[Rules.Boost]
    pins: _containers.RepeatedCompositeFieldContainer[Rules.Pin]
    blocks: _containers.RepeatedCompositeFieldContainer[Clause]
    caps: _containers.RepeatedCompositeFieldContainer[Rules.Cap]
    diversity: float
    decay: float
    freshness: Rules.Freshness
    def __init__(self, boosts: _Optional[_Iterable[_Union[Rules.Boost, _Mapping]]] = ..., pins: _Optional[_Iterable[_Union[Rules.Pin, _Mapping]]] = ..., blocks: _Optional[_Iterable[_Union[Clause, _Mapping]]] = ..., caps: _Optional[_Iterable[_Union[Rules.Cap, _Mapping]]] = ..., diversity: _Optional[float] = ..., decay: _Optional[float] = ..., freshness: _Optional[_Union[Rules.Freshness, _Mapping]] = ...) -> None: ...

class AvoidShown(_message.Message):
    __slots__ = ("within",)
    WITHIN_FIELD_NUMBER: _ClassVar[int]
    within: str
    def __init__(self, within: _Optional[str] = ...) -> None: ...

class RecommendRequest(_message.Message):
    __slots__ = ("user_id", "k", "recent_item_ids", "exclude_item_ids", "exclude_seen", "filters", "deadline_ms", "request_id", "next", "avoid_shown", "rationale", "surface", "rules", "session_id", "wish", "session_wishes")
    USER_ID_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    RECENT_ITEM_IDS_FIELD_NUMBER: _ClassVar[int]
    EXCLUDE_ITEM_IDS_FIELD_NUMBER: _ClassVar[int]
    EXCLUDE_SEEN_FIELD_NUMBER: _ClassVar[int]
    FILTERS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    AVOID_SHOWN_FIELD_NUMBER: _ClassVar[int]
    RATIONALE_FIELD_NUMBER: _ClassVar[int]
    SURFACE_FIELD_NUMBER: _ClassVar[int]
    RULES_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    WISH_FIELD_NUMBER: _ClassVar[int]
    SESSION_WISHES_FIELD_NUMBER: _ClassVar[int]
    user_id: str
    k: int
    recent_item_ids: _containers.RepeatedScalarFieldContainer[str]
    exclude_item_ids: _containers.RepeatedScalarFieldContainer[str]
    exclude_seen: bool
    filters: Filters
    deadline_ms: int
    request_id: str
    next: str
    avoid_shown: AvoidShown
    rationale: bool
    surface: str
    rules: Rules
    session_id: str
    wish: str
    session_wishes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, user_id: _Optional[str] = ..., k: _Optional[int] = ..., recent_item_ids: _Optional[_Iterable[str]] = ..., exclude_item_ids: _Optional[_Iterable[str]] = ..., exclude_seen: _Optional[bool] = ..., filters: _Optional[_Union[Filters, _Mapping]] = ..., deadline_ms: _Optional[int] = ..., request_id: _Optional[str] = ..., next: _Optional[str] = ..., avoid_shown: _Optional[_Union[AvoidShown, _Mapping]] = ..., rationale: _Optional[bool] = ..., surface: _Optional[str] = ..., rules: _Optional[_Union[Rules, _Mapping]] = ..., session_id: _Optional[str] = ..., wish: _Optional[str] = ..., session_wishes: _Optional[_Iterable[str]] = ...) -> None: ...

class ScoredItem(_message.Message):
    __slots__ = ("item_id", "score", "title", "source")
    ITEM_ID_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    TITLE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    item_id: str
    score: float
    title: str
    source: str
    def __init__(self, item_id: _Optional[str] = ..., score: _Optional[float] = ..., title: _Optional[str] = ..., source: _Optional[str] = ...) -> None: ...

class Understood(_message.Message):
    __slots__ = ("must", "must_not", "liked", "reader", "relaxed")
    MUST_FIELD_NUMBER: _ClassVar[int]
    MUST_NOT_FIELD_NUMBER: _ClassVar[int]
    LIKED_FIELD_NUMBER: _ClassVar[int]
    READER_FIELD_NUMBER: _ClassVar[int]
    RELAXED_FIELD_NUMBER: _ClassVar[int]
    must: _containers.RepeatedScalarFieldContainer[str]
    must_not: _containers.RepeatedScalarFieldContainer[str]
    liked: _containers.RepeatedScalarFieldContainer[str]
    reader: str
    relaxed: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, must: _Optional[_Iterable[str]] = ..., must_not: _Optional[_Iterable[str]] = ..., liked: _Optional[_Iterable[str]] = ..., reader: _Optional[str] = ..., relaxed: _Optional[_Iterable[str]] = ...) -> None: ...

class RecommendResponse(_message.Message):
    __slots__ = ("request_id", "items", "tier", "reason", "bundle_version", "newest_event_time_ms", "feature_age_ms", "deadline_ms", "stages_ms", "rationale", "next", "rationale_reason", "understood")
    class StagesMsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    BUNDLE_VERSION_FIELD_NUMBER: _ClassVar[int]
    NEWEST_EVENT_TIME_MS_FIELD_NUMBER: _ClassVar[int]
    FEATURE_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    STAGES_MS_FIELD_NUMBER: _ClassVar[int]
    RATIONALE_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    RATIONALE_REASON_FIELD_NUMBER: _ClassVar[int]
    UNDERSTOOD_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    items: _containers.RepeatedCompositeFieldContainer[ScoredItem]
    tier: str
    reason: str
    bundle_version: str
    newest_event_time_ms: int
    feature_age_ms: int
    deadline_ms: int
    stages_ms: _containers.ScalarMap[str, float]
    rationale: str
    next: str
    rationale_reason: str
    understood: Understood
    def __init__(self, request_id: _Optional[str] = ..., items: _Optional[_Iterable[_Union[ScoredItem, _Mapping]]] = ..., tier: _Optional[str] = ..., reason: _Optional[str] = ..., bundle_version: _Optional[str] = ..., newest_event_time_ms: _Optional[int] = ..., feature_age_ms: _Optional[int] = ..., deadline_ms: _Optional[int] = ..., stages_ms: _Optional[_Mapping[str, float]] = ..., rationale: _Optional[str] = ..., next: _Optional[str] = ..., rationale_reason: _Optional[str] = ..., understood: _Optional[_Union[Understood, _Mapping]] = ...) -> None: ...

class RecommendBatchRequest(_message.Message):
    __slots__ = ("requests", "deadline_ms")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[RecommendRequest]
    deadline_ms: int
    def __init__(self, requests: _Optional[_Iterable[_Union[RecommendRequest, _Mapping]]] = ..., deadline_ms: _Optional[int] = ...) -> None: ...

class RecommendBatchResponse(_message.Message):
    __slots__ = ("answers",)
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    answers: _containers.RepeatedCompositeFieldContainer[BatchAnswer]
    def __init__(self, answers: _Optional[_Iterable[_Union[BatchAnswer, _Mapping]]] = ...) -> None: ...

class BatchAnswer(_message.Message):
    __slots__ = ("recommendation", "error")
    RECOMMENDATION_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    recommendation: RecommendResponse
    error: Error
    def __init__(self, recommendation: _Optional[_Union[RecommendResponse, _Mapping]] = ..., error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("code", "message", "field", "fix", "request_id")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    FIX_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    field: str
    fix: str
    request_id: str
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., field: _Optional[str] = ..., fix: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class SimilarItemsRequest(_message.Message):
    __slots__ = ("item_ids", "request")
    ITEM_IDS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    item_ids: _containers.RepeatedScalarFieldContainer[str]
    request: RecommendRequest
    def __init__(self, item_ids: _Optional[_Iterable[str]] = ..., request: _Optional[_Union[RecommendRequest, _Mapping]] = ...) -> None: ...

class PopularRequest(_message.Message):
    __slots__ = ("window", "request")
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    window: str
    request: RecommendRequest
    def __init__(self, window: _Optional[str] = ..., request: _Optional[_Union[RecommendRequest, _Mapping]] = ...) -> None: ...

class SearchRequest(_message.Message):
    __slots__ = ("q", "request")
    Q_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    q: str
    request: RecommendRequest
    def __init__(self, q: _Optional[str] = ..., request: _Optional[_Union[RecommendRequest, _Mapping]] = ...) -> None: ...

class AssignRequest(_message.Message):
    __slots__ = ("user_id", "session_id")
    USER_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    user_id: str
    session_id: str
    def __init__(self, user_id: _Optional[str] = ..., session_id: _Optional[str] = ...) -> None: ...

class SurfaceAssignment(_message.Message):
    __slots__ = ("surface", "name", "bundle_version", "is_canary", "variants")
    class VariantsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SURFACE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    BUNDLE_VERSION_FIELD_NUMBER: _ClassVar[int]
    IS_CANARY_FIELD_NUMBER: _ClassVar[int]
    VARIANTS_FIELD_NUMBER: _ClassVar[int]
    surface: str
    name: str
    bundle_version: str
    is_canary: bool
    variants: _containers.ScalarMap[str, str]
    def __init__(self, surface: _Optional[str] = ..., name: _Optional[str] = ..., bundle_version: _Optional[str] = ..., is_canary: _Optional[bool] = ..., variants: _Optional[_Mapping[str, str]] = ...) -> None: ...

class AssignResponse(_message.Message):
    __slots__ = ("surfaces",)
    SURFACES_FIELD_NUMBER: _ClassVar[int]
    surfaces: _containers.RepeatedCompositeFieldContainer[SurfaceAssignment]
    def __init__(self, surfaces: _Optional[_Iterable[_Union[SurfaceAssignment, _Mapping]]] = ...) -> None: ...

class Interaction(_message.Message):
    __slots__ = ("event_id", "user_id", "item_id", "event_time_ms", "event_type", "value", "request_id")
    EVENT_ID_FIELD_NUMBER: _ClassVar[int]
    USER_ID_FIELD_NUMBER: _ClassVar[int]
    ITEM_ID_FIELD_NUMBER: _ClassVar[int]
    EVENT_TIME_MS_FIELD_NUMBER: _ClassVar[int]
    EVENT_TYPE_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    event_id: str
    user_id: str
    item_id: str
    event_time_ms: int
    event_type: str
    value: float
    request_id: str
    def __init__(self, event_id: _Optional[str] = ..., user_id: _Optional[str] = ..., item_id: _Optional[str] = ..., event_time_ms: _Optional[int] = ..., event_type: _Optional[str] = ..., value: _Optional[float] = ..., request_id: _Optional[str] = ...) -> None: ...

class RecordEventsRequest(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[Interaction]
    def __init__(self, events: _Optional[_Iterable[_Union[Interaction, _Mapping]]] = ...) -> None: ...

class RecordEventsResponse(_message.Message):
    __slots__ = ("accepted", "event_ids", "unknown_items")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    EVENT_IDS_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_ITEMS_FIELD_NUMBER: _ClassVar[int]
    accepted: int
    event_ids: _containers.RepeatedScalarFieldContainer[str]
    unknown_items: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, accepted: _Optional[int] = ..., event_ids: _Optional[_Iterable[str]] = ..., unknown_items: _Optional[_Iterable[str]] = ...) -> None: ...

class EraseUserRequest(_message.Message):
    __slots__ = ("user_id",)
    USER_ID_FIELD_NUMBER: _ClassVar[int]
    user_id: str
    def __init__(self, user_id: _Optional[str] = ...) -> None: ...

class GetErasureRequest(_message.Message):
    __slots__ = ("erasure_id",)
    ERASURE_ID_FIELD_NUMBER: _ClassVar[int]
    erasure_id: str
    def __init__(self, erasure_id: _Optional[str] = ...) -> None: ...

class ErasedStore(_message.Message):
    __slots__ = ("store", "meaning", "done_time_ms")
    STORE_FIELD_NUMBER: _ClassVar[int]
    MEANING_FIELD_NUMBER: _ClassVar[int]
    DONE_TIME_MS_FIELD_NUMBER: _ClassVar[int]
    store: str
    meaning: str
    done_time_ms: int
    def __init__(self, store: _Optional[str] = ..., meaning: _Optional[str] = ..., done_time_ms: _Optional[int] = ...) -> None: ...

class Remaining(_message.Message):
    __slots__ = ("what", "until", "until_unix_ms")
    WHAT_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    UNTIL_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    what: str
    until: str
    until_unix_ms: int
    def __init__(self, what: _Optional[str] = ..., until: _Optional[str] = ..., until_unix_ms: _Optional[int] = ...) -> None: ...

class ErasureReceipt(_message.Message):
    __slots__ = ("erasure_id", "accepted_time_ms", "is_done_online", "is_done", "stores", "remaining")
    ERASURE_ID_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TIME_MS_FIELD_NUMBER: _ClassVar[int]
    IS_DONE_ONLINE_FIELD_NUMBER: _ClassVar[int]
    IS_DONE_FIELD_NUMBER: _ClassVar[int]
    STORES_FIELD_NUMBER: _ClassVar[int]
    REMAINING_FIELD_NUMBER: _ClassVar[int]
    erasure_id: str
    accepted_time_ms: int
    is_done_online: bool
    is_done: bool
    stores: _containers.RepeatedCompositeFieldContainer[ErasedStore]
    remaining: _containers.RepeatedCompositeFieldContainer[Remaining]
    def __init__(self, erasure_id: _Optional[str] = ..., accepted_time_ms: _Optional[int] = ..., is_done_online: _Optional[bool] = ..., is_done: _Optional[bool] = ..., stores: _Optional[_Iterable[_Union[ErasedStore, _Mapping]]] = ..., remaining: _Optional[_Iterable[_Union[Remaining, _Mapping]]] = ...) -> None: ...

class Texts(_message.Message):
    __slots__ = ("texts",)
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, texts: _Optional[_Iterable[str]] = ...) -> None: ...

class AttributeValue(_message.Message):
    __slots__ = ("text", "texts", "number", "flag")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FLAG_FIELD_NUMBER: _ClassVar[int]
    text: str
    texts: Texts
    number: float
    flag: bool
    def __init__(self, text: _Optional[str] = ..., texts: _Optional[_Union[Texts, _Mapping]] = ..., number: _Optional[float] = ..., flag: _Optional[bool] = ...) -> None: ...

class CatalogueItem(_message.Message):
    __slots__ = ("item_id", "title", "categories", "attributes", "available", "published_ms", "expires_ms", "value")
    class AttributesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: AttributeValue
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[AttributeValue, _Mapping]] = ...) -> None: ...
    ITEM_ID_FIELD_NUMBER: _ClassVar[int]
    TITLE_FIELD_NUMBER: _ClassVar[int]
    CATEGORIES_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_MS_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_MS_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    item_id: str
    title: str
    categories: Texts
    attributes: _containers.MessageMap[str, AttributeValue]
    available: bool
    published_ms: int
    expires_ms: int
    value: float
    def __init__(self, item_id: _Optional[str] = ..., title: _Optional[str] = ..., categories: _Optional[_Union[Texts, _Mapping]] = ..., attributes: _Optional[_Mapping[str, AttributeValue]] = ..., available: _Optional[bool] = ..., published_ms: _Optional[int] = ..., expires_ms: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...

class PutItemsRequest(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[CatalogueItem]
    def __init__(self, items: _Optional[_Iterable[_Union[CatalogueItem, _Mapping]]] = ...) -> None: ...

class ItemOutcome(_message.Message):
    __slots__ = ("item_id", "error")
    ITEM_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    item_id: str
    error: ItemRefusal
    def __init__(self, item_id: _Optional[str] = ..., error: _Optional[_Union[ItemRefusal, _Mapping]] = ...) -> None: ...

class ItemRefusal(_message.Message):
    __slots__ = ("field", "message", "fix")
    FIELD_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIX_FIELD_NUMBER: _ClassVar[int]
    field: str
    message: str
    fix: str
    def __init__(self, field: _Optional[str] = ..., message: _Optional[str] = ..., fix: _Optional[str] = ...) -> None: ...

class PutItemsResponse(_message.Message):
    __slots__ = ("accepted", "outcomes")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    accepted: int
    outcomes: _containers.RepeatedCompositeFieldContainer[ItemOutcome]
    def __init__(self, accepted: _Optional[int] = ..., outcomes: _Optional[_Iterable[_Union[ItemOutcome, _Mapping]]] = ...) -> None: ...

class PatchItemRequest(_message.Message):
    __slots__ = ("changes", "clear")
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    CLEAR_FIELD_NUMBER: _ClassVar[int]
    changes: CatalogueItem
    clear: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, changes: _Optional[_Union[CatalogueItem, _Mapping]] = ..., clear: _Optional[_Iterable[str]] = ...) -> None: ...

class GetItemRequest(_message.Message):
    __slots__ = ("item_id",)
    ITEM_ID_FIELD_NUMBER: _ClassVar[int]
    item_id: str
    def __init__(self, item_id: _Optional[str] = ...) -> None: ...

class DeleteItemsRequest(_message.Message):
    __slots__ = ("item_ids",)
    ITEM_IDS_FIELD_NUMBER: _ClassVar[int]
    item_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, item_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class DeleteItemsResponse(_message.Message):
    __slots__ = ("deleted",)
    DELETED_FIELD_NUMBER: _ClassVar[int]
    deleted: int
    def __init__(self, deleted: _Optional[int] = ...) -> None: ...
