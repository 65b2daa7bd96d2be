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
from typing import Annotated

import msgspec
from msgspec import Meta

from services.contracts.message import InvalidField, Message
from services.contracts.toml_file import parse_toml, read_toml


class Role(StrEnum):
    """The role of an event."""

    POSITIVE = "positive"
    WEAK = "weak"
    NEGATIVE = "negative"
    IGNORED = "ignored"


MAX_WEIGHT = 10.0
HISTORY_ROLES = (Role.POSITIVE, Role.WEAK)
"""The roles of events in histories."""


class TypeRule(Message, frozen=True, kw_only=True):
    """The rule of one event type. Events with a value below `min_value` have the role `below` instead.

    `weight` is the weight of an event in `role` in training, popularity and similar items, relative to other types;
    training uses only the ratios. None: 1, except that a weak event is then not a label. A negative event only counts
    against its item in training.
    """

    role: Role = Role.POSITIVE
    weight: Annotated[float, Meta(ge=0, le=MAX_WEIGHT)] | None = None
    min_value: float | None = None
    below: Role = Role.WEAK

    def __post_init__(self) -> None:
        """Check that the fields fit together. Raises InvalidField."""
        super().__post_init__()
        if self.role is Role.IGNORED and self.weight is not None:
            raise InvalidField("weight", "set for an ignored type", "omit it")
        if self.below is not Role.WEAK and self.min_value is None:
            raise InvalidField("below", "has no meaning without min_value", "send min_value too, or omit it")

    def role_of(self, value: float) -> Role:
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


_OTHER_RULE = TypeRule()
_DEFAULT_RULES = {
    "dislike": TypeRule(role=Role.NEGATIVE),
    "hide": TypeRule(role=Role.NEGATIVE),
    "impression": TypeRule(role=Role.IGNORED),
}


@dataclass(frozen=True, slots=True)
class EventRoles:
    """The rules by event type; other types use the rule `other`."""

    rules: Mapping[str, TypeRule] = field(default_factory=_DEFAULT_RULES.copy)
    other: TypeRule = _OTHER_RULE

    def rule(self, event_type: str) -> TypeRule:
        return self.rules.get(event_type, self.other)

    def role(self, event_type: str, value: float) -> Role:
        return self.rule(event_type).role_of(value)


DEFAULT_ROLES = EventRoles()


class _File(Message, frozen=True):
    other: TypeRule = TypeRule()
    types: dict[str, TypeRule] = msgspec.field(default_factory=dict)


def read_event_roles(path: Path | None) -> EventRoles:
    """Read the rules from a TOML file; the defaults without a file. Raises ConfigError naming the entry."""
    return DEFAULT_ROLES if path is None else _roles(read_toml(_File, path, "TAILRACE_EVENTS_FILE"))


def parse_event_roles(text: str) -> EventRoles:
    """Return this text's rules on top of the defaults. Raises ConfigError naming the entry."""
    return _roles(parse_toml(_File, text, "events.toml"))


def _roles(file: _File) -> EventRoles:
    return EventRoles(_DEFAULT_RULES | file.types, file.other)
