"""The operations: paths and gRPC methods, scopes, bodies, answers and errors.

The source of the routes of the REST door, the methods of the gRPC door, the OpenAPI document, spans and audit lines.
"""

from collections.abc import Mapping
from typing import Any

from services.contracts import recommend_pb2 as pb
from services.contracts.access import Scope
from services.contracts.answers import BatchAnswersBody, BundleInfo, ErrorBody, ErrorDetail, Status
from services.contracts.assignment import AssignRequest, AssignResponse
from services.contracts.batch import MAX_BATCH, BatchBody
from services.contracts.erasure import ReceiptBody, UserDataBody
from services.contracts.events import EventBody, EventsBody, RecordEventsResponse
from services.contracts.explanation import ExplanationAnswer
from services.contracts.items import ItemPatchBody, ItemStateBody, PutItemsBody, PutOutcomesBody, StatedItemBody
from services.contracts.message import MAX_ID_CHARS, PRINTABLE
from services.contracts.recommend import (
    MAX_DEADLINE_MS,
    PopularQuery,
    Recommendation,
    RecommendBody,
    SearchQuery,
    SimilarBody,
)
from services.errors import ErrorKind
from services.gateway.call.json_schema import query_parameters
from services.gateway.call.operation import (
    JSON,
    ErrorFormat,
    ListOf,
    Operation,
    OperationAnswer,
    Parameter,
    Rpc,
    json_answer,
)

STATUS = {
    ErrorKind.INVALID_REQUEST: 422,
    ErrorKind.TOO_LARGE: 413,
    ErrorKind.UNAUTHENTICATED: 401,
    ErrorKind.NOT_ALLOWED: 403,
    ErrorKind.NOT_FOUND: 404,
    ErrorKind.QUOTA: 429,
    ErrorKind.OVERLOADED: 429,
    ErrorKind.UNAVAILABLE: 503,
    ErrorKind.LATE: 504,
    ErrorKind.INTERNAL: 500,
}


REST_ERRORS = ErrorFormat(
    model=ErrorBody,
    status=STATUS,
    body=lambda error, request_id: ErrorBody(ErrorDetail.of(error, request_id)),
    no_route=lambda code, problem, fix, request_id: ErrorBody(ErrorDetail(code, problem, None, fix, request_id)),
)

_EVENT = {"user_id": "196", "item_id": "242", "event_type": "click"}

