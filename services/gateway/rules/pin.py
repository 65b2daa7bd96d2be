"""Pins: an item at a fixed position of the list, regardless of its score. Blocks and filters take precedence."""

import numpy as np

from services.contracts.rules import Rules
from services.gateway.rules.slate import Known, Slate


def pin(slate: Slate, rules: Rules, known: Known) -> Slate:
    """Reserve the positions and remove the pinned items from the candidates."""
    pinned = {}
    for rule in rules.pins or ():
        index = known.index(rule.item_id)
        if index is None or index >= len(known.showable) or rule.position > slate.num_wanted:
            continue
        if known.showable[index] and known.available[index]:
            pinned[rule.position] = index
    taken = set(pinned.values())  # for a few hundred candidates faster than np.isin, which sorts
    is_free = np.array([index not in taken for index in slate.indices.tolist()], dtype=bool)
    return slate._replace(indices=slate.indices[is_free], scores=slate.scores[is_free], pinned=pinned)
