"""The items of one bundle and the items that only the live catalogue has, each at its index, with their states.

Numpy only.

    0 ... num_known-1        the bundle's items, by the bundle's index
    num_known ...            items that only the live catalogue has, in order of appearance
    ... num_items-1          unused slots

An index keeps its item for the life of the layout. Written by one thread at a time, read by any: a reader that needs
many cells takes `columns` once. No clock: times are arguments.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import msgspec
import numpy as np

from models.catalogue import Catalogue
from services.contracts.items import MAX_NAMES, AttributeValue, ItemState
from services.errors import InvalidRequest
from services.items.columns import FlagColumn, ItemColumns, NumberColumn, TextColumn

STATED, HIDDEN, DELETED, HAS_CATEGORIES = 1, 2, 4, 8
"""The bits of an item's status."""
_OWN_TEXTS, _OWN_NUMBERS = frozenset({"categories"}), frozenset({"value", "published_ms", "expires_ms", "popularity"})
_MIN_SPARE = 64
_SPARE_SHARE = 16
"""A sixteenth of the items are spare slots, so that columns are rarely copied."""
_MAX_CATEGORY_BYTES = 16 * 1_048_576
_FEW_NAMES, _FEW_NAMES_BYTES = 8, 10_000
"""Limits of cached category masks: number of categories per mask, and bytes of their names."""
NO_CATALOGUE = Catalogue((), (), (), np.zeros((0, 1), dtype=np.int32), (0,), np.zeros(0))


