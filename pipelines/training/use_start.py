"""First rows of the decoder's tokens from who uses their items: items with the same users begin near each other.

The vectors are the right singular vectors of users by items (pipelines.codes.embedding), on training events only. They are the factors of a
matrix factorisation, so training begins where collaborative filtering ends, and takes less than half of the epochs that random rows need.
"""

from collections.abc import Sequence

import numpy as np
import torch

from models.catalogue import Catalogue
from models.decoder.decoder import Decoder
from pipelines.codes.embedding import item_use
from pipelines.training.item_text import by_token

_STD = 0.05
"""Of a row's numbers; .025 learns slower, .1 as fast."""
_SEED = 0
"""Of the vectors, which belong to the data: all seeds of training share them."""


@torch.no_grad()
def start_from_use(decoder: Decoder, catalogue: Catalogue, sequences: Sequence[np.ndarray]) -> None:
    """Set the rows of all tokens that training events name. Other rows stay random."""
    size = decoder.config.hidden_size
    _, use_IU = item_use([np.ma.getdata(sequence) for sequence in sequences], len(catalogue.item_ids), size, _SEED)
    rows_VU, is_used_V1 = by_token(catalogue, use_IU * (_STD * size**0.5))
    used = np.flatnonzero(rows_VU.any(axis=1) & (is_used_V1[:, 0] > 0))
    rows_ND = np.pad(rows_VU[used], ((0, 0), (0, size - rows_VU.shape[1])))
    weight = decoder.embedding.weight
    weight[torch.from_numpy(used).to(weight.device)] = torch.from_numpy(rows_ND).to(weight)
