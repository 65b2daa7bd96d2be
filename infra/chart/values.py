"""The chart's values as listed by infra/chart/values.yaml: positions in the rendered manifests, defaults, schema."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from models.registry.storage.objects import SCHEMES
from services.settings.settings import Settings

Thing = dict[str, Any]
_FILE = Path(__file__).with_name("values.yaml")
_NAME = "[a-z0-9]([-a-z0-9.]*[a-z0-9])?"
_QUANTITY = {"type": ["string", "integer"], "pattern": r"^[0-9]+(\.[0-9]+)?(m|k|M|G|Ki|Mi|Gi|Ti)?$"}
_QUANTITIES = {"type": "object", "additionalProperties": _QUANTITY}
_TEXT = {"type": "string"}
_PORT = {"type": "integer", "minimum": 1, "maximum": 65535}

_TYPES: Mapping[str, Thing] = {
    "flag": {"type": "boolean"},
    "count": {"type": "integer", "minimum": 1},
    "port": _PORT,
    "ports": {"type": "array", "minItems": 1, "items": _PORT},
    "ports-or-none": {"type": "array", "items": _PORT},
    "cidrs": {"type": "array", "items": {"type": "string", "pattern": r"^[0-9a-fA-F.:]+/[0-9]{1,3}$"}},
    "words": {"type": "array", "items": {"type": "string", "minLength": 1}},
    "access-mode": {"enum": ["ReadWriteMany", "ReadWriteOnce", "ReadWriteOncePod"]},
    "text": {"type": "string", "minLength": 1},
    "text-or-none": _TEXT,
    "texts": {"type": "object", "additionalProperties": _TEXT},
    "objects": {"type": "array", "items": {"type": "object"}},
    "name": {"type": "string", "maxLength": 253, "pattern": f"^{_NAME}$"},
    "name-or-none": {"type": "string", "maxLength": 253, "pattern": f"^({_NAME})?$"},
    "names": {"type": "array", "items": {"type": "string", "pattern": f"^{_NAME}$"}},
    "digest": {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
    "pull-policy": {"enum": ["Always", "IfNotPresent", "Never"]},
    "service-type": {"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
    "host": {"type": "string", "pattern": "^([^:/, ]+|[0-9a-fA-F]*(:[0-9a-fA-F.]*){2,})$"},
    "brokers": {"type": "string", "pattern": "^[^, ]+:[0-9]+( *, *[^, ]+:[0-9]+)*$"},
    "collector": {"type": "string", "pattern": "^(https?://[^/ ]+:[0-9]+/?)?$"},
    "store": {"type": "string", "pattern": f"^(({'|'.join(SCHEMES)})://.+)?$"},
    "redis-address": {"type": "string", "pattern": "^rediss?://[^/ ]+:[0-9]+$"},
    "schedule": {"type": "string", "pattern": r"^\S+( \S+){4}$"},
    "bytes": {"type": "string", "pattern": "^[1-9][0-9]*(Mi|Gi|Ti|Pi)$"},
    "resources": {
        "type": "object",
        "additionalProperties": False,
        "properties": {"requests": _QUANTITIES, "limits": _QUANTITIES},
    },
}


@dataclass(frozen=True, slots=True)
class ValuePath:
    """The position of a value.

    Attributes:
        pattern: `fnmatch` pattern over paths such as `CronJob/tailrace-train/spec/schedule`.
        holds: Required content; None: anything.
        part: A regular expression whose second group is the value within a longer text; None: the whole text.
    """

    pattern: str
    holds: str | None = None
    part: str | None = None

    def is_at(self, path: str, content: Any) -> bool:
        return fnmatchcase(path, self.pattern) and self.holds in (None, content)

    def read(self, content: Any) -> Any:
        """Return the value there; None if the longer text lacks it."""
        if self.part is None:
            return content
        match = re.search(self.part, content)
        return None if match is None else match[2]


@dataclass(frozen=True, slots=True)
class Value:
    """One value; `default` applies to a value without places."""

    name: str
    about: str
    type: str
    places: tuple[ValuePath, ...]
    default: Any

    def default_in(self, things: list[Thing]) -> Any:
        """Return the objects' content at its places. Raises LookupError if it is missing or differs."""
        if not self.places:
            return self.default
        defaults = [
            value_path.read(content)
            for thing in things
            for path, content in walk(path_of(thing), thing)
            for value_path in self.places
            if value_path.is_at(path, content)
        ]
        if not defaults or any(str(default) != str(defaults[0]) for default in defaults):
            raise LookupError(f"{self.name}: its fields hold {defaults}; correct infra/chart/values.yaml")
        return int(defaults[0]) if self.type in {"count", "port"} else defaults[0]


