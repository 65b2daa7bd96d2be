"""The OpenAPI document of the operations and their models. Pure."""

from collections.abc import Iterable, Mapping
from typing import Any

from services.contracts.message import MAX_ID_CHARS, PRINTABLE
from services.errors import ErrorKind
from services.gateway.call.generators import suit_generators
from services.gateway.call.json_schema import reference, schemas_of
from services.gateway.call.operation import Operation, OperationAnswer, Parameter, component_of

ERROR_MEANINGS: Mapping[ErrorKind, str] = {
    ErrorKind.INVALID_REQUEST: "a field is wrong: `field` names it, `fix` says what to send",
    ErrorKind.TOO_LARGE: "the body is larger than the door takes",
    ErrorKind.UNAUTHENTICATED: "the API key is missing or not valid now",
    ErrorKind.NOT_ALLOWED: "the key lacks the scope that the call needs",
    ErrorKind.NOT_FOUND: "no such name, or it is no longer kept",
    ErrorKind.QUOTA: "the key's rate or quota is used up; retry after `retry-after`",
    ErrorKind.OVERLOADED: "no capacity at the moment; retry after `retry-after`",
    ErrorKind.UNAVAILABLE: "a dependency does not answer and the call had no effect; retry after `retry-after`",
    ErrorKind.LATE: "a stage exceeded the deadline",
    ErrorKind.INTERNAL: "an internal error; it is logged under the request id",
}
"""The meaning of each error code to a caller."""

_HEADERS: Mapping[ErrorKind, dict[str, Any]] = {
    ErrorKind.UNAUTHENTICATED: {"WWW-Authenticate": {"schema": {"type": "string"}}},
    **{
        kind: {"Retry-After": {"schema": {"type": "integer", "minimum": 1}, "description": "Seconds"}}
        for kind in (ErrorKind.QUOTA, ErrorKind.OVERLOADED, ErrorKind.UNAVAILABLE)
    },
}
_RATE_HEADERS: Mapping[str, dict[str, Any]] = {
    "RateLimit-Limit": {
        "schema": {"type": "integer"},
        "description": "The limit of this key that is nearest to its end; absent for a key without limits",
    },
    "RateLimit-Remaining": {"schema": {"type": "integer"}, "description": "Calls left of it"},
    "RateLimit-Reset": {"schema": {"type": "integer"}, "description": "Seconds until it is whole again"},
    "RateLimit-Policy": {"schema": {"type": "string"}, "description": "Each limit with its window in seconds"},
}
_REQUEST_ID = Parameter(
    name="X-Request-Id",
    where="header",
    schema={"type": "string", "minLength": 1, "maxLength": MAX_ID_CHARS, "pattern": PRINTABLE},
    description="In UTF-8, else 400. Returned with the answer, logged, and kept with the impression",
)
_RATE_REFERENCES = {name: {"$ref": f"#/components/headers/{name}"} for name in _RATE_HEADERS}
_KEY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "An API key, where keys are set up"},
    "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key", "description": "The same key"},
}


def openapi_document(title: str, version: str, operations: Iterable[Operation]) -> dict[str, Any]:
    """Return the OpenAPI document of the operations."""
    described = [operation for operation in operations if operation.is_described]
    models = {model: None for operation in described for model in _models_of(operation)}
    schemas = schemas_of(models)
    suit_generators(schemas, [component_of(model) for operation in described for model in operation.bodies])
    paths: dict[str, dict[str, Any]] = {}
    for operation in described:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _describe(operation)
    components = {"schemas": schemas, "headers": _RATE_HEADERS, "securitySchemes": _KEY_SCHEMES}
    return {"openapi": "3.1.0", "info": {"title": title, "version": version}, "paths": paths, "components": components}


def _models_of(operation: Operation) -> Iterable[Any]:
    yield from operation.bodies
    for answer in operation.answers.values():
        yield from (model for model in answer.content.values() if model is not None)
    if operation.all_kinds:
        yield operation.errors.model


def _describe(operation: Operation) -> dict[str, Any]:
    about: dict[str, Any] = {"operationId": operation.name, "summary": operation.summary}
    parameters = operation.parameters if operation.scope is None else (*operation.parameters, _REQUEST_ID)
    if parameters:
        about["parameters"] = [_parameter(parameter) for parameter in parameters]
    if operation.bodies:
        about["requestBody"] = _request_body(operation)
    about["responses"] = {str(status): text for status, text in sorted(_responses(operation).items())}
    if operation.scope is not None:
        about["security"] = [{}, *({scheme: []} for scheme in _KEY_SCHEMES)]
    return about


def _parameter(parameter: Parameter) -> dict[str, Any]:
    return {
        "name": parameter.name,
        "in": parameter.where,
        "required": parameter.is_required or parameter.where == "path",
        "schema": dict(parameter.schema),
        "description": parameter.description,
    }


def _request_body(operation: Operation) -> dict[str, Any]:
    references = [reference(body) for body in operation.bodies]
    content: dict[str, Any] = {"schema": references[0] if len(references) == 1 else {"anyOf": references}}
    if operation.examples:
        content["examples"] = {
            f"example {number}": {"value": value} for number, value in enumerate(operation.examples, 1)
        }
    return {"required": True, "content": {"application/json": content}}


def _responses(operation: Operation) -> dict[int, dict[str, Any]]:
    """Return the answers and errors by status; kinds that share a status share a description."""
    responses = {status: _answer(answer) for status, answer in operation.answers.items()}
    for kind in ErrorKind:
        if kind not in operation.all_kinds:
            continue
        meaning, status = ERROR_MEANINGS[kind], operation.errors.status[kind]
        if status in responses:
            meaning = f"{responses[status]['description']}; or {meaning}"
        responses[status] = {
            "description": meaning[0].upper() + meaning[1:],
            "content": {"application/json": {"schema": reference(operation.errors.model)}},
            **({"headers": dict(_HEADERS[kind])} if kind in _HEADERS else {}),
        }
    if operation.scope is not None:
        for status in (*operation.answers, operation.errors.status[ErrorKind.QUOTA]):
            responses[status].setdefault("headers", {}).update(_RATE_REFERENCES)
    return responses


def _answer(answer: OperationAnswer) -> dict[str, Any]:
    described: dict[str, Any] = {"description": answer.description}
    if answer.content:
        described["content"] = {media_type: _content(media_type, model) for media_type, model in answer.content.items()}
    return described


def _content(media_type: str, model: Any) -> dict[str, Any]:
    """Return a body's description. OpenAPI 3.1 has no schema for a stream's events."""
    if media_type == "text/event-stream":
        return {}
    return {"schema": {"type": "string"} if model is None else reference(model)}
