"""The OpenAPI description of the REST door: what FastAPI cannot see, since the door parses bodies itself.

Knows the schemas and no behaviour.
"""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from services.gateway.openai.openapi import BODIES, REF
from services.gateway.rest.schema import (
    ErrorBody,
    EventBody,
    EventsBody,
    ExplanationBody,
    RecommendationBody,
    RecommendBody,
    RecordedBody,
)

_EVENT = {"user_id": "196", "item_id": "242", "event_type": "click"}
_REFUSALS = {
    413: "The body is too large",
    422: "The request is wrong; `field` and `fix` say how",
    429: "Overloaded; see Retry-After",
    503: "A dependency is away and nothing was done; see Retry-After",
}
_DEADLINE_HEADER = {
    "name": "X-Deadline-Ms",
    "in": "header",
    "schema": {"type": "integer", "minimum": 1, "maximum": 60_000},
    "description": "Milliseconds from arrival; the body's deadline_ms wins",
}
_REQUEST_ID_IN_PATH = {
    "name": "request_id",
    "in": "path",
    "required": True,
    "schema": {"type": "string"},
    "description": "As the answer or the error said it",
}
_REQUEST_ID_HEADER = {
    "name": "X-Request-Id",
    "in": "header",
    "schema": {"type": "string", "maxLength": 256},
    "description": "Echoed, logged, and kept with the impression",
}


def doc_of(path: str) -> dict[str, Any]:
    """Return the arguments by which FastAPI documents the route at this path."""
    match path:
        case "/v1/recommendations":
            example = {"user_id": "196", "k": 5, "deadline_ms": 200}
            return _doc(
                "Recommend items",
                RecommendationBody,
                (RecommendBody,),
                [example],
                [_DEADLINE_HEADER, _REQUEST_ID_HEADER],
            )
        case "/v1/events":
            examples = [{"events": [_EVENT]}, _EVENT]
            return _doc("Record events", RecordedBody, (EventsBody, EventBody), examples, [_REQUEST_ID_HEADER])
        case "/v1/explanations/{request_id:path}":
            return {
                "summary": "Explain a recent request",
                "responses": {
                    200: {"model": ExplanationBody},
                    404: {"model": ErrorBody, "description": "Unknown, or not kept any more"},
                    503: {"model": ErrorBody, "description": "The store of explanations is away"},
                },
                "openapi_extra": {"parameters": [_REQUEST_ID_IN_PATH]},
            }
        case _:
            return {}


def describe_routes(app: FastAPI) -> None:
    """Have the app's schema hold the bodies' models too."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            spec = get_openapi(title=app.title, version=app.version, routes=app.routes)
            models: tuple[type[BaseModel], ...] = (RecommendBody, EventsBody, EventBody, *BODIES)
            bodies = models_json_schema([(model, "validation") for model in models], ref_template=REF)[1]["$defs"]
            spec["components"]["schemas"].update(bodies)
            app.openapi_schema = spec
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's own way to extend it


def _doc(
    summary: str,
    answer: type[BaseModel],
    bodies: tuple[type[BaseModel], ...],
    examples: list[Any],
    parameters: list[dict[str, Any]],
) -> dict[str, Any]:
    refs = [{"$ref": REF.format(model=body.__name__)} for body in bodies]
    content = {
        "schema": refs[0] if len(refs) == 1 else {"anyOf": refs},
        "examples": {f"example {number}": {"value": value} for number, value in enumerate(examples, 1)},
    }
    return {
        "summary": summary,
        "responses": {
            200: {"model": answer},
            **{status: {"model": ErrorBody, "description": text} for status, text in _REFUSALS.items()},
        },
        "openapi_extra": {
            "parameters": parameters,
            "requestBody": {"required": True, "content": {"application/json": content}},
        },
    }
