"""Adapts the OpenAPI schemas to code generators; the accepted values stay the same. Pure.

Each change works around a problem of openapi-generator 7.26; tests/integration/clients compiles its output.
"""

import json
import re
from collections.abc import Iterable
from typing import Any

Schemas = dict[str, Any]
_PLACE = "#/components/schemas/"
_INT_32 = 2**31


def suit_generators(schemas: Schemas, bodies: Iterable[str]) -> None:
    """Change the schemas in place; `bodies` names the request bodies.

    Answers may gain fields, which clients must ignore, so only request schemas forbid unknown fields.
    """
    named: Schemas = {}
    for schema in schemas.values():
        _suit(schema, named, "")
    schemas |= named
    for name in schemas.keys() - _reachable(bodies, schemas):
        schemas[name].pop("additionalProperties", None)


def _suit(schema: Any, named: Schemas, title: str) -> None:
    """Change a schema and all nested schemas; `title` is that of the nearest enclosing schema with a title."""
    if isinstance(schema, dict) and isinstance(schema.get("title"), str):
        title = schema["title"]
    for nested in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        _suit(nested, named, title)
    if isinstance(schema, dict):
        _join_null(schema)
        _name_forms(schema, named, title)
        _state_width(schema)
        _drop_default(schema)


def _join_null(schema: Schemas) -> None:
    """Write "type or null" as a type list.

    For `anyOf`, the generator creates one type for all fields that are alike, with the description of an arbitrary one.
    """
    match schema.get("anyOf"):
        case [{"type": str(kind)} as form, {"type": "null"}]:
            del schema["anyOf"]
            schema |= {**form, "type": [kind, "null"]}


def _name_forms(schema: Schemas, named: Schemas, title: str) -> None:
    """Name each list type among a field's alternatives: Java has no class literal for a list of strings or a map."""
    forms = schema.get("anyOf")
    for index, form in enumerate(forms if isinstance(forms, list) else ()):
        if form.get("type") == "object" and form.get("additionalProperties") is True:
            del form["additionalProperties"]  # the default
        if form.get("type") == "array":
            name = title.replace(" ", "") + _type_name(form)
            if named.setdefault(name, form) != form:
                raise ValueError(
                    f"{name}: two schemas that differ have this name; give one of their fields another title"
                )
            schema["anyOf"][index] = {"$ref": _PLACE + name}


def _type_name(schema: Schemas) -> str:
    if schema.get("type") == "array":
        return f"{_type_name(schema['items'])}List"
    name: str = schema["$ref"].removeprefix(_PLACE) if "$ref" in schema else schema["type"].capitalize()
    return name


def _state_width(schema: Schemas) -> None:
    """State the width of numbers: the generator's default of 32 bits is too small for milliseconds since 1970."""
    kinds = schema["type"] if isinstance(schema.get("type"), list) else [schema.get("type")]
    if "integer" in kinds and schema.get("maximum", _INT_32) >= _INT_32:
        schema["format"] = "int64"
    if "number" in kinds:
        schema["format"] = "double"


def _drop_default(schema: Schemas) -> None:
    """Drop a default that is null, an object, a list or one of several types: generators write invalid code for it."""
    is_simple = "type" in schema and not isinstance(schema.get("default"), dict | list | None)
    if "default" in schema and not is_simple:
        del schema["default"]


def _reachable(names: Iterable[str], schemas: Schemas) -> set[str]:
    """Return these schemas and all schemas that they refer to."""
    reached: set[str] = set()
    ahead = list(names)
    while ahead:
        name = ahead.pop()
        if name not in reached:
            reached.add(name)
            ahead += re.findall(rf"{_PLACE}(\w+)", json.dumps(schemas[name]))
    return reached
