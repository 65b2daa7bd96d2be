"""What the runner needs to know of a request beyond its tokens: how its next items or tokens are chosen."""

from dataclasses import dataclass

from torch import Tensor

from services.llm.engine.text import Sampling


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankWork:
    """How to choose items. `alive_by_level[l]` (nodes or items after level l,) bool says which lead to an allowed item.

    `width_by_level[l]` is how many of them level l keeps at most; at the last level, how many items are returned.
    """

    alive_by_level: tuple[Tensor, ...]
    width_by_level: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextWork:
    """How to choose the next token, and which tokens are the last one."""

    sampling: Sampling
    stop_token_ids: frozenset[int]
