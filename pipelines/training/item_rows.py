"""Rows of the student's embedding from codes: what the teacher's tokens say of an item, and what an item that nobody used inherits.

An unused item's row is the sum of one vector for each of its codes. These vectors are fitted by ridge regression to the rows of the items that
were trained, so that new items are ranked without training.

Shape suffixes: I items, S codes of all levels, D hidden.
"""

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from models.catalogue import BOS_TOKEN, NUM_SPECIAL_TOKENS, Catalogue
from models.decoder.decoder import Decoder
from models.student import StudentModel

_RIDGE = 1.0


def token_of_row(catalogue: Catalogue, device: torch.device) -> Tensor:
    """Map the student's input rows to the decoder's tokens (depth 1)."""
    tokens = catalogue.tokens(range(len(catalogue.item_ids)))
    return torch.tensor([BOS_TOKEN, *tokens], device=device)


def spelled_rows(decoder: Decoder, catalogue: Catalogue) -> Tensor:
    """Return a row for the beginning and each item: the sum of the decoder's embeddings of its tokens."""
    weight_SD = decoder.embedding.weight
    tokens = np.array(catalogue.tokens(range(len(catalogue.item_ids)))).reshape(-1, catalogue.depth)
    items_ID = weight_SD[torch.from_numpy(tokens).to(weight_SD.device)].sum(dim=1)
    return torch.cat([weight_SD[BOS_TOKEN : BOS_TOKEN + 1], items_ID])


@torch.no_grad()
def fill_rows(student: StudentModel, catalogue: Catalogue, unused: np.ndarray) -> None:
    """Set the rows of these items by their codes, from the rows of the others."""
    used = np.setdiff1d(np.arange(len(catalogue.item_ids)), unused)
    if not len(unused) or not len(used):
        return
    weight = student.embedding.weight
    trained_ID = student.head_weight_VD.detach().cpu().double().numpy()[used]
    is_code_IS = _one_hot(catalogue, used)
    gram_SS = (is_code_IS.T @ is_code_IS).toarray() + _RIDGE * np.eye(is_code_IS.shape[1])
    vectors_SD = np.linalg.solve(gram_SS, is_code_IS.T @ trained_ID)
    filled_ID = torch.from_numpy(_one_hot(catalogue, unused) @ vectors_SD)
    weight[1 + torch.from_numpy(unused).to(weight.device)] = filled_ID.to(weight)


def _one_hot(catalogue: Catalogue, items: np.ndarray) -> sparse.csr_array:
    columns = np.array(catalogue.tokens(items)) - NUM_SPECIAL_TOKENS
    starts = np.arange(0, len(columns) + 1, catalogue.depth)
    shape = (len(items), sum(catalogue.level_sizes))
    return sparse.csr_array((np.ones(len(columns)), columns, starts), shape=shape)
