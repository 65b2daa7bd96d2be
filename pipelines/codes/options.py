"""How deep the codes are: chosen by the number of items, unless it is given. Pure."""

import math
from dataclasses import dataclass

from services.errors import ConfigError

MAX_DEPTH = 4
DEEP_FROM_ITEMS = 100_000
"""From this many items on codes are deep by default: a token an item makes the decoder's table larger than the decoder, and each step scores all of it."""
_DEEP = 3
_SPARE = 4
"""At least this many paths an item: room for new items, and for items whose own path is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodesOptions:
    """`depth` None: by the number of items. `codes_per_level` is the most codes of one level, unless the items need more."""

    depth: int | None = None
    codes_per_level: int = 256
    embedding_size: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be coded. Raises ConfigError naming the option."""
        if self.depth is not None and not 1 <= self.depth <= MAX_DEPTH:
            raise ConfigError(f"--code-depth: {self.depth} is out of range; give 1 to {MAX_DEPTH}")

    def depth_for(self, num_items: int) -> int:
        """Return the depth of the codes of this many items."""
        if self.depth is not None:
            return self.depth
        return _DEEP if num_items >= DEEP_FROM_ITEMS else 1

    def reason_for(self, num_items: int) -> str:
        """Return in words why the codes have that depth."""
        if self.depth is not None:
            return "as given"
        side = "from" if num_items >= DEEP_FROM_ITEMS else "below"
        return f"{num_items} items are {side} {DEEP_FROM_ITEMS}"

    def level_size(self, num_items: int, depth: int) -> int:
        """Return the number of codes of each level: few items have fewer codes, and there are several paths an item."""
        fits = math.ceil(float(_SPARE * num_items) ** (1 / depth))
        return max(2, int(fits), min(self.codes_per_level, num_items // 4))
