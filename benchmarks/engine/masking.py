"""Scores of whole vocabularies held to the catalogue, for peers that call a logits processor. Needs torch and numpy alone.

Shape suffixes: B beams, L codes spelled, S codes of a level, V vocabulary.
"""

import numpy as np
import torch
from torch import Tensor

from benchmarks.engine.codes import CodeTrie


def mask_scores(trie: CodeTrie, tokens_BL: np.ndarray, scores_BV: Tensor) -> Tensor:
    """Return log-probabilities over the level's codes, as our engine scores them; -inf for all that leads to no item."""
    first = trie.token_offsets[tokens_BL.shape[1]]
    codes = slice(first, first + trie.level_size)
    allowed_BS = torch.from_numpy(trie.allowed(tokens_BL)).to(scores_BV.device)
    masked_BV = torch.full_like(scores_BV, -torch.inf)
    masked_BV[:, codes] = scores_BV[:, codes].log_softmax(-1).masked_fill(~allowed_BS, -torch.inf)
    return masked_BV
