"""The loss of an item's code path: at each level a softmax over the codes that items have below the label's prefix.

The engine's beams score items the same way, so the probabilities of all items sum to 1, and paths without an item need
not be learned.

Shape suffixes: B windows, L positions, N items of a window, T learned items, U disliked items, C items of a chunk, D
hidden, V tokens, P prefixes, S codes of a level, X levels.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from models.catalogue import Catalogue
from pipelines.training.batches import IGNORED, Batch, Loss
from pipelines.training.target.softmax import PENALTY, catalogue_loss, next_unseen
from pipelines.training.target.teacher import ItemTeacher, TargetCodes
from pipelines.training.target.unlikelihood import log_odds, mean_of_both, unlikelihood
from services.llm.engine.beam.trie import ItemCodes, Trie


@dataclass(frozen=True, slots=True)
class OtherCodes:
    """Mask of the codes that no item has below each label's prefix."""

    child_PS: Tensor
    prefix_T: Tensor

    def penalty(self, rows: slice) -> Tensor:
        """Return (C, S) for these labels: 0, or a large negative number for codes without an item."""
        return (self.child_PS[self.prefix_T[rows]] < 0) * -PENALTY


class CodePaths:
    """A catalogue's paths by level, numbered as in the engine's trie.

    `child_PS[level]` is the node of a prefix extended by one code, -1 if no item has it.
    """

    def __init__(self, catalogue: Catalogue, device: torch.device) -> None:
        self.first_tokens, self.level_sizes = catalogue.token_offsets, catalogue.level_sizes
        items = ItemCodes.of(catalogue)
        nodes = (*Trie(items, torch.device("cpu")).nodes_of_items, np.arange(len(catalogue.item_ids), dtype=np.int32))
        self.child_PS: list[Tensor] = []
        for level, size in enumerate(self.level_sizes):
            child_PS = np.full((int(nodes[level].max()) + 1, size), -1, dtype=np.int32)
            child_PS[nodes[level], catalogue.codes[:, level]] = nodes[level + 1]
            self.child_PS.append(torch.from_numpy(child_PS).to(device))
        self._codes_IX = torch.from_numpy(catalogue.codes).long().to(device)

    def loss(
        self, hidden_BLD: Tensor, head_VD: Tensor, batch: Batch, teacher: ItemTeacher | None = None, *, mask_seen: bool
    ) -> Loss:
        """Return the mean cross-entropy of all levels' codes, each among the codes below its prefix, and their number.

        A disliked item counts as many codes as it has levels. With `mask_seen`, only items new to their history are
        learned; seen items stay in the softmax, as in the engine, whose masks change no score. With a teacher, the
        target at each level mixes the label's code with the teacher's probabilities.
        """
        depth = len(self.level_sizes)
        labels_BNX = batch.labels.reshape(len(batch.labels), -1, depth)
        hidden_BNXD = hidden_BLD.reshape(*labels_BNX.shape, -1)
        is_label_BN = batch.is_label[:, ::depth]
        chosen_BN = (labels_BNX[..., 0] >= 0) & is_label_BN
        if mask_seen:
            chosen_BN = next_unseen(self._items(labels_BNX), is_label_BN)
        hidden_TXD, labels_TX = hidden_BNXD[chosen_BN], labels_BNX[chosen_BN]
        targets: Sequence[TargetCodes | None] = [None] * depth
        if teacher is not None:
            codes_BNX = labels_BNX - torch.tensor(self.first_tokens, device=labels_BNX.device)
            targets = teacher.targets(codes_BNX.clamp(min=IGNORED), chosen_BN)
        weights_T = None if batch.weights is None else batch.weights[:, ::depth][chosen_BN]
        prefix_T, losses = torch.zeros_like(labels_TX[:, 0]), []
        for level, (first, size) in enumerate(zip(self.first_tokens, self.level_sizes, strict=True)):
            others, codes_T = OtherCodes(self.child_PS[level], prefix_T), labels_TX[:, level] - first
            head_SD = head_VD[first : first + size]
            losses.append(catalogue_loss(hidden_TXD[:, level], head_SD, codes_T, others, targets[level], weights_T))
            prefix_T = self.child_PS[level][prefix_T, codes_T].long()
        of_labels = torch.stack(losses).mean(), labels_TX.numel()
        if batch.disliked is None:
            return of_labels
        row_U, place_U, item_U, weight_U = batch.disliked.found()
        odds_UX = self._log_odds(hidden_BNXD[row_U, place_U], head_VD, item_U)
        return mean_of_both(of_labels, unlikelihood(odds_UX, weight_U), depth * len(item_U))

    def _log_odds(self, hidden_UXD: Tensor, head_VD: Tensor, item_U: Tensor) -> Tensor:
        """Return the log odds (U, X) of each item's codes among the codes below their prefixes.

        Rows contain the item itself, so that each code is predicted from the previous codes.
        """
        codes_UX, prefix_U, odds = self._codes_IX[item_U], torch.zeros_like(item_U), []
        for level, (first, size) in enumerate(zip(self.first_tokens, self.level_sizes, strict=True)):
            others, codes_U = OtherCodes(self.child_PS[level], prefix_U), codes_UX[:, level]
            odds.append(log_odds(hidden_UXD[:, level], head_VD[first : first + size], codes_U, others))
            prefix_U = self.child_PS[level][prefix_U, codes_U].long()
        return torch.stack(odds, dim=1)

    def _items(self, labels_BNX: Tensor) -> Tensor:
        """Return each label's item, IGNORED for none."""
        node_BN = torch.zeros_like(labels_BNX[..., 0])
        for child_PS, first, token_BN in zip(self.child_PS, self.first_tokens, labels_BNX.unbind(-1), strict=True):
            node_BN = child_PS[node_BN, (token_BN - first).clamp(min=0)].clamp(min=0).long()
        return torch.where(labels_BNX[..., 0] < 0, IGNORED, node_BN)
