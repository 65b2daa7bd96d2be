"""A path of its own for each item: at the last level an item takes the cheapest code that no other item with the same prefix has.

Items that share a prefix choose in their order. Where all last codes of a prefix are taken, the item goes to the next cheapest code of the level
before. Paths that are taken stay taken, so new items never move old ones.
"""

from collections.abc import Sequence

import numpy as np

from pipelines.codes.quantizer import CodeLevel
from services.errors import StageFailed

_CHUNK = 8_192


def place(levels: Sequence[CodeLevel], embeddings_ND: np.ndarray, taken: np.ndarray) -> np.ndarray:
    """Return the path (N, depth) int32 of each item, none of them among `taken` (M, depth). Raises StageFailed when no path is left."""
    used = _Used(levels, taken)
    starts = range(0, len(embeddings_ND), _CHUNK)
    placed = [_place_some(levels, embeddings_ND[start : start + _CHUNK], used) for start in starts]
    return np.concatenate([np.zeros((0, len(levels)), dtype=np.int32), *placed])


def _place_some(levels: Sequence[CodeLevel], residuals_ND: np.ndarray, used: "_Used") -> np.ndarray:
    codes = np.zeros((len(residuals_ND), len(levels)), dtype=np.int32)
    before_ND = residuals_ND
    for number, level in enumerate(levels[:-1]):
        codes[:, number] = level.assign(residuals_ND)
        before_ND = residuals_ND
        residuals_ND = level.leave(residuals_ND, codes[:, number])
    costs_NS = levels[-1].costs(residuals_ND)
    for row, path in enumerate(codes):
        free = used.take(path[:-1], costs_NS[row])
        if free is None:
            free = _elsewhere(levels, before_ND[row], path, used)
        path[-1] = free
    return codes


def _elsewhere(levels: Sequence[CodeLevel], before_D: np.ndarray, path: np.ndarray, used: "_Used") -> int:
    """Change the last but one code of the path to the cheapest with room, and return the last code."""
    if len(levels) > 1:
        for code in np.argsort(levels[-2].costs(before_D[None])[0], kind="stable"):
            path[-2] = code
            costs_S = levels[-1].costs(levels[-2].leave(before_D[None], path[-2:-1]))[0]
            free = used.take(path[:-1], costs_S)
            if free is not None:
                return free
    raise StageFailed("tokenize", "no code path is left for an item: make a new code book, deeper by --code-depth")


class _Used:
    """Which last codes are taken below each prefix."""

    def __init__(self, levels: Sequence[CodeLevel], taken: np.ndarray) -> None:
        self._size = len(levels[-1].prices_S)
        self._by_prefix: dict[bytes, np.ndarray] = {}
        for path in taken.astype(np.int32):
            self._below(path[:-1])[path[-1]] = True

    def take(self, prefix: np.ndarray, costs_S: np.ndarray) -> int | None:
        """Take the cheapest free code below a prefix; None where there is none."""
        used_S = self._below(prefix)
        best = int(costs_S.argmin())
        if used_S[best]:
            if used_S.all():
                return None
            best = int(np.where(used_S, np.inf, costs_S).argmin())
        used_S[best] = True
        return best

    def _below(self, prefix: np.ndarray) -> np.ndarray:
        return self._by_prefix.setdefault(prefix.tobytes(), np.zeros(self._size, dtype=bool))
