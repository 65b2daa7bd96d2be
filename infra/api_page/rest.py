"""The REST half of the page: an OpenAPI document as Markdown. Pure; depends on no particular route."""

import json
from collections.abc import Iterator
from typing import Any

from infra.api_page.tables import table

_JSON = "application/json"


def routes(spec: dict[str, Any]) -> str:
    """Describe each route: what it does, its headers, its body with an example that can be pasted, its answers."""
    parts = []
    for path, methods in spec["paths"].items():
        for method, route in methods.items():
            parts.append("\n\n".join(_route(spec, method.upper(), path, route)))
    return "\n\n".join(parts)


def _route(spec: dict[str, Any], method: str, path: str, route: dict[str, Any]) -> Iterator[str]:
    yield f"### {method} {path}"
    yield route.get("description") or route["summary"]
    headers = [one for one in route.get("parameters", []) if one["in"] == "header"]
    if headers:
        rows = [(f"`{one['name']}`", type_of(one["schema"]), one.get("description", "")) for one in headers]
        yield table(("header", "type", "meaning"), rows)
    body = route.get("requestBody", {}).get("content", {}).get(_JSON)
    if body:
        yield "Body: " + " or ".join(f"`{name}`" for name in _names(body["schema"])) + "."
        for name in _reachable(spec, _names(body["schema"])):
            yield _model(spec, name)
        for example in body.get("examples", {}).values():
            yield _curl(method, path, example["value"])
    answers = [_answer(spec, status, answer) for status, answer in route["responses"].items()]
    refusals = [status for status, answer in zip(route["responses"], answers, strict=True) if not answer]
    text = "Answers: " + ", ".join(answer for answer in answers if answer)
    yield f"{text}; [errors](#errors): {', '.join(refusals)}." if refusals else f"{text}."
    answered = _names(route["responses"].get("200", {}).get("content", {}).get(_JSON, {}).get("schema", {}))
    for name in _reachable(spec, answered):
        yield _model(spec, name)


def _answer(spec: dict[str, Any], status: str, answer: dict[str, Any]) -> str | None:
    """Return the status with its content, or None for an error, which the page describes once for all."""
    names = _names(answer.get("content", {}).get(_JSON, {}).get("schema", {}))
    if any("error" in spec["components"]["schemas"][name].get("properties", {}) for name in names):
        return None
    contents = [f"`{name}`" for name in names]
    contents += [media_type for media_type in answer.get("content", {}) if media_type != _JSON]
    description = "" if status == "200" else f" ({answer['description'][0].lower()}{answer['description'][1:]})"
    return f"{status} with {' or '.join(contents) or 'an empty body'}{description}"


def _curl(method: str, path: str, value: Any) -> str:
    how = "" if method == "POST" else f"-X {method} "
    line = f"curl -s {how}localhost:8000{path} -H 'content-type: application/json' -d '{json.dumps(value)}'"
    return f"```sh\n{line}\n```"


def _model(spec: dict[str, Any], name: str) -> str:
    """Describe a model; defaults are shown where there are any."""
    model = spec["components"]["schemas"][name]
    if "properties" not in model:
        return f"`{name}`: {model.get('description', '')} A {type_of(model)}."
    required = set(model.get("required", []))
    has_defaults = required != set(model["properties"])
    rows = []
    for field, schema in model["properties"].items():
        given = "required" if field in required else f"`{json.dumps(schema.get('default'))}`"
        about = [given] if has_defaults else []
        rows.append([f"`{field}`", type_of(schema), *about, schema.get("description", "")])
    head = ["field", "type", *(["default"] if has_defaults else []), "meaning"]
    return f"`{name}`: {model.get('description', '')}\n\n" + table(head, rows)


def _reachable(spec: dict[str, Any], names: list[str]) -> list[str]:
    """List these models and those that their fields are made of, each once."""
    found: dict[str, None] = {}
    for name in names:
        model = spec["components"]["schemas"][name]
        fields = model["properties"].values() if "properties" in model else [model]
        found.update(dict.fromkeys([name, *_reachable(spec, [inner for one in fields for inner in _names(one)])]))
    return list(found)


def type_of(schema: dict[str, Any]) -> str:
    """Return the name of a JSON type, as prose has it."""
    if "$ref" in schema:
        return f"`{schema['$ref'].rpartition('/')[2]}`"
    if "enum" in schema:
        return " or ".join(f"`{json.dumps(one)}`" for one in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(type_of(one) for one in schema["anyOf"])
    if schema.get("type") == "array":
        return f"list of {type_of(schema['items'])}"
    if schema.get("type") == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"map to {type_of(schema['additionalProperties'])}"
    return str(schema.get("type", "any"))


def _names(schema: dict[str, Any]) -> list[str]:
    """List the models that a schema refers to, in order."""
    if "$ref" in schema:
        return [schema["$ref"].rpartition("/")[2]]
    inner = [*schema.get("anyOf", []), *([schema["items"]] if "items" in schema else [])]
    return [name for one in inner for name in _names(one)]
