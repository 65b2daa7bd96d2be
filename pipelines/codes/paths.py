"""Gives each item a unique path: at the last level an item takes the cheapest code that is free under its prefix.

Items that share a prefix choose in item order. If all last codes of a prefix are taken, the item moves to the next
cheapest code one level up, and if that level is full too, one level further up: many items may have the same text. New
items never move existing items.
"""

from collections.abc import Sequence

import numpy as np

from pipelines.codes.quantizer import CodeLevel
from services.errors import StageFailed

_CHUNK = 8_192


def place(levels: Sequence[CodeLevel], embeddings_ND: np.ndarray, taken: np.ndarray) -> np.ndarray:
    """Return a path (N, depth) int32 for each item, disjoint from `taken` (M, depth).

    Raises StageFailed when no path is left.
    """
    used = _Used(levels, taken)
    starts = range(0, len(embeddings_ND), _CHUNK)
    placed = [_place_some(levels, embeddings_ND[start : start + _CHUNK], used) for start in starts]
    return np.concatenate([np.zeros((0, len(levels)), dtype=np.int32), *placed])


def _place_some(levels: Sequence[CodeLevel], embeddings_ND: np.ndarray, used: "_Used") -> np.ndarray:
    codes, residuals_ND = np.zeros((len(embeddings_ND), len(levels)), dtype=np.int32), embeddings_ND
    for number, level in enumerate(levels[:-1]):
        codes[:, number] = level.assign(residuals_ND)
        residuals_ND = level.leave(residuals_ND, codes[:, number])
    costs_NS = levels[-1].costs(residuals_ND)
    for row, path in enumerate(codes):
        if not used.take(path, costs_NS[row]):
            _place_elsewhere(levels, embeddings_ND[row], path, used)
    return codes


def _place_elsewhere(levels: Sequence[CodeLevel], embedding_D: np.ndarray, path: np.ndarray, used: "_Used") -> None:
    """Change few trailing codes: the second-last to the cheapest with room, otherwise also the code before it."""
    residuals_1D = [embedding_D[None]]
    for number, level in enumerate(levels[:-2]):
        residuals_1D.append(level.leave(residuals_1D[-1], path[number : number + 1]))
    for number in reversed(range(len(levels) - 1)):
        if _descend(levels, residuals_1D[number], path, number, used):
            return
    raise StageFailed(
        "tokenize", "all code paths of an item are taken; train a new code book with a larger --code-depth"
    )


def _descend(
    levels: Sequence[CodeLevel], residual_1D: np.ndarray, path: np.ndarray, number: int, used: "_Used"
) -> bool:
    """Set the codes of the path from level `number` on, each the cheapest with room below it.

    Return whether there was any.
    """
    if used.is_full(path[:number]):
        return False
    costs_S = levels[number].costs(residual_1D)[0]
    if number == len(levels) - 1:
        return used.take(path, costs_S)
    for code in np.argsort(costs_S, kind="stable"):
        path[number] = code
        left_1D = levels[number].leave(residual_1D, path[number : number + 1])
        if _descend(levels, left_1D, path, number + 1, used):
            return True
    used.fill(path[:number])
    return False


class _Used:
    """Which last codes are taken below each prefix, and below which prefixes all are."""

    def __init__(self, levels: Sequence[CodeLevel], taken: np.ndarray) -> None:
        self._size = len(levels[-1].prices_S)
        self._by_prefix: dict[bytes, np.ndarray] = {}
        self._full: set[bytes] = set()
        for path in taken.astype(np.int32):
            self._below(path[:-1])[path[-1]] = True

    def take(self, path: np.ndarray, costs_S: np.ndarray) -> bool:
        """Set the path's last code to the cheapest free one, and take it. Return whether one was free."""
        used_S = self._below(path[:-1])
        best = int(costs_S.argmin())
        if used_S[best]:
            if used_S.all():
                self.fill(path[:-1])
                return False
            best = int(np.where(used_S, np.inf, costs_S).argmin())
        used_S[best] = True
        path[-1] = best
        return True

    def fill(self, prefix: np.ndarray) -> None:
        """Note that all paths below this prefix are taken."""
        self._full.add(prefix.tobytes())

    def is_full(self, prefix: np.ndarray) -> bool:
        return prefix.tobytes() in self._full

    def _below(self, prefix: np.ndarray) -> np.ndarray:
        return self._by_prefix.setdefault(prefix.tobytes(), np.zeros(self._size, dtype=bool))
