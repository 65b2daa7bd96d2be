"""Decoder token rows that are learned from text: a row is its own vector plus a linear map of its item's text vector.

The map is shared, so an item with few or no events has a row from its words. For codes deeper than 1, a token's text
vector is the mean over its items. Rows of items without training events have no vector of their own. After training,
both parts are added (`folded`), and the saved model is an ordinary decoder. The text encoder, the map and the trained
items' own vectors are saved next to it (`ItemText`), so that new items get rows without training: the mapped text plus
the own vectors of the items with the nearest texts.

Shape suffixes: V tokens, I items, U items with a vector of their own, N new items, D hidden, T size of the text
vectors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from scipy import sparse
from torch import Tensor, nn
from torch.nn.utils import parametrize

from models.catalogue import NUM_SPECIAL_TOKENS, Catalogue
from models.decoder.decoder import Decoder
from pipelines.codes.embedding import HashedTextEncoder, fit_text
from services.errors import BundleCorrupt, ConfigError

ITEM_TEXT = "item_text.safetensors"
_RIDGE = 1.0
_NEAREST, _TEMPERATURE = 10, 0.05
"""Number of items that lend a new item their own vectors, by a softmax of cosines over this temperature."""
_CHUNK = 256
_SEED = 0
"""Seed of the text vectors, which belong to the data: all training seeds share them."""


@dataclass(frozen=True, slots=True, eq=False)
class ItemText:
    """The map from a text to its row in the decoder.

    It has the encoder of texts, the map (T, D) from text vectors to rows, and the vectors (U, T) and own rows (U, D) of
    trained items.
    """

    encoder: HashedTextEncoder
    map_TD: np.ndarray
    trained_UT: np.ndarray
    own_UD: np.ndarray

    def rows(self, texts: Sequence[str]) -> Tensor:
        """Return the rows (N, D) of new items."""
        text_NT = self.encoder.encode(texts)
        starts = range(0, len(text_NT), _CHUNK)
        lent = [self._lent(text_NT[start : start + _CHUNK]) for start in starts]
        return torch.from_numpy(text_NT @ self.map_TD + np.concatenate([self.own_UD[:0], *lent]))

    def _lent(self, text_NT: np.ndarray) -> np.ndarray:
        """Return the mean own row of the items with the nearest texts, nearer ones weighted more.

        0 for a text of unknown words.
        """
        cosines_NU = text_NT @ self.trained_UT.T
        num = min(_NEAREST, len(self.own_UD))
        nearest = np.argpartition(-cosines_NU, num - 1, axis=1)[:, :num] if num else np.zeros((len(text_NT), 0), int)
        cosines = np.take_along_axis(cosines_NU, nearest, axis=1)
        shares = np.where(cosines > 0, np.exp((cosines - 1) / _TEMPERATURE), 0)
        shares /= np.maximum(shares.sum(axis=1, keepdims=True), np.finfo(np.float32).tiny)
        lent_ND: np.ndarray = np.einsum("nu,nud->nd", shares, self.own_UD[nearest]).astype(np.float32)
        return lent_ND

    def save(self, folder: Path) -> None:
        """Write the file."""
        tensors = {"rarity": self.encoder.rarity_W, "text": self.encoder.text_WT, "map": self.map_TD}
        tensors |= {"trained": self.trained_UT.astype(np.float16), "own": self.own_UD.astype(np.float16)}
        save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, folder / ITEM_TEXT)


def load_item_text(folder: Path) -> ItemText | None:
    """Read a file written by `save`, also without trained items; None if it is missing. Raises BundleCorrupt."""
    path = folder / ITEM_TEXT
    if not path.exists():
        return None
    try:
        tensors = load_file(path)
        encoder = HashedTextEncoder(tensors["rarity"], tensors["text"])
        none = {"trained": encoder.text_WT[:0], "own": tensors["map"][:0]}
        trained_UT, own_UD = ((none | tensors)[name].astype(np.float32) for name in none)
        return ItemText(encoder, tensors["map"], trained_UT, own_UD)
    except (OSError, KeyError, SafetensorError) as error:
        raise BundleCorrupt(f"{path}: not the texts' map ({error})") from error


class TextRows(nn.Module):
    """Computes the rows of all tokens from their own vectors (V, D).

    `text_VT` and `has_own_V1` are data: not learned, and not part of any state.
    """

    text_VT: Tensor
    has_own_V1: Tensor

    def __init__(self, text_VT: Tensor, has_own_V1: Tensor, map_TD: Tensor) -> None:
        super().__init__()
        self.register_buffer("text_VT", text_VT, persistent=False)
        self.register_buffer("has_own_V1", has_own_V1, persistent=False)
        self.map_TD = nn.Parameter(map_TD)

    def forward(self, own_VD: Tensor) -> Tensor:
        """Return the rows (V, D)."""
        with torch.autocast(own_VD.device.type, enabled=False):  # train on values as they are saved
            return torch.addmm(own_VD * self.has_own_V1, self.text_VT, self.map_TD)


def add_text(decoder: Decoder, catalogue: Catalogue, texts: Sequence[str], size: int) -> HashedTextEncoder:
    """Make the decoder's input and output rows learnable from text, and return the encoder of the texts.

    Rows keep their initial values, split into the part predicted from text and the rest. Raises ConfigError if the
    items have no texts, or if the output has separate rows.
    """
    if len(texts) != len(catalogue.item_ids):
        raise ConfigError(
            f"decoder.text_size: {size} numbers of each item's text, and there are {len(texts)} texts of "
            f"{len(catalogue.item_ids)} items; run the stage tokenize again, or give 0"
        )
    if not decoder.config.tie_word_embeddings:
        raise ConfigError("decoder.text_size: the decoder's output has rows of its own; give 0, or tie_word_embeddings")
    encoder = fit_text(texts, size, _SEED)
    vectors_IT = encoder.encode(texts)
    text_VT, has_own_V1 = (
        torch.from_numpy(values).to(decoder.embedding.weight) for values in by_token(catalogue, vectors_IT)
    )
    rows_VD = decoder.embedding.weight.detach()
    map_TD = ridge_map(text_VT * has_own_V1, rows_VD, _RIDGE)
    rows = TextRows(text_VT, has_own_V1, map_TD)
    decoder.embedding.weight = nn.Parameter(rows_VD - text_VT @ map_TD)
    parametrize.register_parametrization(decoder.embedding, "weight", rows)
    return encoder


def learned_text(decoder: Decoder, encoder: HashedTextEncoder) -> ItemText:
    """Return the text map of a decoder whose rows are learned from text by this encoder, for new items."""
    (rows,) = (module for module in decoder.modules() if isinstance(module, TextRows))
    own_VD = decoder.embedding.weight - rows.text_VT @ rows.map_TD
    trained = rows.has_own_V1[:, 0] > 0
    trained[:NUM_SPECIAL_TOKENS] = False
    parts = (part.detach().cpu().numpy() for part in (rows.map_TD, rows.text_VT[trained], own_VD[trained]))
    return ItemText(encoder, *parts)


def folded(decoder: Decoder) -> Decoder:
    """Return the decoder with plain rows, as saved and served; other weights are shared.

    A plain decoder is returned as is.
    """
    if not parametrize.is_parametrized(decoder.embedding):
        return decoder
    with torch.device("meta"):
        plain = type(decoder)(decoder.config)
    weights = {name: value for name, value in decoder.state_dict().items() if not name.startswith("embedding.")}
    plain.load_state_dict(weights | {"embedding.weight": decoder.embedding.weight.detach()}, assign=True)
    return plain


def is_code(catalogue: Catalogue, items: np.ndarray) -> sparse.csr_array:
    """Return the codes of these items over all levels as an indicator matrix (I, S)."""
    first_columns = np.cumsum([0, *catalogue.level_sizes[:-1]])
    columns = (catalogue.codes[items] + first_columns).ravel()
    starts = np.arange(0, len(columns) + 1, catalogue.depth)
    shape = (len(items), sum(catalogue.level_sizes))
    return sparse.csr_array((np.ones(len(columns)), columns, starts), shape=shape)


def by_token(catalogue: Catalogue, vectors_IT: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each token's text vector (its items' mean; 0: special token), and 1 if training events name it, else 0."""
    is_code_IS = is_code(catalogue, np.arange(len(vectors_IT)))
    num_items_S1 = is_code_IS.sum(axis=0).reshape(-1, 1)
    is_used_S1 = (is_code_IS.T @ catalogue.popularity > 0).reshape(-1, 1)
    above = ((NUM_SPECIAL_TOKENS, 0), (0, 0))
    text_VT = np.pad(is_code_IS.T @ vectors_IT / np.maximum(1, num_items_S1), above)
    return text_VT.astype(np.float32), np.pad(is_used_S1.astype(np.float32), above, constant_values=1)


def ridge_map(inputs_NE: Tensor, outputs_ND: Tensor, ridge: float) -> Tensor:
    """Return the map (E, D) from inputs to outputs by ridge regression."""
    ridge_EE = ridge * torch.eye(inputs_NE.shape[1], dtype=inputs_NE.dtype, device=inputs_NE.device)
    # contiguous, as in checkpoints: the fused optimizer needs a parameter and its averages in one layout
    solved_ED: Tensor = torch.linalg.solve(inputs_NE.T @ inputs_NE + ridge_EE, inputs_NE.T @ outputs_ND).contiguous()
    return solved_ED