def load_values() -> tuple[Value, ...]:
    return tuple(_values_in("", yaml.safe_load(_FILE.read_text())))


def path_of(thing: Thing) -> str:
    return f"{thing['kind']}/{thing['metadata']['name']}"


def walk(path: str, content: Any) -> Iterator[tuple[str, Any]]:
    """Yield the content at a path and everything below it."""
    yield path, content
    if isinstance(content, dict | list):
        for key, inner in content.items() if isinstance(content, dict) else enumerate(content):
            yield from walk(f"{path}/{key}", inner)


def nested(flat: Mapping[str, Any]) -> Thing:
    """Return dotted names as nested objects."""
    tree: Thing = {}
    for name, content in flat.items():
        *groups, last = name.split(".")
        inside = tree
        for group in groups:
            inside = inside.setdefault(group, {})
        inside[last] = content
    return tree


def schema_of(values: Iterable[Value], decided: Iterable[str]) -> Thing:
    """Return the JSON schema of values.yaml; `decided` are the settings that other values, or the chart, determine."""
    free = sorted({f"TAILRACE_{name.upper()}" for name in Settings.model_fields} - set(decided))
    fields = Settings.model_json_schema()["properties"]
    properties = {name: _setting(fields[name.removeprefix("TAILRACE_").lower()]) for name in free}
    settings = {"type": "object", "additionalProperties": False, "properties": properties}
    types = {**_TYPES, "settings": settings}
    leaves = {value.name: {"description": value.about, **types[value.type]} for value in values}
    about = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Values of the chart tailrace"}
    return {**about, **_group(nested(leaves))}


def _setting(field: Thing) -> Thing:
    """Return the schema of a setting, whose value may also be given as text."""
    first = field.get("anyOf", [field])[0]
    if "enum" in first:
        return {"enum": first["enum"]}
    bounds = {key: first[key] for key in first if key in {"minimum", "maximum", "exclusiveMinimum"}}
    match first["type"]:
        case "integer":
            return {"type": ["integer", "string"], "pattern": "^-?[0-9]+$", **bounds}
        case "number":
            return {"type": ["number", "string"], "pattern": r"^-?[0-9.]+(e[+-]?[0-9]+)?$", **bounds}
        case "boolean":
            return {"type": ["boolean", "string"], "pattern": "^(true|false|1|0)$"}
    return {"type": ["string", "number", "boolean"]}


def _group(tree: Thing) -> Thing:
    properties = {
        name: entry if isinstance(entry.get("description"), str) else _group(entry) for name, entry in tree.items()
    }
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _values_in(prefix: str, group: Thing) -> Iterator[Value]:
    for key, entry in group.items():
        if "about" not in entry:
            yield from _values_in(f"{prefix}{key}.", entry)
            continue
        yield Value(f"{prefix}{key}", entry["about"], entry["type"], tuple(_places(entry)), entry.get("default"))


def _places(row: Thing) -> Iterator[ValuePath]:
    yield from (ValuePath(pattern) for pattern in row.get("at", ()))
    if "setting" in row:
        yield ValuePath(f"ConfigMap/tailrace-settings-*/data/TAILRACE_{row['setting']}")
    if "serve" in row:
        deployment, option = row["serve"]
        part = rf"(- name: {deployment}\n(?:(?! *-).*\n)*? +{option}: )(\d+)"
        yield ValuePath("RayService/tailrace/spec/serveConfigV2", part=part)
    if "secret" in row:
        for end in ("secret/name", "secret/secretName", "secretKeyRef/name", "secretRef/name"):
            yield ValuePath(f"*/{end}", holds=row["secret"])
