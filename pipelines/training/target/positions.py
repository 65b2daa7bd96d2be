"""The loss of a batch of positions: which of them are learned from, which items take part at each, and over how many items the softmax goes.

Shape suffixes: B histories, L positions, T chosen positions, D hidden of the model, V items.
"""

from torch import Tensor

from pipelines.training.fit.parallel import Loss
from pipelines.training.target.sampled import ItemSampler, sampled_loss
from pipelines.training.target.softmax import TargetItems, Teacher, catalogue_loss, next_unseen, seen_before


def position_loss(
    hidden_BLD: Tensor,
    head_VD: Tensor,
    labels_BL: Tensor,
    is_label_BL: Tensor,
    *,
    mask_seen: bool,
    sampler: ItemSampler | None = None,
    teacher: Teacher | TargetItems | None = None,
    weights_BL: Tensor | None = None,
) -> Loss:
    """Return the mean cross-entropy over the positions learned from, and their number.

    A label is an item index, negative for none. With `mask_seen` only labels new to their history are learned, among the unseen items.
    `weights_BL` are those of the labels, None for all 1. The hidden states or lists of `teacher` are (B, L, ...) here.
    """
    chosen_BL = next_unseen(labels_BL, is_label_BL) if mask_seen else (labels_BL >= 0) & is_label_BL
    hidden_TD, labels_T = hidden_BLD[chosen_BL], labels_BL[chosen_BL]
    target = None if teacher is None else teacher.at(chosen_BL)
    weights_T = None if weights_BL is None else weights_BL[chosen_BL]
    if sampler is None:
        seen = seen_before(labels_BL, chosen_BL, len(head_VD)) if mask_seen else None
        return catalogue_loss(hidden_TD, head_VD, labels_T, seen, target, weights_T), len(labels_T)
    sample = sampler.draw(labels_BL.device)
    seen = seen_before(sample.columns(labels_BL), chosen_BL, len(sample.items_S)) if mask_seen else None
    return sampled_loss(hidden_TD, head_VD, labels_T, sample, seen, target, weights_T), len(labels_T)
