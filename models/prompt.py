"""How a history becomes a prompt, in training and in serving alike.

A history grows at its end. Cutting it to the newest `max_items` at every event would move every position and void the
prefix cache each time, so it is cut by whole strides: the start stays put for `stride` events, and meanwhile the next
request's prompt has the last one's as its prefix.
"""

from collections.abc import Sequence

from models.catalogue import BOS_TOKEN, Catalogue

STRIDE_ITEMS = 50
"""By how many items a history is cut at once: in prompts, and in the stored rows, so that both cuts fall together."""


def window_start(num_items: int, max_items: int, stride: int) -> int:
    """Return the index of the first item kept: a multiple of `stride`, and the smallest that keeps at most `max_items`."""
    overflow = max(0, num_items - max_items)
    return -(-overflow // stride) * stride


def prompt_tokens(catalogue: Catalogue, history: Sequence[int], max_items: int, stride: int) -> list[int]:
    """Spell a history of item indices (oldest first): the beginning token, then depth tokens for each kept item."""
    return [BOS_TOKEN, *catalogue.tokens(history[window_start(len(history), max_items, stride) :])]
