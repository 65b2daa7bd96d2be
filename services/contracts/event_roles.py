"""The meaning of an event: its role and weight by type and value. Stream worker, replay and pipelines share it.

    positive   joins the history and is a training label
    weak       joins the history; a label only if it has a weight
    negative   excludes the item from answers, not in the history; training makes the item less likely after this
    history;
               a later positive event revokes it
    ignored    changes nothing

Decisions are pure; only `read_event_roles` reads a file.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from services.contracts.toml_file import entries_of, read_toml_text, refuse_unknown, table_at
from services.errors import ConfigError

_EXAMPLE = "[types.view] with role = 'weak'"


class Role(StrEnum):
    """The role of an event."""

    POSITIVE = "positive"
    WEAK = "weak"
    NEGATIVE = "negative"
    IGNORED = "ignored"


MAX_WEIGHT = 10.0
HISTORY_ROLES = (Role.POSITIVE, Role.WEAK)
"""The roles of events in histories."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeRule:
    """The rule of one event type. Events with a value below `min_value` have the role `below` instead.

    `weight` is the weight of an event in `role` in training, popularity and similar items, relative to other types;
    training uses only the ratios. None: 1, except that a weak event is then not a label. A negative event only counts
    against its item in training.
    """

    role: Role = Role.POSITIVE
    weight: float | None = None
    min_value: float | None = None
    below: Role = Role.WEAK

    def role_of(self, value: float) -> Role:
        """Return the role of an event with this value."""
        return self.role if self.min_value is None or value >= self.min_value else self.below

    def weight_of(self, role: Role) -> float:
        """Return an event's weight in the loss, for a negative event against its item; 0 excludes it from training."""
        if self.weight is not None and role is self.role:
            return self.weight
        return float(role in (Role.POSITIVE, Role.NEGATIVE))

    def count_of(self, role: Role) -> float:
        """Return an event's weight in popularity and similar items."""
        if role not in HISTORY_ROLES:
            return 0.0
        return self.weight if self.weight is not None and role is self.role else 1.0


_DEFAULT_RULES = {
    "dislike": TypeRule(role=Role.NEGATIVE),
    "hide": TypeRule(role=Role.NEGATIVE),
    "impression": TypeRule(role=Role.IGNORED),
}


@dataclass(frozen=True, slots=True)
class EventRoles:
    """The rules by event type; other types use the rule `other`."""

    rules: Mapping[str, TypeRule] = field(default_factory=_DEFAULT_RULES.copy)
    other: TypeRule = TypeRule()

    def rule(self, event_type: str) -> TypeRule:
        """Return the rule of a type."""
        return self.rules.get(event_type, self.other)

    def role(self, event_type: str, value: float) -> Role:
        """Return the role of an event."""
        return self.rule(event_type).role_of(value)


DEFAULT_ROLES = EventRoles()


def read_event_roles(path: Path | None) -> EventRoles:
    """Read the rules from a TOML file; the defaults without a file.

    Raises ConfigError naming the entry and the allowed values.
    """
    if path is None:
        return DEFAULT_ROLES
    return parse_event_roles(read_toml_text(path, "events"), path.name)


def parse_event_roles(text: str, name: str = "events.toml") -> EventRoles:
    """Return this text's rules on top of the defaults. Raises ConfigError naming the entry and the allowed values."""
    entries = entries_of(text, name, ("other", "types"))
    types = table_at(f"{name}: types", entries.get("types", {}), _EXAMPLE)
    rules = {key: _rule(f"{name}: types.{key}", value) for key, value in types.items()}
    return EventRoles(_DEFAULT_RULES | rules, _rule(f"{name}: other", entries.get("other", {})))


def _rule(where: str, entry: Any) -> TypeRule:
    fields = table_at(where, entry, _EXAMPLE)
    refuse_unknown(where, fields, ("role", "weight", "min_value", "below"))
    weight, min_value = _number(where, fields, "weight"), _number(where, fields, "min_value")
    role = _role(f"{where}.role", fields.get("role", Role.POSITIVE))
    if weight is not None and (role is Role.IGNORED or not 0 <= weight <= MAX_WEIGHT):
        raise ConfigError(
            f"{where}.weight: {weight} for the role {role}; give 0 to {MAX_WEIGHT:g}, and to no ignored type"
        )
    if "below" in fields and min_value is None:
        raise ConfigError(f"{where}.below: has no meaning without min_value; give min_value too, or leave it out")
    below = _role(f"{where}.below", fields.get("below", Role.WEAK))
    return TypeRule(role=role, weight=weight, min_value=min_value, below=below)


def _role(where: str, value: Any) -> Role:
    if value not in list(Role):
        raise ConfigError(f"{where}: {value!r} is no role; give one of {', '.join(Role)}")
    return Role(value)


def _number(where: str, fields: Mapping[str, Any], key: str) -> float | None:
    value = fields.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise ConfigError(f"{where}.{key}: {value!r} is no number; give for example 0.5")
    return float(value)
