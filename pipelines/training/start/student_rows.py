"""Rows of the student's embedding: first rows from the teacher's rows of an item's tokens, and rows of unused items.

With codes deeper than 1, an unused item's row is the sum of one vector per code. The vectors are fitted by ridge
regression to the rows of trained items. With one token per item, it is the mean row of the trained items with the
nearest texts. So new items are ranked without training.

Shape suffixes: I items, U unused items, N nearest items, S codes of all levels, T size of a text's vector, D hidden.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from models.catalogue import BOS_TOKEN, Catalogue
from models.decoder.decoder import Decoder
from models.student import StudentModel
from pipelines.codes.embedding import fit_text
from pipelines.training.start.text_rows import is_code, ridge_map

_RIDGE = 1.0
_SMALL_RIDGE = 1e-3
_TEXT_SIZE, _NEAREST, _TEMPERATURE = 256, 10, 0.1
"""Numbers of a text's vector, and the nearest items, whose cosines over the temperature weigh their rows."""
_CHUNK = 512


def token_of_row(catalogue: Catalogue, device: torch.device) -> Tensor:
    """Map the student's input rows to the decoder's tokens (depth 1)."""
    tokens = catalogue.tokens(range(len(catalogue.item_ids)))
    return torch.tensor([BOS_TOKEN, *tokens], device=device)


def encoded_rows(decoder: Decoder, catalogue: Catalogue) -> Tensor:
    """Return a row for the beginning of a history and each item: the sum of the decoder's embeddings of its tokens."""
    weight_SD = decoder.embedding.weight
    tokens = np.array(catalogue.tokens(range(len(catalogue.item_ids)))).reshape(-1, catalogue.depth)
    items_ID = weight_SD[torch.from_numpy(tokens).to(weight_SD.device)].sum(dim=1)
    return torch.cat([weight_SD[BOS_TOKEN : BOS_TOKEN + 1], items_ID])


@torch.no_grad()
def fill_rows(student: StudentModel, catalogue: Catalogue, unused: np.ndarray) -> None:
    """Set the rows of these items by their codes, fitted to the rows of all other items."""
    used = np.setdiff1d(np.arange(len(catalogue.item_ids)), unused)
    if not len(unused) or not len(used):
        return
    weight = student.embedding.weight
    trained_ID = student.head_weight_VD.detach().cpu().double().numpy()[used]
    is_code_IS = is_code(catalogue, used)
    gram_SS = (is_code_IS.T @ is_code_IS).toarray() + _RIDGE * np.eye(is_code_IS.shape[1])
    vectors_SD = np.linalg.solve(gram_SS, is_code_IS.T @ trained_ID)
    filled_ID = torch.from_numpy(is_code(catalogue, unused) @ vectors_SD)
    weight[1 + torch.from_numpy(unused).to(weight.device)] = filled_ID.to(weight)


@torch.no_grad()
def fill_rows_from_texts(student: StudentModel, texts: Sequence[str], unused: np.ndarray) -> None:
    """Set the rows of these items to the mean row of the used items with the nearest texts.

    A mean is shorter than the rows, so these items score lower than used items (similarity/new_items.py).
    """
    used = np.setdiff1d(np.arange(len(texts)), unused)
    if not len(unused) or len(used) < _NEAREST:
        return
    text_IT, weight = fit_text(texts, _TEXT_SIZE, seed=0).encode(texts), student.embedding.weight
    trained_ID = student.head_weight_VD.detach().cpu().numpy()[used]
    for first in range(0, len(unused), _CHUNK):
        filled = unused[first : first + _CHUNK]
        cosines_UI = text_IT[filled] @ text_IT[used].T
        nearest_UN = np.argpartition(-cosines_UI, _NEAREST - 1, axis=1)[:, :_NEAREST]
        cosines_UN = np.take_along_axis(cosines_UI, nearest_UN, axis=1)
        shares_UN = np.where(cosines_UN > 0, np.exp((cosines_UN - 1) / _TEMPERATURE), 0)
        shares_UN /= np.maximum(shares_UN.sum(axis=1, keepdims=True), np.finfo(np.float32).tiny)
        rows_UD = torch.from_numpy(np.einsum("un,und->ud", shares_UN, trained_ID[nearest_UN]))
        weight[1 + torch.from_numpy(filled).to(weight.device)] = rows_UD.to(weight)


@torch.no_grad()
def rows_like_teachers(student: StudentModel, decoder: Decoder, before: Catalogue, new_rows_ND: Tensor) -> Tensor:
    """Return the student's rows of new items from their decoder rows, by a map fitted to trained items of `before`."""
    used = torch.from_numpy(np.flatnonzero(before.popularity > 0))
    encoded_IE, own_ID = encoded_rows(decoder, before)[1:][used].double(), student.head_weight_VD[used].double()
    mapped_ND = new_rows_ND.double() @ ridge_map(encoded_IE, own_ID, _SMALL_RIDGE)
    return mapped_ND.to(student.embedding.weight)
