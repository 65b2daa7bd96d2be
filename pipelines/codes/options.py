"""The depth of the codes: given, or chosen by the number of items and by the memory that training needs.

Pure.
"""

import math
from dataclasses import dataclass
from typing import Annotated

from pipelines.declaration import Option, check_bounds

DEEP_FROM_ITEMS = 100_000
"""Minimum catalogue size for deep codes by default: the table of a token per item would exceed the decoder."""
_DEEP = 3
_COPIES = 5
"""Copies of the table in training, in float32: weights, gradients, AdamW's two moments, and the average."""
_MOST_MEMORY = 0.5
"""Largest fraction of the free memory for the table in training."""
_SPARE = 4
"""Smallest number of paths per item: room for new items, and for items whose own path is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodesOptions:
    """The codes of items.

    `codes_per_level` bounds the codes of one level, unless the catalogue needs more.
    """

    depth: Annotated[
        int | None,
        Option(
            "Tokens per item, 1 to 4.",
            names=("--code-depth",),
            at_least=1,
            at_most=4,
            shown="1; from 100,000 items on 1 or 3, by validation",
        ),
    ] = None
    codes_per_level: int = 256
    embedding_size: int = 64
    seed: int = 0
    deep_from_items: int = DEEP_FROM_ITEMS
    is_compared: bool = False
    """Whether validation chose `depth` among several depths."""

    def __post_init__(self) -> None:
        """Validate the depth. Raises ConfigError naming the option."""
        check_bounds(self)

    def depth_for(self, num_items: int) -> int:
        """Return the depth of the codes of this many items."""
        if self.depth is not None:
            return self.depth
        return _DEEP if num_items >= self.deep_from_items else 1

    def depths_to_compare(self, num_items: int, hidden_size: int, free_bytes: int) -> tuple[int, ...]:
        """Return the depths that validation compares; a single depth if it is given or the catalogue decides it."""
        if self.depth is not None or num_items < self.deep_from_items:
            return (self.depth_for(num_items),)
        table_bytes = 4 * _COPIES * num_items * hidden_size
        return (1, _DEEP) if table_bytes <= _MOST_MEMORY * free_bytes else (_DEEP,)

    def reason_for(self, num_items: int) -> str:
        """Return the reason for the depth in words."""
        if self.depth is not None:
            return "by validation" if self.is_compared else "as given"
        side = "from" if num_items >= self.deep_from_items else "below"
        return f"{num_items} items are {side} {self.deep_from_items}"

    def level_size(self, num_items: int, depth: int) -> int:
        """Return the number of codes per level, with at least `_SPARE` paths per item."""
        fits = math.ceil(float(_SPARE * num_items) ** (1 / depth))
        return max(2, int(fits), min(self.codes_per_level, num_items // 4))