RECOMMEND = Operation(
    name="recommend",
    method="POST",
    path="/v1/recommendations",
    summary="Recommend items to a user, before the deadline",
    scope=Scope.RECOMMEND,
    errors=REST_ERRORS,
    for_tenants=True,
    kinds=frozenset({ErrorKind.OVERLOADED, ErrorKind.UNAVAILABLE, ErrorKind.LATE}),
    parameters=(
        Parameter(
            name="X-Deadline-Ms",
            where="header",
            schema={"type": "integer", "minimum": 1, "maximum": MAX_DEADLINE_MS},
            description="Milliseconds from arrival; the body's deadline_ms wins",
        ),
    ),
    bodies=(RecommendBody,),
    examples=({"user_id": "196", "k": 5, "deadline_ms": 200},),
    answers=json_answer(Recommendation),
    is_traced=True,
    rpc=Rpc("Recommend", pb.RecommendRequest, pb.RecommendResponse),
)
RECOMMEND_BATCH = Operation(
    name="recommendBatch",
    method="POST",
    path="/v1/recommendations:batch",
    summary="Recommend items to several users, under one deadline; counts as as many calls as it holds requests",
    scope=Scope.RECOMMEND,
    errors=REST_ERRORS,
    for_tenants=True,
    kinds=frozenset({ErrorKind.OVERLOADED, ErrorKind.UNAVAILABLE, ErrorKind.LATE}),
    parameters=(
        *RECOMMEND.parameters,
        Parameter(
            name="X-Batch-Size",
            where="header",
            schema={"type": "integer", "minimum": 1, "maximum": MAX_BATCH},
            description=f"The number of requests; without it the edge counts the call as {MAX_BATCH}",
        ),
    ),
    bodies=(BatchBody,),
    examples=({"requests": [{"user_id": "196"}, {"user_id": "22", "k": 5}], "deadline_ms": 1_000},),
    answers=json_answer(BatchAnswersBody),
    is_traced=True,
    rpc=Rpc("RecommendBatch", pb.RecommendBatchRequest, pb.RecommendBatchResponse),
)
SIMILAR_ITEMS = Operation(
    name="similarItems",
    method="POST",
    path="/v1/items/{item_id}/similar",
    summary="List items similar to one item, or to the items of a cart",
    scope=Scope.RECOMMEND,
    errors=REST_ERRORS,
    for_tenants=True,
    kinds=frozenset({ErrorKind.NOT_FOUND, ErrorKind.OVERLOADED, ErrorKind.UNAVAILABLE, ErrorKind.LATE}),
    parameters=(
        Parameter(name="item_id", where="path", schema={"type": "string"}, description="An item of the catalogue"),
        *RECOMMEND.parameters,
    ),
    bodies=(SimilarBody,),
    examples=({"k": 5}, {"user_id": "196", "item_ids": ["181", "174"]}),
    answers=json_answer(Recommendation),
    is_traced=True,
    rpc=Rpc("SimilarItems", pb.SimilarItemsRequest, pb.RecommendResponse),
)
POPULAR = Operation(
    name="popular",
    method="GET",
    path="/v1/popular",
    summary="List what is popular, by window and category",
    scope=Scope.RECOMMEND,
    errors=REST_ERRORS,
    for_tenants=True,
    kinds=frozenset({ErrorKind.OVERLOADED, ErrorKind.UNAVAILABLE, ErrorKind.LATE}),
    parameters=(*query_parameters(PopularQuery), *RECOMMEND.parameters),
    answers=json_answer(Recommendation),
    is_traced=True,
    rpc=Rpc("Popular", pb.PopularRequest, pb.RecommendResponse),
)
SEARCH = Operation(
    name="search",
    method="GET",
    path="/v1/search",
    summary="Search items by words of their titles, or by a wish; ordered for a user, if any",
    scope=Scope.RECOMMEND,
    errors=REST_ERRORS,
    for_tenants=True,
    kinds=frozenset({ErrorKind.OVERLOADED, ErrorKind.UNAVAILABLE, ErrorKind.LATE}),
    parameters=(*query_parameters(SearchQuery), *RECOMMEND.parameters),
    answers=json_answer(Recommendation),
    is_traced=True,
    rpc=Rpc("Search", pb.SearchRequest, pb.RecommendResponse),
)
RECORD_EVENTS = Operation(
    name="recordEvents",
    method="POST",
    path="/v1/events",
    summary="Record what users did; answers only when the broker has every event",
    scope=Scope.EVENTS,
    errors=REST_ERRORS,
    for_tenants=True,
    kinds=frozenset({ErrorKind.OVERLOADED, ErrorKind.UNAVAILABLE}),
    bodies=(EventsBody, ListOf("EventListBody", EventBody, "Many events as a list."), EventBody),
    examples=({"events": [_EVENT]}, _EVENT),
    answers=json_answer(RecordEventsResponse),
    is_traced=True,
    rpc=Rpc("RecordEvents", pb.RecordEventsRequest, pb.RecordEventsResponse),
)
ASSIGNMENT = Operation(
    name="assignment",
    method="GET",
    path="/v1/assignment",
    summary="Return the version and variants of a user, or of a visitor's session, on each surface",
    scope=Scope.RECOMMEND,
    errors=REST_ERRORS,
    for_tenants=True,
    parameters=query_parameters(AssignRequest),
    answers=json_answer(AssignResponse),
    rpc=Rpc("Assign", pb.AssignRequest, pb.AssignResponse),
)
BUNDLE = Operation(
    name="bundle",
    method="GET",
    path="/v1/bundle",
    summary="Describe the live bundle of a name",
    scope=Scope.RECOMMEND,
    errors=REST_ERRORS,
    for_tenants=True,
    kinds=frozenset({ErrorKind.UNAVAILABLE}),
    parameters=(
        Parameter(
            name="name",
            where="query",
            schema={"type": "string", "minLength": 1},
            description="A model name that this stack serves; absent: the name for requests without a surface",
        ),
    ),
    answers=json_answer(BundleInfo),
)
EXPLANATION = Operation(
    name="explanation",
    method="GET",
    path="/v1/explanations/{request_id}",
    summary="Explain how a recent request was answered",
    scope=Scope.ADMIN,
    errors=REST_ERRORS,
    for_tenants=True,
    kinds=frozenset({ErrorKind.NOT_FOUND, ErrorKind.UNAVAILABLE}),
    parameters=(
        Parameter(
            name="request_id", where="path", schema={"type": "string"}, description="From the answer or the error"
        ),
    ),
    answers=json_answer(ExplanationAnswer),
    is_audited=True,
)
HEALTHZ = Operation(
    name="healthz",
    method="GET",
    path="/healthz",
    summary="Report that the process runs",
    scope=None,
    errors=REST_ERRORS,
    answers=json_answer(Status),
)
READYZ = Operation(
    name="readyz",
    method="GET",
    path="/readyz",
    summary="Report whether recommendations can be answered",
    scope=None,
    errors=REST_ERRORS,
    answers={
        **json_answer(Status),
        503: OperationAnswer("No bundle is loaded, or no state of an item is known", {"application/json": Status}),
    },
)
METRICS = Operation(
    name="metrics",
    method="GET",
    path="/metrics",
    summary="Return all metrics in Prometheus' text format; scrapers have a port of their own",
    scope=Scope.ADMIN,
    errors=REST_ERRORS,
    answers={200: OperationAnswer("OK", {"text/plain": None})},
)
DOCS = Operation(
    name="docs",
    method="GET",
    path="/docs",
    summary="Return a page that shows /openapi.json and loads nothing from elsewhere",
    scope=None,
    errors=REST_ERRORS,
    answers={},
    is_described=False,
)

