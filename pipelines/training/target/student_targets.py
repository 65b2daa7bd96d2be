"""The student's target at each position: the label, mixed with the decoder's distribution over items.

For codes of depth 1, the decoder's output matrix gives that distribution directly, over all items. For deeper codes it
is the result of the decoder's beam search, run once before training for at most `_MAX_SEARCHED` positions; at other
positions the label is the whole target.

Shape suffixes: B windows, L positions, T tokens, D hidden, N items of a list, P positions of all sequences together.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from models.catalogue import BOS_TOKEN, Catalogue
from models.decoder.decoder import Decoder
from models.prompt import Prompt
from models.search import OWN_SEARCH
from models.student import START
from pipelines.data.labelled import Labelled, Weighted, dislikes_in, items_of, weights_of
from pipelines.foreign.model import ImportedModel
from pipelines.scoring.beams import BeamScorer
from pipelines.scoring.dense import hidden_states
from pipelines.training.batches import IGNORED
from pipelines.training.start.student_rows import token_of_row
from pipelines.training.target.softmax import TargetItems, Teacher
from pipelines.training.target.teacher import single_level

_MAX_SEARCHED = 100_000
_LIST_LEN = 32


class LabelTargets:
    """Targets that are only the labels. A batch's tokens are the student's input rows."""

    def __init__(self, catalogue: Catalogue, sequences: Sequence[Labelled]) -> None:
        self.sequences: Sequence[Labelled] = sequences
        self.encoding = single_level(catalogue, len(catalogue.item_ids))

    def read(self, tokens_BL: Tensor, labels_BL: Tensor) -> tuple[Tensor, Tensor]:
        """Return the student's input rows and the items to learn, IGNORED for none."""
        return tokens_BL, torch.where(labels_BL == IGNORED, IGNORED, labels_BL - 1)

    def of_batch(self, _tokens_BL: Tensor, _labels_BL: Tensor) -> Teacher | TargetItems | None:
        """Return the decoder's part of the target, None for none."""
        return None


class DenseTargets(LabelTargets):
    """Targets of a decoder whose items are one token each."""

    def __init__(self, decoder: Decoder, catalogue: Catalogue, sequences: Sequence[Labelled], weight: float) -> None:
        super().__init__(catalogue, sequences)
        self._decoder, self._weight = decoder, weight
        self._token_of_row = token_of_row(catalogue, decoder.embedding.weight.device)

    @torch.no_grad()
    def of_batch(self, tokens_BL: Tensor, _labels_BL: Tensor) -> Teacher:
        """Return the decoder's distribution at every position."""
        hidden_BLD = hidden_states(self._decoder, self._token_of_row[tokens_BL]).view(*tokens_BL.shape, -1)
        return Teacher(hidden_BLD, self._decoder.head_weight_VD[self._token_of_row[1:]], self._weight)