class ItemLayout:
    """Index, names and columns of all items of one catalogue."""

    def __init__(self, catalogue: Catalogue, categories: TextColumn | None = None, num_new: int = 0) -> None:
        """Lay out a catalogue without states, with slots for `num_new` new items and some spare.

        `categories` is a column whose table of texts the new column shares.
        """
        self.catalogue = catalogue
        self.num_known = len(catalogue.item_ids)
        num_items = _with_spare(self.num_known + num_new)
        self.columns = ItemColumns(num_items, np.arange(num_items) < self.num_known)
        self.status = np.zeros(num_items, dtype=np.uint8)
        self.revision = 0
        """Changes with every change of the items that may be shown."""
        self.words_revision = 0
        """Changes after every change of title or categories of an item that the bundle lacks."""
        self.reworded_revision = 0
        """Changes after every change of title or categories of an item of the bundle."""
        self._new_ids: list[str] = []
        self._new_index: dict[str, int] = {}
        self.stated_titles: dict[int, str] = {}
        """Titles by index, of items whose title is not the bundle's."""
        self._category_masks: dict[tuple[str, ...], tuple[TextColumn, int, np.ndarray]] = {}
        column = self.columns.text("categories")
        if categories is not None:
            column.values, column.code_of = categories.values, categories.code_of
        column.codes[: self.num_known] = column.all_codes(catalogue.categories)
        column.count()
        popularity = self.columns.number("popularity").numbers
        popularity[:] = 0.0
        popularity[: self.num_known] = catalogue.popularity

    @property
    def num_named(self) -> int:
        """The number of items: lower indices have an item."""
        return self.num_known + len(self._new_ids)

    @property
    def new_ids(self) -> list[str]:
        """The items that the catalogue lacks and that are not deleted, in order of appearance."""
        deleted = self.status[self.num_known : self.num_named] & DELETED
        return [item_id for item_id, is_deleted in zip(self._new_ids, deleted, strict=True) if not is_deleted]

    def index(self, item_id: str) -> int | None:
        """Return an item's index; None if neither the bundle nor the live catalogue has it."""
        known = self.catalogue.index_of.get(item_id)
        return self._new_index.get(item_id) if known is None else known

    @property
    def lookup(self) -> Callable[[str], int | None]:
        """`index` as of now, for many items: the catalogue's own dictionary while no item is new."""
        return self.index if self._new_index else self.catalogue.index_of.get

    def has(self, item_id: str) -> bool:
        """Return whether the bundle has an item, or the live catalogue has it and did not delete it."""
        index = self.index(item_id)
        return index is not None and (index < self.num_known or not self.status[index] & DELETED)

    def reworded(self) -> list[int]:
        """Return the indices of the bundle's items whose title or categories are no longer the bundle's."""
        named = {*self.stated_titles, *np.flatnonzero(self.status[: self.num_known] & HAS_CATEGORIES).tolist()}
        column, catalogue = self.columns.texts["categories"], self.catalogue
        return [
            index
            for index in sorted(named)
            if index < self.num_known
            and (self.title(index), column.values[column.codes[index]])
            != (catalogue.titles[index], catalogue.categories[index])
        ]

    @property
    def text_revision(self) -> tuple[int, int]:
        """Changes after every change of the title or categories of an item."""
        return self.words_revision, self.reworded_revision

    def item_id(self, index: int) -> str:
        """Return the id of the item at an index below `num_named`."""
        return self.catalogue.item_ids[index] if index < self.num_known else self._new_ids[index - self.num_known]

    def title(self, index: int) -> str:
        """Return an item's title: its stated title, else the bundle's, else its id."""
        title = self.stated_titles.get(index) if self.stated_titles else None
        if title is not None:
            return title
        return self.catalogue.titles[index] if index < self.num_known else self.item_id(index)

    def indices(self, item_ids: Iterable[str]) -> list[int]:
        """Return the indices of these items in order; unknown ids are skipped."""
        return [index for index in map(self.lookup, item_ids) if index is not None]

    def allowed(
        self,
        *,
        categories: tuple[str, ...] | None = None,
        allowed_item_ids: Sequence[str] | None = None,
        excluded_item_ids: Iterable[str] = (),
    ) -> np.ndarray:
        """Return a mask (num_items,) bool of the items to show now: in any of these categories, allowed, not excluded.

        None means no limit. Unknown names and ids are ignored.
        """
        listed = None if allowed_item_ids is None else self.indices(allowed_item_ids)
        excluded = self.indices(excluded_item_ids)
        columns = self.columns  # after the indices: it has a slot for each
        mask = columns.available.copy()
        if categories is not None:
            mask &= self._of_categories(columns, categories)
        if listed is not None:
            is_listed = np.zeros_like(mask)
            is_listed[listed] = True
            mask &= is_listed
        if excluded:
            mask[excluded] = False
        return mask

    def check_filters(self, categories: Sequence[str] | None, allowed_item_ids: Sequence[str] | None) -> None:
        """Refuse filters with unknown categories or items. Raises InvalidRequest naming the entry."""
        column = self.columns.texts["categories"]
        num_with: list[np.ndarray] = []

        def is_category(name: str) -> bool:
            """Return whether an item has it. The items are counted once for all names."""
            if not (codes := column.codes_with(name)):
                return False
            if not num_with:
                num_with.append(np.bincount(column.codes, minlength=len(column.values)))
            return any(code < len(num_with[0]) and num_with[0][code] for code in codes)

        self.catalogue.check_filters(categories, allowed_item_ids, is_category, self.has)

    def _of_categories(self, columns: ItemColumns, names: tuple[str, ...]) -> np.ndarray:
        """Return which items are of any of these categories; do not write to it."""
        column = columns.texts["categories"]
        kept = self._category_masks.get(names)
        if kept is not None and kept[0] is column and kept[1] == column.revision:
            return kept[2]
        revision, mask = column.revision, column.holding(names)
        if len(names) > _FEW_NAMES:  # the names would be as large as a mask
            return mask
        if (len(self._category_masks) + 1) * (mask.nbytes + _FEW_NAMES_BYTES) > _MAX_CATEGORY_BYTES:
            self._category_masks.clear()
        self._category_masks[names] = (column, revision, mask)
        return mask

    def state(self, item_id: str) -> ItemState | None:
        """Return an item's state: empty if only the bundle knows it, None if it is unknown or deleted."""
        index = self.index(item_id)
        if index is None or self.status[index] & DELETED:
            return None
        status, columns = int(self.status[index]), self.columns
        attributes: dict[str, AttributeValue] = {}
        for name, texts in columns.texts.items():
            if name not in _OWN_TEXTS and (own := texts.values[texts.codes[index]]):
                attributes[name] = own[0] if len(own) == 1 else own
        for name, numbers in columns.numbers.items():
            if name not in _OWN_NUMBERS and not math.isnan(own := float(numbers.numbers[index])):
                attributes[name] = own
        for name, flags in columns.flags.items():
            if (own := int(flags.flags[index])) >= 0:
                attributes[name] = bool(own)
        categories = columns.texts["categories"]
        return ItemState(
            item_id=item_id,
            title=self.stated_titles.get(index),
            categories=categories.values[categories.codes[index]] if status & HAS_CATEGORIES else None,
            attributes=attributes,
            available=not status & HIDDEN,
            published_ms=self._time(index, "published_ms"),
            expires_ms=self._time(index, "expires_ms"),
            value=self._number(index, "value"),
        )

    def shown_state(self, item_id: str) -> ItemState | None:
        """Return an item as answers show it: its state, completed by the bundle's title and categories."""
        stated, index = self.state(item_id), self.index(item_id)
        if stated is None or index is None:
            return None
        categories = self.columns.texts["categories"]
        fields = {name: getattr(stated, name) for name in ItemState.__struct_fields__}
        fields["title"] = self.title(index) or None
        fields["categories"] = categories.values[categories.codes[index]]
        return ItemState(**fields)

    @property
    def num_names(self) -> int:
        """The number of attribute columns, at most MAX_NAMES."""
        columns = self.columns
        own = sum(name in columns.numbers for name in _OWN_NUMBERS)
        return len(columns.texts) + len(columns.numbers) + len(columns.flags) - own - len(_OWN_TEXTS)

    def check_names(self, state: ItemState, coming: set[tuple[str, str]]) -> None:
        """Refuse a state with more new attribute names than there is room for. Raises InvalidRequest.

        `coming` are the new names of earlier states in the request; this state's names are added.
        """
        for name, kind in self._new_names(state):
            coming.add((name, kind))
            if self.num_names + len(coming) > MAX_NAMES:
                problem = f"the catalogue holds {MAX_NAMES} attribute names, the maximum"
                raise InvalidRequest(
                    f"attributes.{name}", problem, "use an existing name, or remove one from all items"
                )

    def _new_names(self, state: ItemState) -> list[tuple[str, str]]:
        """Return the name and kind of each attribute without a column."""
        given = ((name, _kind(value)) for name, value in state.attributes.items())
        return [(name, kind) for name, kind in given if name not in getattr(self.columns, kind)]

    def has_room(self, name: str, kind: str) -> bool:
        """Return whether a column of this name and kind (`texts`, `numbers`, `flags`) exists or has room."""
        return name in getattr(self.columns, kind) or self.num_names < MAX_NAMES

    def put(self, item_id: str, state: ItemState | None, now_ms: int) -> int:
        """Replace the whole state of an item. None deletes it, also an unknown item: a later bundle may contain it.

        Return the number of its attributes dropped for lack of room.
        """
        index = self.index(item_id)
        words_before = None if index is None else self._words(index)
        if index is None:
            index = self._new_place(item_id)
        given = ItemState(item_id=item_id) if state is None else state
        num_given = len(given.attributes)
        if new := self._new_names(given):
            room = max(0, MAX_NAMES - self.num_names)
            left_out = {name for name, _ in new[room:]}
            kept = {name: value for name, value in given.attributes.items() if name not in left_out}
            given = msgspec.structs.replace(given, attributes=kept)
        self._set_texts(index, given)
        self._set_numbers(index, given)
        for name in self.columns.flags.keys() | _named(given, _is_flag):
            flag = given.attributes.get(name)
            self.columns.flag(name).set(index, bool(flag) if _is_flag(flag) else None)
        if given.title is None:
            self.stated_titles.pop(index, None)
        else:
            self.stated_titles[index] = given.title
        if self._words(index) != words_before:
            is_new = index >= self.num_known
            self.words_revision += is_new
            self.reworded_revision += not is_new
        status = STATED | (HIDDEN if not given.available else 0) | (DELETED if state is None else 0)
        self.status[index] = status | (HAS_CATEGORIES if given.categories is not None else 0)
        is_timely = (given.published_ms or 0) <= now_ms and (given.expires_ms is None or now_ms < given.expires_ms)
        is_available = state is not None and state.available and is_timely
        if self.columns.available[index] != is_available:
            self.columns.available[index] = is_available
            self.revision += 1
        self._free()
        return num_given - len(given.attributes)

    def copy(self, other: "ItemLayout", item_ids: Sequence[str]) -> None:
        """Put the states that another layout of the same catalogue of states has of these distinct items.

        Costs a tenth of `put` for many items.
        """
        num_before, theirs, own = self.num_named, other.places(item_ids), self.places(item_ids)
        titles, categories = list(map(self.title, own.tolist())), self.columns.texts["categories"].codes[own]
        self._copy_columns(other.columns, theirs, own, other.status[theirs])
        for their, index in zip(theirs.tolist(), own.tolist(), strict=True):
            if (title := other.stated_titles.get(their)) is None:
                self.stated_titles.pop(index, None)
            else:
                self.stated_titles[index] = title
        is_reworded = (own >= num_before) | (self.columns.texts["categories"].codes[own] != categories)
        is_reworded |= [self.title(index) != title for index, title in zip(own.tolist(), titles, strict=True)]
        self.words_revision += int((is_reworded & (own >= self.num_known)).sum())
        self.reworded_revision += int((is_reworded & (own < self.num_known)).sum())
        self.status[own] = other.status[theirs]
        available = other.columns.available[theirs]
        self.revision += int((self.columns.available[own] != available).sum())
        self.columns.available[own] = available
        self._free()

    def _copy_columns(self, other: ItemColumns, theirs: np.ndarray, own: np.ndarray, status: np.ndarray) -> None:
        """Copy the attributes of items at other indices; items without stated categories have the bundle's."""
        columns = self.columns
        for name in columns.texts.keys() | other.texts.keys():
            texts, codes = columns.text(name), np.zeros(len(own), dtype=np.int32)
            if name not in _OWN_TEXTS:
                codes = texts.codes_from(other.texts[name], theirs) if name in other.texts else codes
            else:
                has_own, is_known = (status & HAS_CATEGORIES) > 0, own < self.num_known
                codes[has_own] = texts.codes_from(other.texts[name], theirs[has_own])
                of_bundle = ~has_own & is_known
                codes[of_bundle] = texts.all_codes([self.catalogue.categories[at] for at in own[of_bundle].tolist()])
            texts.set_all(own, codes)
        for name in (columns.numbers.keys() | other.numbers.keys()) - {"popularity"}:
            missing = np.full(len(own), np.nan)
            columns.number(name).set_all(own, other.numbers[name].numbers[theirs] if name in other.numbers else missing)
        for name in columns.flags.keys() | other.flags.keys():
            unset = np.full(len(own), -1, dtype=np.int8)
            columns.flag(name).set_all(own, other.flags[name].flags[theirs] if name in other.flags else unset)

    def _free(self) -> None:
        """Drop columns without values and texts without items, both in new tables."""
        columns = self.columns
        columns.texts = _used(columns.texts, _OWN_TEXTS)
        columns.numbers = _used(columns.numbers, _OWN_NUMBERS)
        columns.flags = _used(columns.flags, frozenset())
        for name, column in list(columns.texts.items()):
            if len(column.values) > column.max_values:
                columns.texts = {**columns.texts, name: column.compacted()}

    def act(self, now_ms: int) -> None:
        """Bring `available` up to date with the items' times."""
        shown = (self.status & (HIDDEN | DELETED)) == 0
        shown[self.num_named :] = False
        if (published := self.columns.numbers.get("published_ms")) is not None:
            shown &= ~(published.numbers > now_ms)
        if (expires := self.columns.numbers.get("expires_ms")) is not None:
            shown &= ~(expires.numbers <= now_ms)
        if not np.array_equal(shown, self.columns.available):
            self.columns.available[:] = shown
            self.revision += 1

    def next_time_ms(self, now_ms: int) -> float:
        """Return when the next item is published or expires; infinity for never."""
        next_ms = math.inf
        for name in ("published_ms", "expires_ms"):
            if (column := self.columns.numbers.get(name)) is not None:
                times = column.numbers[column.numbers > now_ms]
                next_ms = min(next_ms, float(times.min(initial=math.inf)))
        return next_ms

    def stated(self) -> Iterator[tuple[int, str]]:
        """Yield the index and id of every item with a state, including deleted items."""
        return ((index, self.item_id(index)) for index in np.flatnonzero(self.status).tolist())

    def relaid(self, catalogue: Catalogue, now_ms: int, *, has_new: bool = True) -> "ItemLayout":
        """Return the layout of another catalogue with all states, or without `has_new` only those of its own items.

        Texts are shared, and both may be written to.
        """
        if has_new:
            indices = np.flatnonzero(self.status)
        else:
            known = np.array(self.indices(catalogue.item_ids), dtype=np.int64)
            indices = known[self.status[known] > 0]
        item_ids = list(map(self.item_id, indices.tolist()))
        num_new = sum(item_id not in catalogue.index_of for item_id in item_ids)
        other = ItemLayout(catalogue, self.columns.texts["categories"], num_new)
        places = other.places(item_ids)
        other.status[places] = status = self.status[indices]
        for name, texts in self.columns.texts.items():
            if name in _OWN_TEXTS:
                has_own = (status & HAS_CATEGORIES) > 0
                other.columns.texts[name].codes[places[has_own]] = texts.codes[indices[has_own]]
                continue
            codes = np.zeros(other.columns.num_items, dtype=np.int32)
            codes[places] = texts.codes[indices]
            other.columns.texts[name] = TextColumn(codes, texts.values, texts.code_of, max_values=texts.max_values)
        for name, numbers in self.columns.numbers.items():
            if name != "popularity":
                other.columns.number(name).numbers[places] = numbers.numbers[indices]
        for name, flags in self.columns.flags.items():
            other.columns.flag(name).flags[places] = flags.flags[indices]
        other.count()
        moved = zip(indices.tolist(), places.tolist(), strict=True) if self.stated_titles else ()
        other.stated_titles = {
            place: self.stated_titles[index] for index, place in moved if index in self.stated_titles
        }
        if item_ids:
            other.words_revision, other.reworded_revision = self.words_revision + 1, self.reworded_revision + 1
        other.act(now_ms)
        return other

    def count(self) -> None:
        """Count the values of all columns, after cells were written directly."""
        for table in (self.columns.texts, self.columns.numbers, self.columns.flags):
            for column in table.values():
                column.count()

    def places(self, item_ids: Sequence[str]) -> np.ndarray:
        """Return the indices (n,) int64 of these distinct items; unknown items are added."""
        indices = list(map(self.catalogue.index_of.get, item_ids))
        if None in indices:
            indices = [
                self._place(item_id) if at is None else at for item_id, at in zip(item_ids, indices, strict=True)
            ]
        return np.array(indices, dtype=np.int64)

    def _place(self, item_id: str) -> int:
        """Return the index of an item that the catalogue lacks; an unknown item is added."""
        index = self._new_index.get(item_id)
        return self._new_place(item_id) if index is None else index

    def _new_place(self, item_id: str) -> int:
        index = self.num_named
        if index == self.columns.num_items:
            num_items = _with_spare(index)
            status = np.zeros(num_items, dtype=np.uint8)
            status[:index] = self.status
            self.status = status
            columns = self.columns.grown(num_items)
            columns.numbers["popularity"].numbers[index:] = 0.0
            self.columns = columns
        self._new_ids.append(item_id)
        self._new_index[item_id] = index
        return index

    def _words(self, index: int) -> tuple[str, tuple[str, ...]]:
        column = self.columns.texts["categories"]
        return self.title(index), column.values[column.codes[index]]

    def _set_texts(self, index: int, given: ItemState) -> None:
        categories = given.categories
        if categories is None:
            is_known = index < self.num_known
            categories = self.catalogue.categories[index] if is_known else ()
        self.columns.texts["categories"].set(index, categories)
        for name in (self.columns.texts.keys() - _OWN_TEXTS) | _named(given, _is_text):
            text = given.attributes.get(name, ())
            texts = (text,) if isinstance(text, str) else text
            self.columns.text(name).set(index, texts if isinstance(texts, tuple) else ())

    def _set_numbers(self, index: int, given: ItemState) -> None:
        for name in (self.columns.numbers.keys() - _OWN_NUMBERS) | _named(given, _is_number):
            number = given.attributes.get(name)
            self.columns.number(name).set(index, float(number) if _is_number(number) else math.nan)  # type: ignore[arg-type]
        for name in ("value", "published_ms", "expires_ms"):
            own = getattr(given, name)
            if own is not None or name in self.columns.numbers:
                self.columns.number(name).set(index, math.nan if own is None else float(own))

    def _number(self, index: int, name: str) -> float | None:
        column = self.columns.numbers.get(name)
        number = math.nan if column is None else float(column.numbers[index])
        return None if math.isnan(number) else number

    def _time(self, index: int, name: str) -> int | None:
        number = self._number(index, name)
        return None if number is None else int(number)


_Column = TypeVar("_Column", TextColumn, NumberColumn, FlagColumn)


def _used(table: dict[str, _Column], always: frozenset[str]) -> dict[str, _Column]:
    """Return the same table, or a table without empty columns except the built-in names."""
    if all(column.num_set or name in always for name, column in table.items()):
        return table
    return {name: column for name, column in table.items() if column.num_set or name in always}


def _kind(value: AttributeValue) -> str:
    """Return the table of columns for this kind of value."""
    if isinstance(value, bool):
        return "flags"
    return "texts" if _is_text(value) else "numbers"


def _named(state: ItemState, is_kind: Callable[[object], bool]) -> set[str]:
    return {name for name, value in state.attributes.items() if is_kind(value)}


def _is_text(value: object) -> bool:
    return isinstance(value, str | tuple)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _with_spare(num_items: int) -> int:
    return num_items + max(_MIN_SPARE, num_items // _SPARE_SHARE)
