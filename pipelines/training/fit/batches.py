"""Cuts sequences into windows and windows into batches with little padding. Pure: randomness is an argument.

A batch holds windows of about one length. Its tokens begin with BOS; the label at each position is the next item; positions
past a window's end carry `IGNORED` and come after all real ones, so causal attention never reads them.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from models.catalogue import BOS_TOKEN, Catalogue
from pipelines.data.labelled import Labelled, items_of, weights_of

IGNORED = -1


@dataclass(frozen=True, slots=True)
class Batch:
    """`tokens` and `labels` are (B, L) int64. A label is the token that follows, or IGNORED. `is_label` (B, L): whether it is learned from.

    `weights` (B, L) are those of the labels in the loss; None: all are 1. `lengths` are the rows' positions without padding, on the host whatever the device. `digest` is that of its content where several processes compare theirs.
    """

    tokens: Tensor
    labels: Tensor
    is_label: Tensor
    lengths: tuple[int, ...]
    digest: int = 0
    weights: Tensor | None = None

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on this device. To a GPU it goes from pinned memory, without waiting for the copy."""

        def moved(tensor: Tensor) -> Tensor:
            return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)

        weights = None if self.weights is None else moved(self.weights)
        return Batch(moved(self.tokens), moved(self.labels), moved(self.is_label), self.lengths, self.digest, weights)

    def signed(self) -> "Batch":
        """Return the batch, which is on the host, with the digest of its content."""
        parts = (self.tokens, self.labels, self.is_label, *(() if self.weights is None else (self.weights,)))
        return replace(self, digest=number_of(b"".join(part.numpy().tobytes() for part in parts)))


MakeBatch = Callable[[], Batch]
"""Lays one batch out. It draws nothing, so it may run at any time and in any thread."""


def cut_windows(sequences: Sequence[Labelled], max_items: int, rng: np.random.Generator) -> list[Labelled]:
    """Cut each sequence into windows of at most `max_items` from its end, of which half of the time the newest is up to half as long.

    The moving cuts put each item at other positions in other epochs, and every epoch holds the newest. A single item that remains at the beginning is dropped.
    """
    windows = []
    for sequence in sequences:
        end, size = len(sequence), max_items
        if end > max_items and rng.random() < 0.5:
            size -= int(rng.integers(0, max_items // 2))
        while end > 1:
            start = max(0, end - size)
            windows.append(sequence[start:end])
            end, size = start, max_items
    return windows


def batch_windows(
    windows: Sequence[Labelled], catalogue: Catalogue, max_tokens: int, rng: np.random.Generator
) -> list[MakeBatch]:
    """Return what makes batches of at most `max_tokens` positions each (one window at least), in random order."""
    groups = group_by_length([len(window) * catalogue.depth for window in windows], max_tokens, rng)
    return [
        partial(make_batch, [windows[index] for index in groups[number]], catalogue)
        for number in rng.permutation(len(groups))
    ]


def group_by_length(lengths: Sequence[int], max_tokens: int, rng: np.random.Generator) -> list[list[int]]:
    """Put indices of about equal length together, so that no group's size times its longest exceeds `max_tokens`."""
    shuffled = rng.permutation(len(lengths))
    by_length = shuffled[np.argsort(np.asarray(lengths)[shuffled], kind="stable")]
    groups: list[list[int]] = []
    for index in by_length.tolist():
        if groups and lengths[index] * (len(groups[-1]) + 1) <= max_tokens:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def split_batch(batch: Batch, num_parts: int) -> Iterator[Batch]:
    """Split a batch by its rows into at most this many parts."""
    size = -(-len(batch.tokens) // num_parts)
    for start in range(0, len(batch.tokens), size):
        yield rows_of(batch, slice(start, start + size))


def rows_of(batch: Batch, rows: slice) -> Batch:
    """Return a batch of these rows."""
    weights = None if batch.weights is None else batch.weights[rows]
    return Batch(batch.tokens[rows], batch.labels[rows], batch.is_label[rows], batch.lengths[rows], weights=weights)


def number_of(content: bytes) -> int:
    """Return a digest that fits into an int64."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), signed=True)


def make_batch(windows: Sequence[Labelled], catalogue: Catalogue) -> Batch:
    """Lay windows of item indices out as tokens, padded to the longest. Items of weight 0 are no labels."""
    lengths = tuple(len(window) * catalogue.depth for window in windows)
    tokens = np.full((len(windows), max(lengths)), BOS_TOKEN, dtype=np.int64)
    labels = np.full_like(tokens, IGNORED)
    weights = np.zeros_like(tokens, dtype=np.float32)
    for row, window in enumerate(windows):
        encoded = np.array(catalogue.tokens(items_of(window)), dtype=np.int64)
        tokens[row, 1 : len(encoded)] = encoded[:-1]
        labels[row, : len(encoded)] = encoded
        weights[row, : len(encoded)] = np.repeat(weights_of(window), catalogue.depth)
    is_even = bool(np.isin(weights, (0, 1)).all())
    return Batch(
        torch.from_numpy(tokens),
        torch.from_numpy(labels),
        torch.from_numpy(weights > 0),
        lengths,
        weights=None if is_even else torch.from_numpy(weights),
    )
