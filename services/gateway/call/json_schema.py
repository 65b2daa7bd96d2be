"""JSON schemas of messages, as components of the OpenAPI document. Pure."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from services.contracts.message import Answer, Custom, Message
from services.gateway.call.operation import ListOf, Model, Parameter, component_of
from services.gateway.reasons import REASONS, TIERS

Schema = dict[str, Any]
_REF = "#/components/schemas/"
_MEANINGS: Mapping[str, Mapping[Any, Any]] = {"Tier": TIERS, "Reason": REASONS}
"""The texts of values that a description lists, by the name of their type."""
_LISTED = frozenset({"tier", "reason"})


def reference(model: Model) -> dict[str, str]:
    return {"$ref": _REF + component_of(model)}


def schemas_of(models: Iterable[Model]) -> Schema:
    """Return the components of these models and of all models that they contain."""
    listed = [*models]
    schemas = _message_schemas(one.item if isinstance(one, ListOf) else one for one in listed)
    for one in listed:
        if isinstance(one, ListOf):
            schemas[one.name] = {
                "title": one.name,
                "description": one.description,
                "type": "array",
                "items": reference(one.item),
                "minItems": 1,
            }
    return schemas


def query_parameters(kind: type[Message]) -> tuple[Parameter, ...]:
    """Return a message's fields as parameters of a query."""
    message = _message_schemas([kind])[component_of(kind)]
    required = message.get("required", ())
    return tuple(_parameter(name, schema, name in required) for name, schema in message["properties"].items())


def _parameter(name: str, schema: Schema, is_required: bool) -> Parameter:
    forms = [one for one in schema.get("anyOf", [schema]) if one != {"type": "null"}]
    text = {key: value for key, value in forms[0].items() if key not in ("title", "description", "examples")}
    return Parameter(name=name, where="query", schema=text, description=schema["description"], is_required=is_required)


def _message_schemas(messages: Iterable[type[Message]]) -> Schema:
    forms: dict[type[Any], None] = dict.fromkeys(messages)
    components: Schema = {}
    while True:  # a custom type names further messages
        found: dict[type[Any], None] = {}

        def describe(kind: type[Any], found: dict[type[Any], None] = found) -> Schema:
            if not issubclass(kind, Custom):
                raise NotImplementedError(kind)
            found.update(dict.fromkeys(one for one in kind.forms() if one is not dict))
            forms = [{"type": "object"} if one is dict else reference(one) for one in kind.forms()]
            return forms[0] if len(forms) == 1 else {"anyOf": forms}

        _, components = msgspec.json.schema_components(tuple(forms), schema_hook=describe, ref_template=_REF + "{name}")
        if not found.keys() - forms.keys():
            break
        forms |= found
    classes = {one.__name__: one for one in _subclasses(Message)}
    names = {name: component_of(classes[name]) for name in components if name in classes}
    return {names[name]: _suited(classes[name], schema, names) for name, schema in components.items() if name in names}


def _subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    for one in kind.__subclasses__():
        yield one
        yield from _subclasses(one)


def _suited(kind: type[Message], schema: Schema, names: Mapping[str, str]) -> Schema:
    """Return a message's schema with component names, titles and its extra constraints."""
    schema = {**schema, "title": component_of(kind), **kind.extra_schema}
    if issubclass(kind, Answer) and not kind.__struct_config__.omit_defaults:
        schema["required"] = [*schema["properties"]]
    if not schema.get("required"):
        schema.pop("required", None)
    for name, field in schema["properties"].items():
        plain = _inline(field, names)
        if name in _LISTED and (values := _enum_name(field)) in _MEANINGS:
            plain["description"] += "".join(
                f"\n- `{value}`: {text.meaning}" for value, text in _MEANINGS[values].items()
            )
        schema["properties"][name] = _titled(name, plain)
    return schema


def _titled(name: str, schema: Schema) -> Schema:
    """Return a field's schema with a title, unless it is a reference: code generators name its type by it."""
    forms = [one for one in schema.get("anyOf", ()) if one != {"type": "null"}]
    if "$ref" in schema or (len(forms) == 1 and "$ref" in forms[0]):
        return schema
    return {**schema, "title": name.replace("_", " ").title()}


def _inline(schema: Any, names: Mapping[str, str]) -> Any:
    """Return a schema with component names, without enums: an answer may gain values."""
    if isinstance(schema, list):
        return [_inline(one, names) for one in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {
        name: value if name in ("examples", "default") else _inline(value, names) for name, value in schema.items()
    }
    if forms := schema.pop("x-forms", None):
        schema["anyOf"] = forms
    if schema.pop("x-not-null", False):
        schema.pop("default", None)
        forms = [one for one in schema.pop("anyOf") if one != {"type": "null"}]
        schema = {**forms[0], **schema} if len(forms) == 1 else {"anyOf": forms, **schema}
    if (name := _name_in(schema)) is not None:
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        is_message = name in names or name in names.values()
        return {"$ref": _REF + names.get(name, name), **rest} if is_message else {"type": "string", **rest}
    if "enum" in schema and "type" not in schema and all(isinstance(one, str) for one in schema["enum"]):
        schema = {"type": "string", **schema}
    if schema.get("type") == "object" and not schema.keys() & {"properties", "additionalProperties"}:
        schema["additionalProperties"] = True
    if isinstance(schema.get("default", 0), list | tuple | dict | None):
        del schema["default"]
    return schema


def _name_in(schema: Schema) -> str | None:
    found = re.fullmatch(f"{_REF}(.*)", str(schema.get("$ref", "")))
    return found[1] if found and found[1][0].isupper() else None


def _enum_name(schema: Schema) -> str:
    return _name_in(schema) or next((_name_in(one) or "" for one in schema.get("anyOf", ()) if "$ref" in one), "")
