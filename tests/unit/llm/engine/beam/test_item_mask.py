"""Item masks against the codes of the allowed items: bits, counts, and isolation between requests."""

import numpy as np
import pytest
import torch

from services.llm.engine.beam.item_mask import ItemMasks
from services.llm.engine.beam.trie import Trie
from tests.support.engine.engines import build_items

NUM_ITEMS = 300
NOTHING = np.zeros(0, dtype=np.int64)


def build(depth: int) -> tuple[ItemMasks, np.ndarray]:
    """Build the masks of random codes."""
    items = build_items(depth, NUM_ITEMS)
    return ItemMasks(Trie(items, torch.device("cpu"))), items.codes


def alive_of(bits: torch.Tensor, count: int) -> list[bool]:
    return np.unpackbits(bits.numpy(), count=count, bitorder="little").astype(bool).tolist()


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize(("share", "num_excluded"), [(None, 0), (None, 40), (0.01, 0), (0.3, 40), (0.3, 1_000)])
def test_a_node_is_alive_when_an_allowed_item_is_below_it(depth, num_excluded, share) -> None:
    """Bits and counts of each level follow from the allowed items minus the excluded items, repeated or not."""
    masks, codes = build(depth)
    rng = np.random.default_rng(8)
    allowed = None if share is None else rng.random(NUM_ITEMS) < share
    excluded = rng.integers(0, NUM_ITEMS, num_excluded)

    mask = masks.of(allowed, excluded)

    shown = np.ones(NUM_ITEMS, dtype=bool) if allowed is None else allowed.copy()
    shown[excluded] = False
    for length in range(1, depth):
        prefixes = list(dict.fromkeys(map(tuple, codes[:, :length].tolist())))
        living = {tuple(code) for code in codes[shown][:, :length].tolist()}
        bits = mask.bits_by_level[length - 1]
        assert alive_of(bits, len(prefixes)) == [prefix in living for prefix in prefixes]
        assert mask.num_by_level[length - 1] == len(living)
    assert alive_of(mask.bits_by_level[-1], NUM_ITEMS) == shown.tolist()
    assert mask.num_by_level[-1] == shown.sum()


def test_exclusions_of_a_request_do_not_affect_the_next() -> None:
    """Requests share a filter's mask without changing it, also for filters evicted from the cache."""
    masks, _ = build(3)
    rng = np.random.default_rng(1)
    filters = [rng.random(NUM_ITEMS) < 0.5 for _ in range(30)]
    first = [masks.of(allowed, NOTHING).num_by_level for allowed in filters]

    for allowed in filters:
        masks.of(allowed, np.flatnonzero(allowed)[::2])

    assert [masks.of(allowed, NOTHING).num_by_level for allowed in filters] == first
    assert masks.of(None, NOTHING).num_by_level[-1] == NUM_ITEMS
