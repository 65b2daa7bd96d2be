"""The rules that reorder a ranking before it is shown: configured per surface, overridable per request.

    {"boosts": [{"where": {"key": "brand", "eq": "Acme"}, "factor": 1.5}], "pins": [{"item_id": "50", "position": 1}],
     "blocks": [{"key": "price", "range": {"gt": 100}}], "caps": [{"attribute": "categories", "most": 2}],
     "diversity": 0.3, "decay": 0.8, "freshness": {"half_life_h": 72, "factor": 2}}

Each rule is implemented in `services/gateway/rules`, one file per rule.
"""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from services.contracts.access import MAX_K
from services.contracts.filters import Clause, check_size
from services.contracts.message import Id, InvalidField, Kept, Message

MAX_BOOSTS, MAX_PINS, MAX_BLOCKS, MAX_CAPS = 20, 20, 20, 5
MAX_PLACES = MAX_K
"""Maximum number of items in a list."""
MAX_FACTOR = 100.0
MIN_FACTOR = 0.01

Place = Annotated[int, Meta(ge=1, le=MAX_PLACES)]


class Boost(Message, frozen=True):
    """Multiplies the likelihood of items that match `where` by `factor`."""

    where: Clause
    factor: Annotated[float, Meta(ge=MIN_FACTOR, le=MAX_FACTOR)]

    def __post_init__(self) -> None:
        """Check the size of the clause. Raises InvalidField."""
        super().__post_init__()
        check_size(self.where, "where")


class Pin(Message, frozen=True):
    """An item and its position in the list."""

    item_id: Id
    position: Annotated[Place, Meta(description="From 1")]


class Cap(Message, frozen=True):
    """At most `most` items of each value of an attribute."""

    attribute: Annotated[Id, Meta(examples=["categories"])]
    most: Place


class Freshness(Message, frozen=True):
    """Multiplies a just published item's likelihood by `factor`; the excess over 1 halves every `half_life_h` hours."""

    half_life_h: Annotated[float, Meta(ge=0.01, le=100_000)]
    factor: Annotated[float, Meta(ge=1, le=MAX_FACTOR)]


class SentRules(Kept):
    """Rules in a body."""

    __slots__ = ()

    @classmethod
    def message(cls) -> type[Message]:
        return Rules


class Rules(Message, SentRules, frozen=True, kw_only=True):
    """The rules of one request, which override the surface's rules; blocks are combined. Null: not set."""

    boosts: Annotated[tuple[Boost, ...], Meta(max_length=MAX_BOOSTS)] | None = None
    pins: Annotated[tuple[Pin, ...], Meta(max_length=MAX_PINS)] | None = None
    blocks: Annotated[
        Annotated[tuple[Clause, ...], Meta(max_length=MAX_BLOCKS)] | None,
        Meta(description="Items that match any of these are excluded"),
    ] = None
    caps: Annotated[tuple[Cap, ...], Meta(max_length=MAX_CAPS)] | None = None
    diversity: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None,
        Meta(description="Weight of dissimilarity in maximal marginal relevance"),
    ] = None
    decay: Annotated[
        Annotated[float, Meta(ge=MIN_FACTOR, le=1)] | None,
        Meta(description="Multiplies the likelihood of an item for each impression without a click"),
    ] = None
    freshness: Freshness | None = None

    def __post_init__(self) -> None:
        """Check sizes of clauses, and that pins differ. Raises InvalidField."""
        super().__post_init__()
        for index, clause in enumerate(self.blocks or ()):
            check_size(clause, f"blocks[{index}]")
        if self.pins:
            for name in ("item_id", "position"):
                _refuse_repeated(name, [getattr(pin, name) for pin in self.pins])

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
        return msgspec.structs.replace(self, **given)


NAMES = Rules.__struct_fields__
NO_RULES = Rules()


def _refuse_repeated(name: str, values: Sequence[Any]) -> None:
    for index, value in enumerate(values):
        if value in values[:index]:
            problem = f"{value} is pinned twice"
            raise InvalidField(f"pins[{index}].{name}", problem, "pin each item once, each to its own position")
