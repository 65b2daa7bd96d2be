"""Cuts sequences into windows and packs windows into batches with little padding. Pure: randomness is an argument.

A batch holds windows of similar length. Its tokens begin with BOS; the label at each position is the next item; padding
carries `IGNORED` and follows all real positions, so causal attention never reads it.

A disliked item is scored from the history before it and never appears in a window as an item that others are predicted
from. Where an item is one token, the position that predicts the next item also scores the dislike, and a window with a
dislike after its last item is one position longer. Where an item has several tokens, its later tokens are predicted
from its earlier ones, so a dislike needs its own row: the history, then the item, without labels. To bound the cost, an
epoch has one such row per window, drawn among the window's dislikes by weight and weighted by their sum.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from models.catalogue import BOS_TOKEN, Catalogue
from pipelines.data.labelled import Dislikes, Labelled, Weighted, dislikes_in, items_of, weights_of

IGNORED = -1


@dataclass(frozen=True, slots=True)
class Disliked:
    """Dislikes of a batch's rows, each (B, M): item index, number of the row's items before it, weight (0: padding)."""

    items: Tensor
    places: Tensor
    weights: Tensor

    def each(self, change: Callable[[Tensor], Tensor]) -> "Disliked":
        """Return a copy with `change` applied to each tensor."""
        return Disliked(*(change(getattr(self, field.name)) for field in fields(self)))

    def found(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return row, position, item and weight of each dislike, (U,) each."""
        at = self.weights.nonzero(as_tuple=True)
        return at[0], self.places[at], self.items[at], self.weights[at]


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens and labels (B, L) int64. A label is the next token, or IGNORED; `is_label` (B, L) marks learned labels.

    `weights` (B, L) weigh the labels in the loss (None: all 1). `lengths` are the rows' lengths without padding, kept
    on the host. `digest` hashes the content when several processes compare their batches.
    """

    tokens: Tensor
    labels: Tensor
    is_label: Tensor
    lengths: tuple[int, ...]
    digest: int = 0
    weights: Tensor | None = None
    disliked: Disliked | None = None

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on this device. Copies to a GPU are asynchronous, from pinned memory."""

        def moved(tensor: Tensor) -> Tensor:
            return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)

        return self.each(moved)

    def each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        """Return the batch with `change` applied to each tensor; lengths and digest stay."""
        weights = None if self.weights is None else change(self.weights)
        disliked = None if self.disliked is None else self.disliked.each(change)
        tokens, labels, is_label = (change(part) for part in (self.tokens, self.labels, self.is_label))
        return Batch(tokens, labels, is_label, self.lengths, self.digest, weights, disliked)

    def signed(self) -> "Batch":
        """Return the batch, which is on the host, with a digest of its content."""
        parts: list[bytes] = []

        def add(part: Tensor) -> Tensor:
            parts.append(part.numpy().tobytes())
            return part

        self.each(add)
        return replace(self, digest=number_of(b"".join(parts)))


Loss = tuple[Tensor, int]
"""Mean loss of a batch's labels, and their number."""
LossFunction = Callable[[nn.Module, Batch], Loss]
MakeBatch = Callable[[], Batch]
"""A planned batch that builds its tensors on call. Building draws nothing, so it may run at any time and in any
thread."""


def cut_windows(sequences: Sequence[Labelled], max_items: int, rng: np.random.Generator) -> list[Labelled]:
    """Cut each sequence into windows of at most `max_items` from its end.

    Half of the time, the newest window is shorter by up to half. The random cut places each item at different positions
    in different epochs; every epoch contains the newest items. A single item that remains at the start is dropped.
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
    """Return batches to build, of at most `max_tokens` positions each (at least one window), in random order."""
    if catalogue.depth > 1:
        windows = [row for window in windows for row in _rows_of_window(window, rng)]
    groups = group_by_length([_num_positions(window, catalogue.depth) for window in windows], max_tokens, rng)
    return [
        partial(make_batch, [windows[index] for index in groups[number]], catalogue)
        for number in rng.permutation(len(groups))
    ]


def group_by_length(lengths: Sequence[int], max_tokens: int, rng: np.random.Generator) -> list[list[int]]:
    """Group indices of similar length such that size times longest length stays within `max_tokens`."""
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
    """Split a batch by rows into at most `num_parts` parts."""
    size = -(-len(batch.tokens) // num_parts)
    for start in range(0, len(batch.tokens), size):
        yield rows_of(batch, slice(start, start + size))


def rows_of(batch: Batch, rows: slice) -> Batch:
    return replace(batch.each(lambda part: part[rows]), lengths=batch.lengths[rows], digest=0)


def number_of(content: bytes) -> int:
    """Return a digest that fits into an int64."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), signed=True)


def make_batch(windows: Sequence[Labelled], catalogue: Catalogue) -> Batch:
    """Lay windows of item indices out as tokens, padded to the longest. Items of weight 0 are not labels."""
    lengths = tuple(_num_positions(window, catalogue.depth) for window in windows)
    tokens = np.full((len(windows), max(lengths)), BOS_TOKEN, dtype=np.int64)
    labels = np.full_like(tokens, IGNORED)
    weights = np.zeros_like(tokens, dtype=np.float32)
    for row, (window, length) in enumerate(zip(windows, lengths, strict=True)):
        encoded = np.array(catalogue.tokens(items_of(window)), dtype=np.int64)
        tokens[row, 1:length] = encoded[: length - 1]
        labels[row, : len(encoded)] = encoded
        weights[row, : len(encoded)] = np.repeat(weights_of(window), catalogue.depth)
    is_even = bool(np.isin(weights, (0, 1)).all())
    return Batch(
        torch.from_numpy(tokens),
        torch.from_numpy(labels),
        torch.from_numpy(weights > 0),
        lengths,
        weights=None if is_even else torch.from_numpy(weights),
        disliked=_disliked([dislikes_in(window) for window in windows]),
    )


def _num_positions(window: Labelled, depth: int) -> int:
    """Return the number of a window's positions: one more than its items' if a dislike follows all of them."""
    dislikes = dislikes_in(window)
    return len(window) * depth + (dislikes is not None and int(dislikes.places.max()) == len(window))


def _rows_of_window(window: Labelled, rng: np.random.Generator) -> Iterator[Labelled]:
    """Yield the window without its dislikes, then one of its dislikes as a separate row."""
    dislikes = dislikes_in(window)
    if dislikes is None:
        yield window
        return
    items = items_of(window)
    yield Weighted(items, weights_of(window))
    total = dislikes.weights.sum()
    index = int(rng.choice(len(dislikes), p=dislikes.weights / total))
    item, position = dislikes.items[index], int(dislikes.places[index])
    own = Dislikes(np.array([item]), np.array([position]), np.array([total]))
    yield Weighted(np.append(items[:position], item), np.zeros(position + 1, dtype=np.float32), own)


def _disliked(of_rows: Sequence[Dislikes | None]) -> Disliked | None:
    """Lay out the dislikes of the rows; None if there are none."""
    most = max(0 if dislikes is None else len(dislikes) for dislikes in of_rows)
    if not most:
        return None
    items, places = np.zeros((2, len(of_rows), most), dtype=np.int64)
    weights = np.zeros((len(of_rows), most), dtype=np.float32)
    for row, dislikes in enumerate(of_rows):
        if dislikes is not None:
            number = len(dislikes)
            items[row, :number], places[row, :number] = dislikes.items, dislikes.places
            weights[row, :number] = dislikes.weights
    return Disliked(*(torch.from_numpy(values) for values in (items, places, weights)))
