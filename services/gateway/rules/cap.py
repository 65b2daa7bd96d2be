"""Caps: at most n items of each value of an attribute, such as a category. Pinned items count.

Each place gets the first candidate that exceeds no cap; only where there is none, the first candidate at all.
"""

from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np

from services.contracts.rules import Rules
from services.gateway.rules.slate import Known, Slate
from services.items.columns import ItemColumns


def cap(slate: Slate, rules: Rules, known: Known) -> Slate:
    """Reorder the candidates."""
    caps, columns, num_free = rules.caps or (), known.expressions.columns, slate.num_free
    counts: list[Counter[Hashable]] = [Counter() for _ in caps]
    pinned = np.fromiter(slate.pinned.values(), dtype=np.int64, count=len(slate.pinned))
    values = [values_of(columns, one.attribute, slate.indices) for one in caps]
    for one, count in zip(caps, counts, strict=True):
        for found in values_of(columns, one.attribute, pinned):
            count.update(found)
    limits = [one.most for one in caps]
    taken: list[int] = []
    deferred: list[int] = []
    for place in range(len(slate.indices)):
        if len(taken) == num_free:
            break
        found_by_cap = [of_cap[place] for of_cap in values]
        if any(
            count[value] >= most
            for found, count, most in zip(found_by_cap, counts, limits, strict=True)
            for value in found
        ):
            deferred.append(place)
            continue
        taken.append(place)
        for found, count in zip(found_by_cap, counts, strict=True):
            count.update(found)
    rest = range(len(taken) + len(deferred), len(slate.indices))
    return slate.reordered(np.array([*taken, *deferred, *rest], dtype=np.int64))


def values_of(columns: ItemColumns, attribute: str, indices: np.ndarray) -> Sequence[tuple[Hashable, ...]]:
    """Return the values that these items have under an attribute; none where they have none."""
    found: list[tuple[Hashable, ...]] = [()] * len(indices)
    if (texts := columns.texts.get(attribute)) is not None:
        found = [texts.values[code] for code in texts.codes[indices].tolist()]
    if (numbers := columns.numbers.get(attribute)) is not None:
        held = numbers.numbers[indices].tolist()
        found = [(*one, number) if number == number else one for one, number in zip(found, held, strict=True)]
    if (flags := columns.flags.get(attribute)) is not None:
        states = flags.flags[indices].tolist()
        found = [(*one, ("flag", state)) if state >= 0 else one for one, state in zip(found, states, strict=True)]
    return found
