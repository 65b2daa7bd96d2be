"""Catalogue constraint for the peers: a logits processor masks the whole vocabulary to the codes that lead to an item.

Shape suffixes: B beams, L codes generated so far, S codes of a level, V vocabulary.
"""

import numpy as np
import torch
from torch import Tensor

from benchmarks.engine.cases import CodeTable
from models.search import Scores


class CodeTrie:
    """The codes that lead to an item, for codes of depth 3."""

    def __init__(self, table: CodeTable) -> None:
        size = table.level_size
        codes = table.codes[np.lexsort(table.codes.T[::-1])]
        self.level_size = size
        self.token_offsets = table.token_offsets
        self._first_S = np.zeros(size, dtype=np.bool_)
        self._first_S[codes[:, 0]] = True
        self._second_SS = np.zeros((size, size), dtype=np.bool_)
        self._second_SS[codes[:, 0], codes[:, 1]] = True
        self._third = codes[:, 2]
        pairs = codes[:, 0] * size + codes[:, 1]
        self._starts = np.searchsorted(pairs, np.arange(size * size + 1))

    def allowed(self, tokens_BL: np.ndarray) -> np.ndarray:
        """Return the allowed next codes (B, S) bool after beams of equal length, clamping tokens to the code range."""
        num_beams, level = tokens_BL.shape
        codes_BL = (tokens_BL - np.array(self.token_offsets[:level], dtype=np.int64)).clip(0, self.level_size - 1)
        if level == 0:
            return np.tile(self._first_S, (num_beams, 1))
        if level == 1:
            second_BS: np.ndarray = self._second_SS[codes_BL[:, 0]]
            return second_BS
        allowed_BS = np.zeros((num_beams, self.level_size), dtype=np.bool_)
        for row, pair in enumerate(codes_BL[:, 0] * self.level_size + codes_BL[:, 1]):
            allowed_BS[row, self._third[self._starts[pair] : self._starts[pair + 1]]] = True
        return allowed_BS

    def codes_of(self, tokens: list[list[int]]) -> list[list[int]]:
        """Convert the tokens of complete beams to codes."""
        codes: list[list[int]] = (np.array(tokens) - np.array(self.token_offsets)).tolist()
        return codes


def mask_scores(trie: CodeTrie, tokens_BL: np.ndarray, scores_BV: Tensor, scores: Scores = "catalogue") -> Tensor:
    """Return log-probabilities over the level's codes that lead to an item; -inf for all other codes.

    With vocabulary scores the given log-probabilities stay as they are.
    """
    first = trie.token_offsets[tokens_BL.shape[1]]
    codes = slice(first, first + trie.level_size)
    allowed_BS = torch.from_numpy(trie.allowed(tokens_BL)).to(scores_BV.device)
    masked_BV = torch.full_like(scores_BV, -torch.inf)
    of_codes_BS = scores_BV[:, codes].masked_fill(~allowed_BS, -torch.inf)
    masked_BV[:, codes] = of_codes_BS.log_softmax(-1) if scores == "catalogue" else of_codes_BS
    return masked_BV
