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
    schemas = _message_schemas(model.item if isinstance(model, ListOf) else model for model in listed)
    for model in listed:
        if isinstance(model, ListOf):
            schemas[model.name] = {
                "title": model.name,
                "description": model.description,
                "type": "array",
                "items": reference(model.item),
                "minItems": 1,
            }
    return schemas


def query_parameters(kind: type[Message]) -> tuple[Parameter, ...]:
    """Return a message's fields as parameters of a query."""
    message = _message_schemas([kind])[component_of(kind)]
    required = message.get("required", ())
    return tuple(_parameter(name, schema, name in required) for name, schema in message["properties"].items())


def _parameter(name: str, schema: Schema, is_required: bool) -> Parameter:
    forms = [form for form in schema.get("anyOf", [schema]) if form != {"type": "null"}]
    text = {key: value for key, value in forms[0].items() if key not in ("title", "description", "examples")}
    return Parameter(name=name, where="query", schema=text, description=schema["description"], is_required=is_required)


def _message_schemas(messages: Iterable[type[Message]]) -> Schema:
    forms: dict[type[Any], None] = dict.fromkeys(messages)
    components: Schema = {}
    while True:  # a custom type names further messages
        named: dict[type[Any], None] = {}

        def describe(kind: type[Any], named: dict[type[Any], None] = named) -> Schema:
            if not issubclass(kind, Custom):
                raise NotImplementedError(kind)
            named.update(dict.fromkeys(form for form in kind.forms() if form is not dict))
            forms = [{"type": "object"} if form is dict else reference(form) for form in kind.forms()]
            return forms[0] if len(forms) == 1 else {"anyOf": forms}

        _, components = msgspec.json.schema_components(tuple(forms), schema_hook=describe, ref_template=_REF + "{name}")
        if not named.keys() - forms.keys():
            break
        forms |= named
    classes = {message.__name__: message for message in _subclasses(Message)}
    names = {name: component_of(classes[name]) for name in components if name in classes}
    return {names[name]: _suited(classes[name], schema, names) for name, schema in components.items() if name in names}


def _subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


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
    forms = [form for form in schema.get("anyOf", ()) if form != {"type": "null"}]
    if "$ref" in schema or (len(forms) == 1 and "$ref" in forms[0]):
        return schema
    return {**schema, "title": name.replace("_", " ").title()}


def _inline(schema: Any, names: Mapping[str, str]) -> Any:
    """Return a schema with component names, without enums: an answer may gain values."""
    if isinstance(schema, list):
        return [_inline(part, names) for part in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {
        name: value if name in ("examples", "default") else _inline(value, names) for name, value in schema.items()
    }
    if forms := schema.pop("x-forms", None):
        schema["anyOf"] = forms
    if schema.pop("x-not-null", False):
        schema.pop("default", None)
        forms = [form for form in schema.pop("anyOf") if form != {"type": "null"}]
        schema = {**forms[0], **schema} if len(forms) == 1 else {"anyOf": forms, **schema}
    if (name := _name_in(schema)) is not None:
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        is_message = name in names or name in names.values()
        return {"$ref": _REF + names.get(name, name), **rest} if is_message else {"type": "string", **rest}
    if "enum" in schema and "type" not in schema and all(isinstance(value, str) for value in schema["enum"]):
        schema = {"type": "string", **schema}
    if schema.get("type") == "object" and not schema.keys() & {"properties", "additionalProperties"}:
        schema["additionalProperties"] = True
    if isinstance(schema.get("default", 0), list | tuple | dict | None):
        del schema["default"]
    return schema


def _name_in(schema: Schema) -> str | None:
    match = re.fullmatch(f"{_REF}(.*)", str(schema.get("$ref", "")))
    return match[1] if match and match[1][0].isupper() else None


def _enum_name(schema: Schema) -> str:
    return _name_in(schema) or next((_name_in(form) or "" for form in schema.get("anyOf", ()) if "$ref" in form), "")
