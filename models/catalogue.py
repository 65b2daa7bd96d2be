"""The catalogue of a bundle: items, their codes, and the items that a request may return.

Numpy only; pyarrow for files; no torch. An item's *index* (0 to n-1, by item id order in the catalogue file) is
internal; its *id* is the caller's string. A code of depth L is L integers; the integer of level l is in [0,
level_sizes[l]). The decoder's token for code c at level l is `token_offsets[l] + c`. In our own decoders, token 0 is
the beginning of a history and the levels follow; a decoder that was trained elsewhere has explicit `first_tokens`.
"""

import difflib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass
from functools import cached_property
from heapq import nlargest
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np

from models.errors import BundleCorrupt, InvalidRequest

if TYPE_CHECKING:
    import pyarrow as pa

BOS_TOKEN = 0
NUM_SPECIAL_TOKENS = 1
_NUM_OFFERED, _NUM_LIKELY, _MAX_COMPARED = 3, 16, 1_000
_SLICE_ITEMS = 1_000


@dataclass(frozen=True, eq=False)
class ItemTexts:
    """Ids, titles and categories of items in index order, and the tables derived from them."""

    item_ids: tuple[str, ...]
    titles: tuple[str, ...]
    categories: tuple[tuple[str, ...], ...]

    @cached_property
    def index_of(self) -> dict[str, int]:
        return {item_id: index for index, item_id in enumerate(self.item_ids)}

    @cached_property
    def items_by_category(self) -> dict[str, np.ndarray]:
        """The indices of the items that have a category, by its name."""
        members: dict[str, list[int]] = {}
        for index, names in enumerate(self.categories):
            for name in names:
                members.setdefault(name, []).append(index)
        return {name: np.array(indices) for name, indices in members.items()}


_TEXTS: WeakValueDictionary[bytes, ItemTexts] = WeakValueDictionary()
"""The texts in use, by a hash of their columns."""


