"""Scores items by the meaning of words that name nothing in the catalogue: "gunslingers at high noon" is a western.

A text's vector is compared with the vector of each value, which is that of the value's name plus the mean of its
items. A softmax turns the similarities into probabilities of values; an item's score is the logarithm of the
probability of its values, over that of a typical item. A text that is near no value scores nothing.

    values.json        [[attribute, value], ...]
    values.npy         (C, D) float32, the values' vectors, of length 1
    items.npy          (V, D) int8, the items' vectors times 127; (0, D) for a large catalogue

Shape suffixes: V items, C values, D size of a vector, N texts.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np

from models.errors import BundleCorrupt
from models.mixer import softmax
from models.wishes.language import english
from models.wishes.titles import natural_title
from models.wishes.vocabulary import Term, Vocabulary, WishItem, values_of

VALUES, VALUE_VECTORS, ITEM_VECTORS = "values.json", "values.npy", "items.npy"
MAX_VALUES = 2_000
"""Maximum number of values with a vector; values of more items come first."""
MAX_ITEMS = 20_000
"""Items of a catalogue whose texts are compared with a wish: above, only its values are."""
_NUM_SAMPLED = 16
_BATCH = 512
_SCALE = 127.0
_TEMPERATURE = 0.03
_BACKGROUND = 0.02
"""Probability of a value for any item, independent of the item's own values."""
Progress = Callable[[int, int, str], None]


class TextEncoder(Protocol):
    """Turns texts into vectors of length 1; texts of similar meaning have similar vectors. Thread-safe."""

    @property
    def size(self) -> int: ...

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Return the vectors (N, D) float32 of texts."""
        ...


LoadEncoder = Callable[[Path], TextEncoder | None]
"""Loads the encoder of a reader's folder; None in a folder without one. Raises BundleCorrupt."""


@dataclass(frozen=True, eq=False)
class Meaning:
    """The encoder and the vectors of a vocabulary's values and items. Thread-safe."""

    encoder: TextEncoder
    values: tuple[Term, ...]
    values_CD: np.ndarray
    items_VD: np.ndarray

    def read(self, texts: Sequence[str], vocabulary: Vocabulary) -> tuple[np.ndarray, np.ndarray]:
        """Return the scores of items by values (N, V) and by their own texts (N, V), for each of these texts."""
        vectors_ND = self.encoder.encode(texts)
        counts_N, by_value_NV = zip(*(self._by_value(vector_D, vocabulary) for vector_D in vectors_ND), strict=True)
        if not len(self.items_VD):
            return np.stack(by_value_NV), np.zeros((len(texts), len(vocabulary.items)), dtype=np.float32)
        similar_NV = vectors_ND @ self._floats_VD.T
        centred_NV = similar_NV - similar_NV.mean(axis=1, keepdims=True)
        scaled_NV = centred_NV / np.maximum(centred_NV.std(axis=1, keepdims=True), 1e-6)
        return np.stack(by_value_NV), scaled_NV * np.array(counts_N, dtype=np.float32)[:, None]

    def _by_value(self, vector_D: np.ndarray, vocabulary: Vocabulary) -> tuple[float, np.ndarray]:
        """Return how much a text counts, from 0 to 1, and the scores (V,) of items by its probable values."""
        similar_C = self.values_CD @ vector_D
        of_values_C = softmax(similar_C / _TEMPERATURE)
        counts = 1 - float(of_values_C[self._is_filler_C].sum())
        sums_V = np.full(len(vocabulary.items), _BACKGROUND, dtype=np.float32)
        for index in np.flatnonzero(of_values_C > _BACKGROUND / 10).tolist():
            sums_V[vocabulary.items_of.get(self.values[index], [])] += of_values_C[index]
        return counts, np.log(sums_V) - np.log(sums_V.mean())

    @cached_property
    def _floats_VD(self) -> np.ndarray:
        return self.items_VD.astype(np.float32)

    @cached_property
    def _is_filler_C(self) -> np.ndarray:
        return np.array([not value.attribute for value in self.values], dtype=bool)

    def with_items(self, items: Sequence[WishItem], places: Sequence[int], num_items: int) -> "Meaning":
        """Return the vectors with these items at these places."""
        items_VD = self.items_VD
        if len(items_VD):
            items_VD = np.zeros((num_items, self.items_VD.shape[1]), dtype=np.int8)
            items_VD[: len(self.items_VD)] = self.items_VD
            items_VD[list(places)] = as_int8(self.encoder.encode([text_of(item) for item in items]))
        known = set(self.values)
        fresh = sorted({value for item in items for value in values_of(item)} - known, key=lambda value: value.value)
        names = self.encoder.encode([value.value for value in fresh[: max(0, MAX_VALUES - len(known))]])
        return Meaning(
            self.encoder,
            (*self.values, *fresh[: len(names)]),
            np.concatenate([self.values_CD, names]),
            items_VD,
        )

    def save(self, folder: Path) -> None:
        """Write the vectors into a reader's folder."""
        (folder / VALUES).write_text(json.dumps([[value.attribute, value.value] for value in self.values]))
        np.save(folder / VALUE_VECTORS, self.values_CD)
        np.save(folder / ITEM_VECTORS, self.items_VD)


