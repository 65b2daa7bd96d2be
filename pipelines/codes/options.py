"""How deep the codes are: as given, or by the number of items and the memory that a token an item takes in training.

Pure.
"""

import math
from dataclasses import dataclass

from services.errors import ConfigError

MAX_DEPTH = 4
DEEP_FROM_ITEMS = 100_000
"""Minimum catalogue size for deep codes by default: the table of a token per item would exceed the decoder."""
_DEEP = 3
_COPIES = 5
"""Of the table in training, in float32: weights, gradients, AdamW's two moments, and the average."""
_MOST_MEMORY = 0.5
"""Share of the free memory that the table may take in training."""
_SPARE = 4
"""At least this many paths an item: room for new items, and for items whose own path is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodesOptions:
    """`depth` None: by the number of items.

    `codes_per_level` is the most codes of one level, unless the items need more.
    """

    depth: int | None = None
    codes_per_level: int = 256
    embedding_size: int = 64
    seed: int = 0
    deep_from_items: int = DEEP_FROM_ITEMS
    is_compared: bool = False
    """Whether `depth` is one of those between which validation decides."""

    def __post_init__(self) -> None:
        """Refuse what cannot be coded. Raises ConfigError naming the option."""
        if self.depth is not None and not 1 <= self.depth <= MAX_DEPTH:
            raise ConfigError(f"--code-depth: {self.depth} is out of range; give 1 to {MAX_DEPTH}")

    def depth_for(self, num_items: int) -> int:
        """Return the depth of the codes of this many items."""
        if self.depth is not None:
            return self.depth
        return _DEEP if num_items >= self.deep_from_items else 1

    def depths_to_compare(self, num_items: int, hidden_size: int, free_bytes: int) -> tuple[int, ...]:
        """Return the depths that validation compares; one if the catalogue is too small or too large for a choice."""
        if self.depth is not None or num_items < self.deep_from_items:
            return (self.depth_for(num_items),)
        table_bytes = 4 * _COPIES * num_items * hidden_size
        return (1, _DEEP) if table_bytes <= _MOST_MEMORY * free_bytes else (_DEEP,)

    def reason_for(self, num_items: int) -> str:
        """Return in words why the codes have that depth."""
        if self.depth is not None:
            return "by validation" if self.is_compared else "as given"
        side = "from" if num_items >= self.deep_from_items else "below"
        return f"{num_items} items are {side} {self.deep_from_items}"

    def level_size(self, num_items: int, depth: int) -> int:
        """Return the number of codes of each level: few items have fewer codes, and there are several paths an item."""
        fits = math.ceil(float(_SPARE * num_items) ** (1 / depth))
        return max(2, int(fits), min(self.codes_per_level, num_items // 4))