@dataclass(frozen=True, eq=False)
class Catalogue:
    """Items in index order. Bundles with equal catalogue files share one object in a process, and its texts if equal.

    `codes` is (num_items, depth) int32; `popularity` (num_items,) float64 counts of training events.
    """

    item_ids: tuple[str, ...]
    titles: tuple[str, ...]
    categories: tuple[tuple[str, ...], ...]
    codes: np.ndarray
    level_sizes: tuple[int, ...]
    popularity: np.ndarray
    first_tokens: tuple[int, ...] | None = None
    """First token of each level, in the vocabulary of a decoder that was trained elsewhere."""
    shared_texts: InitVar[ItemTexts | None] = None
    """Its ids, titles and categories as an object that other catalogues share, if there is one."""

    def __post_init__(self, shared_texts: ItemTexts | None) -> None:
        """Keep the shared texts as `texts`."""
        if shared_texts is not None:
            object.__setattr__(self, "texts", shared_texts)

    @property
    def depth(self) -> int:
        """Number of tokens of an item."""
        return len(self.level_sizes)

    @property
    def vocab_size(self) -> int:
        """Minimum number of tokens of the decoder. Our own: special tokens and the codes of every level."""
        return max(first + size for first, size in zip(self.token_offsets, self.level_sizes, strict=True))

    @cached_property
    def token_offsets(self) -> tuple[int, ...]:
        """First token of each level."""
        if self.first_tokens is not None:
            return self.first_tokens
        return tuple(NUM_SPECIAL_TOKENS + sum(self.level_sizes[:level]) for level in range(self.depth))

    @cached_property
    def texts(self) -> ItemTexts:
        """Its ids, titles and categories: the key of what is derived from them."""
        return ItemTexts(self.item_ids, self.titles, self.categories)

    @cached_property
    def index_of(self) -> dict[str, int]:
        return self.texts.index_of

    @cached_property
    def _items_by_category(self) -> dict[str, np.ndarray]:
        return self.texts.items_by_category

    def indices(self, item_ids: Iterable[str]) -> list[int]:
        """Return the indices of these ids in order; unknown ids are skipped."""
        known = self.index_of
        return [known[item_id] for item_id in item_ids if item_id in known]

    def tokens(self, indices: Iterable[int]) -> list[int]:
        """Return the tokens of these items: depth tokens each, in order."""
        index = np.fromiter(indices, dtype=np.int64)
        return (self.codes[index] + np.array(self.token_offsets, dtype=np.int32)).ravel().tolist()

    def allowed(
        self,
        *,
        categories: Sequence[str] | None = None,
        allowed_item_ids: Sequence[str] | None = None,
        excluded_item_ids: Iterable[str] = (),
    ) -> np.ndarray:
        """Return the mask (num_items,) bool of the items in any of these categories that are allowed and not excluded.

        None means no limit. Unknown names and ids are ignored.
        """
        mask = np.ones(len(self.item_ids), dtype=bool)
        if categories is not None:
            mask[:] = False
            for name in categories:
                mask[self._items_by_category.get(name, [])] = True
        if allowed_item_ids is not None:
            listed = np.zeros_like(mask)
            listed[self.indices(allowed_item_ids)] = True
            mask &= listed
        mask[self.indices(excluded_item_ids)] = False
        return mask

    def check_filters(
        self,
        categories: Sequence[str] | None,
        allowed_item_ids: Sequence[str] | None,
        is_category: Callable[[str], bool] = lambda _: False,
        is_item: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """Reject filters with unknown categories or items.

        `is_category` and `is_item` accept names from outside this catalogue.
        Raises InvalidRequest naming the entry.
        """
        for position, name in enumerate(categories or ()):
            if name not in self._items_by_category and not is_category(name):
                raise InvalidRequest(
                    f"filters.categories[{position}]", f"unknown category {name!r}", self._fix_of_category(name)
                )
        for position, item_id in enumerate(allowed_item_ids or ()):
            if item_id not in self.index_of and not is_item(item_id):
                raise InvalidRequest(
                    f"filters.allowed_item_ids[{position}]",
                    f"unknown item {item_id!r}",
                    "name an item of the catalogue",
                )

    @cached_property
    def _category_pairs(self) -> dict[str, frozenset[str]]:
        """Categories to compare with an unknown name, largest first, and their lower-case character pairs."""
        by_size = sorted(self._items_by_category, key=lambda name: -len(self._items_by_category[name]))
        return {name: _pairs(name) for name in by_size[:_MAX_COMPARED]}

    def _fix_of_category(self, name: str) -> str:
        """Return the categories closest to a name, or else the largest.

        Only the categories that share the most character pairs are compared in full.
        """
        pairs, wanted = self._category_pairs, _pairs(name)
        if not pairs:
            return "remove it: no item of this catalogue has a category"
        likely = nlargest(
            _NUM_LIKELY, pairs, key=lambda candidate: len(wanted & pairs[candidate]) / (1 + len(pairs[candidate]))
        )
        folded = {candidate.casefold(): candidate for candidate in likely}
        near = difflib.get_close_matches(name.casefold(), folded, n=_NUM_OFFERED)
        names = ", ".join(
            f"{candidate!r:.60}" for candidate in [folded[match] for match in near] or list(pairs)[:_NUM_OFFERED]
        )
        return f"the nearest: {names}" if near else f"name one that items have, for example {names}"

    def save(self, path: Path) -> None:
        """Write the catalogue to a Parquet file, with the level sizes in its metadata."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = pa.table(
            {
                "item_id": pa.array(self.item_ids),
                "title": pa.array(self.titles),
                "categories": pa.array([list(names) for names in self.categories], pa.list_(pa.string())),
                "code": pa.array(self.codes.tolist(), pa.list_(pa.int32())),
                "popularity": pa.array(self.popularity),
            }
        )
        levels = {"level_sizes": self.level_sizes, "first_tokens": self.first_tokens}
        metadata = {name: ",".join(map(str, values)) for name, values in levels.items() if values is not None}
        pq.write_table(table.replace_schema_metadata(metadata), path)


def _pairs(name: str) -> frozenset[str]:
    folded = name.casefold()
    return frozenset(folded[start : start + 2] for start in range(max(1, len(folded) - 1)))


def load_catalogue(path: Path) -> Catalogue:
    """Read a catalogue that `save` wrote. Raises BundleCorrupt."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(path).read()
        sizes, first_tokens = _levels_of(table.schema.metadata or {})
        texts = _texts_of(table)
        return Catalogue(
            item_ids=texts.item_ids,
            titles=texts.titles,
            categories=texts.categories,
            codes=_codes_of(table["code"]),
            level_sizes=sizes,
            popularity=numbers_of(table["popularity"]),
            first_tokens=first_tokens,
            shared_texts=texts,
        )
    except (OSError, KeyError, ValueError, pa.ArrowException) as error:
        raise BundleCorrupt(f"{path}: not a catalogue ({error})") from error


def _texts_of(table: "pa.Table") -> ItemTexts:
    """Return the texts of a catalogue: those in use if they are equal, or else new objects."""
    item_ids, titles, categories = (table[name] for name in ("item_id", "title", "categories"))
    digest = _digest((item_ids, titles, categories))
    texts = _TEXTS.get(digest)
    if texts is None:
        known: dict[tuple[str, ...], tuple[str, ...]] = {}
        names = tuple(known.setdefault(of_item, of_item) for of_item in map(tuple, _values(categories)))
        texts = _TEXTS[digest] = ItemTexts(tuple(_values(item_ids)), tuple(_values(titles)), names)
    return texts


def _digest(columns: "Iterable[pa.ChunkedArray]") -> bytes:
    """Return the SHA-256 of the columns' types and memory, computed without the interpreter's lock."""
    digest = hashlib.sha256()
    for chunk in (chunk for column in columns for chunk in column.chunks):
        buffers = chunk.buffers()
        sizes = [None if buffer is None else buffer.size for buffer in buffers]
        digest.update(f"{chunk.type} {len(chunk)} {chunk.offset} {sizes};".encode())
        for buffer in buffers:
            digest.update(buffer or b"")
    return digest.digest()


def _values(column: "pa.ChunkedArray") -> Iterator[Any]:
    """Yield a column's values, converted in slices: a conversion holds the interpreter, and requests wait for it."""
    for first in range(0, len(column), _SLICE_ITEMS):
        yield from column.slice(first, _SLICE_ITEMS).to_pylist()


def _codes_of(column: "pa.ChunkedArray") -> np.ndarray:
    """Return the codes (V, C) of a column of lists, without an object for each. Raises ValueError if they differ."""
    import pyarrow.compute as pc

    flat = pc.list_flatten(column)
    depth = len(flat) // max(1, len(column))
    if column.null_count or flat.null_count or (numbers_of(pc.list_value_length(column)) != depth).any():
        raise ValueError("codes of different lengths")
    return numbers_of(flat).astype(np.int32).reshape(len(column), depth)


def numbers_of(column: "pa.ChunkedArray") -> np.ndarray:
    """Return a column of numbers without nulls. `to_numpy` would import pandas, 0.3 s of a process's start."""
    numbers: np.ndarray = np.from_dlpack(column.combine_chunks())
    return numbers


def _levels_of(metadata: Mapping[bytes, bytes]) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Return the level sizes, and the explicit first tokens if any. Raises KeyError or ValueError."""
    sizes, first_tokens = (
        tuple(int(value) for value in metadata[name].decode().split(",")) if name in metadata else None
        for name in (b"level_sizes", b"first_tokens")
    )
    if sizes is None:
        raise KeyError("level_sizes")
    if first_tokens is not None and (len(first_tokens) != len(sizes) or min(first_tokens) < 0):
        raise ValueError(f"first_tokens: {first_tokens} for {len(sizes)} levels")
    return sizes, first_tokens


def load_item_ids(path: Path) -> tuple[str, ...]:
    """Read only the item ids of a catalogue that `save` wrote, in index order. Raises BundleCorrupt."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return tuple(_values(pq.ParquetFile(path).read(["item_id"])["item_id"]))
    except (OSError, KeyError, ValueError, pa.ArrowException) as error:
        raise BundleCorrupt(f"{path}: not a catalogue ({error})") from error
