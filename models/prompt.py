"""Converts a history to a prompt, identically in training and in serving.

A history grows at its end. Truncating it to the newest `max_items` at every event would shift every position and
invalidate the prefix cache each time. So it is truncated by whole strides: the start is fixed for `stride` events,
during which each prompt is a prefix of the next prompt.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from models.catalogue import BOS_TOKEN, Catalogue

STRIDE_ITEMS = 50
"""Stride in items of the truncation of histories, the same in prompts and in stored rows."""


def window_start(num_items: int, max_items: int, stride: int) -> int:
    """Return the index of the first item kept: the smallest multiple of `stride` that keeps at most `max_items`."""
    overflow = max(0, num_items - max_items)
    return -(-overflow // stride) * stride


def prompt_limits(manifest: Mapping[str, Any]) -> tuple[int, int]:
    """Return a bundle's maximum number of prompt items and its stride, from its manifest."""
    given = manifest.get("prompt", {})
    return int(given.get("max_items", 200)), int(given.get("stride", STRIDE_ITEMS))


def prompt_window(num_items: int, manifest: Mapping[str, Any]) -> tuple[int, int]:
    """Return the index of the first history item in the prompt, and the number of items in the prompt."""
    start = window_start(num_items, *prompt_limits(manifest))
    return start, num_items - start


def prompt_tokens(catalogue: Catalogue, history: Sequence[int], max_items: int, stride: int) -> list[int]:
    """Return the prompt of item indices (oldest first): the beginning token, then depth tokens for each kept item."""
    return [BOS_TOKEN, *catalogue.tokens(history[window_start(len(history), max_items, stride) :])]