_ID = {"type": "string", "minLength": 1, "maxLength": MAX_ID_CHARS, "pattern": PRINTABLE}
_COLOURS = {"colour": "red", "sizes": ["s", "m"], "price": 9.5, "new": True}


def _operation(name: str, method: str, summary: str, path: str = "/v1/items/{item_id}", **more: Any) -> Operation:
    parameter = Parameter(name="item_id", where="path", schema=_ID, description="The item's id")
    return Operation(
        name=name,
        method=method,
        path=path,
        summary=summary,
        scope=Scope.ITEMS,
        errors=REST_ERRORS,
        for_tenants=True,
        parameters=(parameter,) if "{" in path else (),
        is_audited=method != "GET",
        is_traced=True,
        **more,
    )


_WRITES = frozenset({ErrorKind.OVERLOADED, ErrorKind.UNAVAILABLE})
_STATE = {"categories": ["Comedy"], "attributes": _COLOURS, "available": True}

PUT_ITEM = _operation(
    "putItem",
    "PUT",
    "Replace what is stated of an item; answers when the broker has it, and every answer follows within a second",
    kinds=_WRITES,
    bodies=(ItemStateBody,),
    examples=(_STATE, {"available": False}),
    answers=json_answer(StatedItemBody),
)
PATCH_ITEM = _operation(
    "patchItem",
    "PATCH",
    "Change some fields of an item (a JSON merge patch)",
    kinds=_WRITES | {ErrorKind.NOT_FOUND},
    bodies=(ItemPatchBody,),
    examples=({"available": False}, {"attributes": {"price": 8.5}}),
    answers=json_answer(StatedItemBody),
    rpc=Rpc("PatchItem", pb.PatchItemRequest, pb.CatalogueItem),
)
GET_ITEM = _operation(
    "getItem",
    "GET",
    "Return an item as it appears in answers",
    kinds=frozenset({ErrorKind.NOT_FOUND}),
    answers=json_answer(StatedItemBody),
    rpc=Rpc("GetItem", pb.GetItemRequest, pb.CatalogueItem),
)
DELETE_ITEM = _operation(
    "deleteItem",
    "DELETE",
    "Delete an item, from later bundles too",
    kinds=_WRITES,
    answers=json_answer(Status),
    rpc=Rpc("DeleteItems", pb.DeleteItemsRequest, pb.DeleteItemsResponse),
)
PUT_ITEMS = _operation(
    "putItems",
    "PUT",
    "Replace what is stated of many items, each with its outcome",
    "/v1/items",
    kinds=_WRITES,
    bodies=(PutItemsBody,),
    examples=({"items": [{"item_id": "242", **_STATE}, {"item_id": "302", "available": False}]},),
    answers=json_answer(PutOutcomesBody),
    rpc=Rpc("PutItems", pb.PutItemsRequest, pb.PutItemsResponse),
)