def text_of(item: WishItem) -> str:
    """Return the text of an item that is encoded."""
    values = ", ".join(value.value for value in values_of(item))
    return f"{natural_title(item.title)}. {values}" if values else natural_title(item.title)


def as_int8(vectors: np.ndarray) -> np.ndarray:
    return np.round(vectors * _SCALE).astype(np.int8)


def measure(
    encoder: TextEncoder, vocabulary: Vocabulary, texts: Sequence[str], progress: Progress = lambda *_: None
) -> Meaning:
    """Encode the values of most items, and the items, given their texts.

    Of a catalogue of more than `MAX_ITEMS`, only some items of each value are encoded, and their vectors are not kept.
    """
    values = sorted(vocabulary.items_of, key=lambda value: -len(vocabulary.items_of[value]))[:MAX_VALUES]
    is_large = len(texts) > MAX_ITEMS
    of_values = [vocabulary.items_of[value][: _NUM_SAMPLED if is_large else None] for value in values]
    encoded = np.unique(np.concatenate(of_values)) if is_large and values else np.arange(len(texts))
    vectors_RD = np.zeros((len(encoded), encoder.size), dtype=np.float32)
    for start in range(0, len(encoded), _BATCH):
        batch = encoded[start : start + _BATCH]
        vectors_RD[start : start + _BATCH] = encoder.encode([texts[item] for item in batch.tolist()])
        progress(start + len(batch), len(encoded), "items encoded")
    names_CD = encoder.encode([value.value for value in values])
    means_CD = np.zeros_like(names_CD)
    for index, items in enumerate(of_values):
        means_CD[index] = vectors_RD[np.searchsorted(encoded, items)].mean(axis=0)
    fillers = english().fillers
    return Meaning(
        encoder,
        (*values, *(Term("", filler) for filler in fillers)),
        np.concatenate([_unit(names_CD + _unit(means_CD)), encoder.encode(fillers)]),
        as_int8(vectors_RD[:0] if is_large else vectors_RD),
    )


def load_meaning(folder: Path, num_items: int, load_encoder: LoadEncoder) -> Meaning | None:
    """Read the files of `save`; None in a folder without an encoder. Raises BundleCorrupt."""
    encoder = load_encoder(folder)
    if encoder is None:
        return None
    try:
        values = tuple(Term(attribute, value) for attribute, value in json.loads((folder / VALUES).read_text()))
        values_CD, items_VD = np.load(folder / VALUE_VECTORS), np.load(folder / ITEM_VECTORS, mmap_mode="r")
    except (OSError, ValueError, TypeError) as error:
        raise BundleCorrupt(f"{folder}: not a reader of wishes ({error})") from error
    shapes = values_CD.shape, items_VD.shape
    if shapes[0] != (len(values), encoder.size) or shapes[1] not in ((num_items, encoder.size), (0, encoder.size)):
        raise BundleCorrupt(f"{folder}: vectors of shapes {shapes} for {len(values)} values and {num_items} items")
    return Meaning(encoder, values, values_CD, items_VD)


def _unit(rows: np.ndarray) -> np.ndarray:
    unit: np.ndarray = (rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-9)).astype(np.float32)
    return unit
