"""Initial embedding rows of the decoder's tokens from interactions: items with the same users start near each other.

The vectors are the right singular vectors of users by items (pipelines.codes.embedding), on training events only. They
are the factors of a matrix factorisation, so training starts where collaborative filtering ends and needs less than
half of the epochs of a random start.
"""

from collections.abc import Sequence

import numpy as np
import torch

from models.catalogue import Catalogue
from models.decoder.decoder import Decoder
from pipelines.codes.embedding import PRIOR_EVENTS, item_use
from pipelines.data.labelled import Labelled, items_of
from pipelines.training.start.text_rows import by_token

_STD = 0.05
"""Scale of a row whose item has very many events; .025 learns slower, .1 as fast."""
_SEED = 0
"""Seed of the vectors, which belong to the data: all training seeds share them."""


@torch.no_grad()
def start_from_use(decoder: Decoder, catalogue: Catalogue, sequences: Sequence[Labelled]) -> None:
    """Set the rows of all tokens in these events. Rows with fewer events are shorter; other rows stay random.

    A few users say little about an item and are soon memorised.
    """
    size = decoder.config.hidden_size
    items = [items_of(sequence) for sequence in sequences]
    num_events_I, use_IU = item_use(items, len(catalogue.item_ids), size, _SEED)
    length_I = _STD * size**0.5 * num_events_I / (num_events_I + PRIOR_EVENTS)
    rows_VU, _ = by_token(catalogue, use_IU * length_I[:, None])
    used = np.flatnonzero(rows_VU.any(axis=1))
    rows_ND = np.pad(rows_VU[used], ((0, 0), (0, size - rows_VU.shape[1])))
    weight = decoder.embedding.weight
    weight[torch.from_numpy(used).to(weight.device)] = torch.from_numpy(rows_ND).to(weight)
