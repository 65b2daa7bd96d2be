"""Starts a decoder from a text checkpoint whose vocabulary is replaced by the catalogue's codes.

Shape and layers are the checkpoint's; rows come from the checkpoint's rows for the words of the items. An item's vector
is the mean of the checkpoint's rows of its text's tokens, centred over the items; a code's row is the mean over the
items with that code. Special tokens, and codes without text, start at random. All rows get length 1, so that scores
start with a standard deviation of 1 and a student may start with them. The outputs that layers add to the residual
stream are scaled by the same factor as the rows, so a layer's inputs keep their proportions. Input and output share the
rows. The result is an ordinary decoder, and a compatible warm start replaces all its weights.

Shape suffixes: V tokens of the catalogue, W tokens of the text, I items, D hidden.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from scipy import sparse
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from models.catalogue import NUM_SPECIAL_TOKENS, Catalogue
from models.decoder.config import FAMILIES
from models.decoder.decoder import Decoder
from models.decoder.weights import load_decoder
from models.files import file_sha256
from pipelines.training.start.text_rows import is_code
from services.errors import CheckpointError, ConfigError

_FIELD = "decoder.text_start"
_TOKENIZER = "tokenizer.json"
_ADDS = (".output.", ".down.")
"""Names of the weights that produce a layer's additions to the residual stream."""
_SAYS_NOTHING = 1e-3
"""Codes with a row shorter than this fraction of the checkpoint's rows start at random: their items have the mean
text."""


def decoder_from_text(
    folder: Path, num_layers: int, catalogue: Catalogue, texts: Sequence[str], num_positions: int, seed: int
) -> Decoder:
    """Return the decoder with the checkpoint's first `num_layers` layers (0: all). `texts` are the items'.

    Raises ConfigError naming the field.
    """
    tokenizer, text = _read_tokenizer(folder), _read_decoder(folder)
    has = text.config.num_hidden_layers
    if num_layers > has:
        raise ConfigError(f"decoder.text_layers: {num_layers}, and {folder} has {has}; give 1 to {has}, or 0 for all")
    if len(texts) != len(catalogue.item_ids):
        raise ConfigError(
            f"{_FIELD}: there are {len(texts)} texts of {len(catalogue.item_ids)} items; "
            "run the stage tokenize again, or leave it out"
        )
    config = replace(
        text.config,
        vocab_size=catalogue.vocab_size,
        num_hidden_layers=num_layers or has,
        max_position_embeddings=num_positions,
        tie_word_embeddings=True,
        window=None,  # training attends to the whole prompt, so serving must too
    )
    torch.manual_seed(seed)
    decoder = Decoder(config)
    table_WD = text.embedding.weight.detach()
    size = float(table_WD.pow(2).sum(dim=1).mean().sqrt())
    rows_VD = _rows(catalogue, _item_rows(tokenizer, texts, table_WD) / size)
    weights = text.state_dict()
    started = {"embedding.weight": rows_VD, "norm.weight": torch.ones(config.hidden_size)}
    for name in decoder.state_dict().keys() - started.keys():
        started[name] = weights[name] / size if any(part in name for part in _ADDS) else weights[name]
    decoder.load_state_dict(started)
    return decoder


def checkpoint_hash(folder: str) -> str:
    """Return a hash of the checkpoint's files that are read; empty without a folder.

    Raises ConfigError if it is absent.
    """
    if not folder:
        return ""
    _check(Path(folder))
    read = [path for path in sorted(Path(folder).iterdir()) if path.suffix in {".json", ".safetensors"}]
    return " ".join(file_sha256(path) for path in read)


def _rows(catalogue: Catalogue, items_ID: np.ndarray) -> Tensor:
    """Return the rows (V, D) of codes from their items' rows.

    Item rows are NaN without a text, and scaled so that the checkpoint's rows have length 1.
    """
    rows_VD = functional.normalize(torch.randn(catalogue.vocab_size, items_ID.shape[1]))
    told_I = np.flatnonzero(~np.isnan(items_ID).any(axis=1))
    if len(told_I):
        is_code_SI = is_code(catalogue, told_I).T
        sums_SD = is_code_SI @ (items_ID[told_I] - items_ID[told_I].mean(axis=0))
        means_SD = torch.from_numpy(sums_SD / np.maximum(1, is_code_SI.sum(axis=1).reshape(-1, 1)))
        says_S = means_SD.norm(dim=1) > _SAYS_NOTHING
        rows_VD[NUM_SPECIAL_TOKENS:][says_S] = functional.normalize(means_SD[says_S]).float()
    return rows_VD


def _item_rows(tokenizer: Tokenizer, texts: Sequence[str], table_WD: Tensor) -> np.ndarray:
    """Return the mean row (I, D) of each text's tokens; NaN for an empty text."""
    token_ids = [encoding.ids for encoding in tokenizer.encode_batch(list(texts), add_special_tokens=False)]
    tokens = np.concatenate([np.array(ids, dtype=np.int64) for ids in token_ids])
    if tokens.max(initial=0) >= len(table_WD):
        raise ConfigError(
            f"{_FIELD}: {_TOKENIZER} has the token {tokens.max()}, and the weights have {len(table_WD)} rows; "
            "give a folder whose tokenizer and weights are of one checkpoint"
        )
    lengths = np.array([len(ids) for ids in token_ids])
    starts = np.concatenate(([0], lengths.cumsum()))
    has_token_IW = sparse.csr_array((np.ones(len(tokens)), tokens, starts), shape=(len(texts), len(table_WD)))
    with np.errstate(invalid="ignore"):  # 0 / 0 for a text without tokens
        means_ID: np.ndarray = (has_token_IW @ table_WD.double().numpy()) / lengths[:, None]
    return means_ID


def _check(folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigError(f"{_FIELD}: {folder} is no folder; give that of a checkpoint in Hugging Face layout")
    if not (folder / _TOKENIZER).exists():
        raise ConfigError(f"{_FIELD}: {folder} has no {_TOKENIZER}; put the checkpoint's own beside its weights")


def _read_tokenizer(folder: Path) -> Tokenizer:
    _check(folder)
    try:
        tokenizer = Tokenizer.from_file(str(folder / _TOKENIZER))
    except Exception as error:  # the library raises nothing more specific
        raise ConfigError(f"{_FIELD}: {folder / _TOKENIZER} cannot be read ({error}); fetch it again") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_decoder(folder: Path) -> Decoder:
    try:
        return load_decoder(folder, torch.float32, "cpu")
    except CheckpointError as error:
        raise ConfigError(f"{_FIELD}: {error}; give a whole checkpoint of {', '.join(FAMILIES)}") from error
