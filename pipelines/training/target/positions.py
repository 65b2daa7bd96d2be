"""The loss of a batch of positions: which labels and dislikes count, and over which items each softmax runs.

Shape suffixes: B histories, L positions, T chosen positions, U disliked items, D hidden of the model, V items.
"""

from torch import Tensor

from pipelines.training.batches import Disliked, Loss
from pipelines.training.target.sampled import ItemSampler, sampled_loss
from pipelines.training.target.softmax import (
    SeenItems,
    TargetItems,
    Teacher,
    catalogue_loss,
    first_places,
    next_unseen,
    seen_before,
)
from pipelines.training.target.unlikelihood import log_odds, mean_of_both, sampled_log_odds, unlikelihood


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
    disliked: Disliked | None = None,
) -> Loss:
    """Return the mean loss over labels (cross-entropy) and disliked items (unlikelihood), and their number.

    A label is an item index, negative for none. With `mask_seen`, only labels new to their history are learned, among
    the unseen items. `weights_BL` weigh the labels (None: all 1). The hidden states or lists of `teacher` are (B, L,
    ...); it does not affect dislikes.
    """
    chosen_BL = next_unseen(labels_BL, is_label_BL) if mask_seen else (labels_BL >= 0) & is_label_BL
    hidden_TD, labels_T = hidden_BLD[chosen_BL], labels_BL[chosen_BL]
    target = None if teacher is None else teacher.at(chosen_BL)
    weights_T = None if weights_BL is None else weights_BL[chosen_BL]
    if sampler is None:
        sample, columns_BL, num_columns = None, labels_BL, len(head_VD)
        seen = seen_before(columns_BL, chosen_BL, num_columns) if mask_seen else None
        loss = catalogue_loss(hidden_TD, head_VD, labels_T, seen, target, weights_T)
    else:
        sample = sampler.draw(labels_BL.device)
        columns_BL, num_columns = sample.columns(labels_BL), len(sample.items_S)
        seen = seen_before(columns_BL, chosen_BL, num_columns) if mask_seen else None
        loss = sampled_loss(hidden_TD, head_VD, labels_T, sample, seen, target, weights_T)
    if disliked is None:
        return loss, len(labels_T)
    row_U, place_U, item_U, weight_U = disliked.found()
    hidden_UD, left_out = hidden_BLD[row_U, place_U], None
    if mask_seen:
        left_out = SeenItems(first_places(columns_BL, num_columns), row_U, place_U.float())
    if sample is None:
        odds_U = log_odds(hidden_UD, head_VD, item_U, left_out)
    else:
        odds_U = sampled_log_odds(hidden_UD, head_VD, item_U, sample, left_out)
    return mean_of_both((loss, len(labels_T)), unlikelihood(odds_U.unsqueeze(1), weight_U), len(item_U))