_USER_ID = Parameter(name="user_id", where="path", schema=_ID, description="The user")


ERASE_USER = Operation(
    name="eraseUser",
    method="DELETE",
    path="/v1/users/{user_id}",
    summary="Erase a user: every store drops the events that the broker has by now; later events begin a new history",
    scope=Scope.ERASE,
    errors=REST_ERRORS,
    for_tenants=True,
    kinds=frozenset({ErrorKind.OVERLOADED, ErrorKind.UNAVAILABLE}),
    parameters=(_USER_ID,),
    answers={202: OperationAnswer("Accepted; the receipt is kept for 90 days", {JSON: ReceiptBody})},
    is_audited=True,
    is_private=True,
    rpc=Rpc("EraseUser", pb.EraseUserRequest, pb.ErasureReceipt),
)
ERASURE = Operation(
    name="erasure",
    method="GET",
    path="/v1/erasures/{erasure_id}",
    summary="Return the receipt of an erasure",
    scope=Scope.ERASE,
    errors=REST_ERRORS,
    for_tenants=True,
    kinds=frozenset({ErrorKind.NOT_FOUND, ErrorKind.UNAVAILABLE}),
    parameters=(Parameter(name="erasure_id", where="path", schema=_ID, description="Of the erasure's answer"),),
    answers=json_answer(ReceiptBody),
    is_audited=True,
    rpc=Rpc("GetErasure", pb.GetErasureRequest, pb.ErasureReceipt),
)


USER_DATA = Operation(
    name="userData",
    method="GET",
    path="/v1/users/{user_id}/data",
    summary="Return all that is kept of a user",
    scope=Scope.ERASE,
    errors=REST_ERRORS,
    for_tenants=True,
    kinds=frozenset({ErrorKind.OVERLOADED, ErrorKind.UNAVAILABLE}),
    parameters=(_USER_ID,),
    answers=json_answer(UserDataBody),
    is_audited=True,
    is_private=True,
)

RPCS = (
    *(RECOMMEND, RECOMMEND_BATCH, SIMILAR_ITEMS, POPULAR, SEARCH, ASSIGNMENT, RECORD_EVENTS),
    *(PUT_ITEMS, PATCH_ITEM, GET_ITEM, DELETE_ITEM, ERASE_USER, ERASURE),
)
"""The operations of the gRPC door."""
METHODS: Mapping[str, Rpc] = {operation.rpc.method: operation.rpc for operation in RPCS if operation.rpc is not None}
"""The methods of the gRPC door by name."""