class BeamTargets:
    """Targets of a decoder with deeper codes. A batch's tokens are 1 + the position among all sequences together."""

    def __init__(
        self,
        decoder: Decoder,
        catalogue: Catalogue,
        sequences: Sequence[Labelled],
        weight: float,
        *,
        mask_seen: bool,
        imported: ImportedModel | None = None,
    ) -> None:
        device = decoder.embedding.weight.device
        items_P = np.concatenate([items_of(sequence) for sequence in sequences])
        starts = np.cumsum([0, *(len(sequence) for sequence in sequences)])
        self.sequences: Sequence[Labelled] = [
            Weighted(np.arange(start, end), weights_of(sequence), dislikes_in(sequence))
            for start, end, sequence in zip(starts, starts[1:], sequences, strict=False)
        ]
        self.encoding = single_level(catalogue, len(items_P))
        self._items_P = torch.from_numpy(items_P).to(device)
        searched = (
            _evenly(len(items_P), _MAX_SEARCHED) if imported is None else _newest(starts, imported.distil_positions)
        )
        owners = np.searchsorted(starts, searched, side="right") - 1
        histories = [items_P[starts[owner] : position] for owner, position in zip(owners, searched, strict=True)]
        self._lists = tuple(
            torch.from_numpy(values).to(device)
            for values in _search(decoder, catalogue, histories, weight, mask_seen=mask_seen, imported=imported)
        )
        self._list_of_P = torch.zeros(len(items_P), dtype=torch.long, device=device)
        self._list_of_P[torch.from_numpy(searched).to(device)] = torch.arange(1, 1 + len(searched), device=device)

    def read(self, tokens_BL: Tensor, labels_BL: Tensor) -> tuple[Tensor, Tensor]:
        """Return the student's input rows and the items to learn, IGNORED for none."""
        rows_BL = torch.where(tokens_BL == BOS_TOKEN, START, self._items_P[(tokens_BL - 1).clamp(min=0)] + 1)
        return rows_BL, torch.where(labels_BL == IGNORED, IGNORED, self._items_P[(labels_BL - 1).clamp(min=0)])

    def of_batch(self, _tokens_BL: Tensor, labels_BL: Tensor) -> TargetItems:
        """Return the items of the decoder's beams at every position."""
        list_BL = self._list_of_P[(labels_BL - 1).clamp(min=0)]
        items, shares = self._lists
        return TargetItems(items[list_BL], shares[list_BL])


def new_targets(
    decoder: Decoder | None,
    catalogue: Catalogue,
    sequences: Sequence[Labelled],
    weight: float,
    *,
    mask_seen: bool,
    imported: ImportedModel | None = None,
) -> LabelTargets | BeamTargets:
    """Return the targets of this decoder. `weight` is its weight in the target.

    At 0, or without a decoder, the labels.
    """
    if decoder is None or weight == 0:
        return LabelTargets(catalogue, sequences)
    decoder.eval()
    if catalogue.depth == 1 and imported is None:
        return DenseTargets(decoder, catalogue, sequences, weight)
    return BeamTargets(decoder, catalogue, sequences, weight, mask_seen=mask_seen, imported=imported)


def _search(
    decoder: Decoder,
    catalogue: Catalogue,
    histories: Sequence[np.ndarray],
    weight: float,
    *,
    mask_seen: bool,
    imported: ImportedModel | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the items and weights of each history's list, (1 + histories, N). List 0 is empty."""
    width, depth = min(_LIST_LEN, len(catalogue.item_ids)), catalogue.depth
    items_HN = np.zeros((1 + len(histories), width), dtype=np.int64)
    shares_HN = np.zeros((1 + len(histories), width), dtype=np.float32)
    if histories:
        if imported is None:
            max_items = decoder.config.max_position_embeddings // depth - 1
            prompt, search = Prompt(max_items, max(1, max_items // 4)), OWN_SEARCH
        else:
            prompt, search = imported.prompt, imported.search
            width = min(max(width, search.beam_width or width), len(catalogue.item_ids))
        scorer = BeamScorer(decoder, catalogue, prompt, search=search)
        seen = [np.unique(history) if mask_seen else () for history in histories]
        for row, *best in scorer.lists(histories, seen, [width] * len(histories)):
            items, scores = (values[: items_HN.shape[1]] for values in best)
            shares = np.exp(scores - scores.max(initial=-np.inf))
            items_HN[1 + row, : len(items)] = items
            shares_HN[1 + row, : len(items)] = weight * shares / shares.sum()
    return items_HN, shares_HN


def _evenly(size: int, most: int) -> np.ndarray:
    step = max(1, -(-size // most))
    return np.arange(0, size, step)


def _newest(starts: np.ndarray, most: int) -> np.ndarray:
    """Return at most this many positions, in order: the last of each sequence, then the ones before them."""
    ends, lengths = starts[1:], np.diff(starts)
    from_end = np.concatenate([end - 1 - np.arange(start, end) for start, end in zip(starts, ends, strict=False)])
    assert len(from_end) == lengths.sum()
    return np.sort(np.argsort(from_end, kind="stable")[:most])
