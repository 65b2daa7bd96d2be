"""What the runner needs to know of a request beyond its tokens: how its next items or tokens are chosen."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from services.llm.engine.beam.item_mask import ItemMask
from services.llm.engine.text.parameters import Sampling


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankWork:
    """How to choose items: among those that survive the request's masks.

    `width_by_level[l]` is how many nodes level l keeps at most; at the last level, how many items are returned.
    """

    survivors: ItemMask
    width_by_level: tuple[int, ...]


class TokenMask(Protocol):
    """Which tokens may come next, where a text must keep to a form. Used by the engine's thread alone."""

    def allowed(self) -> np.ndarray:
        """Give (ceil(V / 32),) int32: token t may come where bit t % 32 of word t // 32 is set. Never all zero."""
        ...

    def take(self, token_id: int) -> None:
        """Go on by a token that was allowed. Called once for each chosen token, the last one included."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TextWork:
    """How to choose the next token, and which tokens are the last one. `mask` None: any token."""

    sampling: Sampling
    stop_token_ids: frozenset[int]
    mask: TokenMask | None = None
