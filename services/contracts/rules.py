"""The rules that reorder a ranking before it is shown: configured per surface, overridable per request.

    {"boosts": [{"where": {"key": "brand", "eq": "Acme"}, "factor": 1.5}], "pins": [{"item_id": "50", "position": 1}],
     "blocks": [{"key": "price", "range": {"gt": 100}}], "caps": [{"attribute": "categories", "most": 2}],
     "diversity": 0.3, "decay": 0.8, "freshness": {"half_life_h": 72, "factor": 2}}

Each rule is implemented in `services/gateway/rules`, one file per rule.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from services.contracts.filters import Clause, parse_clause
from services.contracts.plain import read_int, read_list, read_number, read_object, read_text, required
from services.errors import InvalidRequest

MAX_BOOSTS, MAX_PINS, MAX_BLOCKS, MAX_CAPS = 20, 20, 20, 5
MAX_PLACES = 2_000
"""Maximum number of items in a list."""
MAX_FACTOR = 100.0
MIN_FACTOR = 0.01


@dataclass(frozen=True, slots=True)
class Boost:
    """Multiplies the likelihood of items that match `where` by `factor`."""

    where: Clause
    factor: float


@dataclass(frozen=True, slots=True)
class Pin:
    """An item and its position in the list, from 1."""

    item_id: str
    position: int


@dataclass(frozen=True, slots=True)
class Cap:
    """At most `most` items of each value of an attribute."""

    attribute: str
    most: int


@dataclass(frozen=True, slots=True)
class Freshness:
    """Multiplies a just published item's likelihood by `factor`; the excess over 1 halves every `half_life_h` hours."""

    half_life_h: float
    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The rules of one request; None for a rule that is not set.

    `diversity` (0 to 1) is the weight of dissimilarity in maximal marginal relevance. `decay` (0 to 1) multiplies the
    likelihood of an item for each impression without a click.
    """

    boosts: tuple[Boost, ...] | None = None
    pins: tuple[Pin, ...] | None = None
    blocks: tuple[Clause, ...] | None = None
    caps: tuple[Cap, ...] | None = None
    diversity: float | None = None
    decay: float | None = None
    freshness: Freshness | None = None

    @property
    def reorder(self) -> bool:
        """Whether any rule but blocks is set; blocks are part of the filters."""
        return bool(self.boosts or self.pins or self.caps or self.diversity or self.freshness) or self.decay is not None

    def overridden_by(self, other: "Rules") -> "Rules":
        """Return these rules overridden by the rules that `other` sets; blocks are combined."""
        if other is NO_RULES:
            return self
        given = {name: value for name in NAMES if (value := getattr(other, name)) is not None}
        if self.blocks and other.blocks:
            given["blocks"] = self.blocks + other.blocks
        return Rules(**{name: getattr(self, name) for name in NAMES} | given)


NAMES = tuple(one.name for one in fields(Rules))
NO_RULES = Rules()


def parse_rules(plain: Any, path: str) -> Rules:
    """Read rules from plain values. Raises InvalidRequest naming the path."""
    given = read_object(path, plain, NAMES)
    return Rules(**{name: _READERS[name](value, f"{path}.{name}") for name, value in given.items()})


def _boosts(plain: Any, path: str) -> tuple[Boost, ...]:
    boosts = []
    for place, one in enumerate(read_list(path, plain, MAX_BOOSTS)):
        where = f"{path}[{place}]"
        given = read_object(where, one, ("where", "factor"))
        factor = read_number(f"{where}.factor", required(where, given, "factor"), MIN_FACTOR, MAX_FACTOR)
        boosts.append(Boost(parse_clause(required(where, given, "where"), f"{where}.where"), factor))
    return tuple(boosts)


def _pins(plain: Any, path: str) -> tuple[Pin, ...]:
    pins = []
    for place, one in enumerate(read_list(path, plain, MAX_PINS)):
        where = f"{path}[{place}]"
        given = read_object(where, one, ("item_id", "position"))
        position = read_int(f"{where}.position", required(where, given, "position"), 1, MAX_PLACES)
        pins.append(Pin(read_text(f"{where}.item_id", required(where, given, "item_id")), position))
        _refuse_double(where, "item_id", [pin.item_id for pin in pins])
        _refuse_double(where, "position", [pin.position for pin in pins])
    return tuple(pins)


def _refuse_double(where: str, name: str, values: list[Any]) -> None:
    if values[-1] in values[:-1]:
        raise InvalidRequest(
            f"{where}.{name}", f"{values[-1]} is there twice", "pin each item once, each to its own place"
        )


def _blocks(plain: Any, path: str) -> tuple[Clause, ...]:
    listed = read_list(path, plain, MAX_BLOCKS)
    return tuple(parse_clause(one, f"{path}[{place}]") for place, one in enumerate(listed))


def _caps(plain: Any, path: str) -> tuple[Cap, ...]:
    caps = []
    for place, one in enumerate(read_list(path, plain, MAX_CAPS)):
        where = f"{path}[{place}]"
        given = read_object(where, one, ("attribute", "most"))
        attribute = read_text(f"{where}.attribute", required(where, given, "attribute"))
        caps.append(Cap(attribute, read_int(f"{where}.most", required(where, given, "most"), 1, MAX_PLACES)))
    return tuple(caps)


def _freshness(plain: Any, path: str) -> Freshness:
    given = read_object(path, plain, ("half_life_h", "factor"))
    return Freshness(
        read_number(f"{path}.half_life_h", required(path, given, "half_life_h"), 0.01, 100_000),
        read_number(f"{path}.factor", required(path, given, "factor"), 1, MAX_FACTOR),
    )


_READERS: Mapping[str, Any] = {
    "boosts": _boosts,
    "pins": _pins,
    "blocks": _blocks,
    "caps": _caps,
    "diversity": lambda plain, path: read_number(path, plain, 0, 1),
    "decay": lambda plain, path: read_number(path, plain, MIN_FACTOR, 1),
    "freshness": _freshness,
}
