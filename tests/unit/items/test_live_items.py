"""The live catalogue against a dict of states, through changes, time, bundle swaps, and its snapshot."""

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from models.catalogue import Catalogue
from services.contracts.filters import Condition, OneOf
from services.contracts.items import MAX_NAMES, ItemState
from services.errors import EnvironmentFault, InvalidRequest
from services.items import snapshot
from services.items.expression import Expressions
from services.items.layout import ItemLayout
from services.items.live_items import LiveItems
from services.items.snapshot import Positions, read_snapshot, write_snapshot
from services.settings.topic_reader import Mark

IDS = [f"i{number}" for number in range(8)]
NOW_MS = 1_800_000_000_000
NAMES = ("colour", "size")
TEXTS = st.sampled_from(["red", "blue", "l"])
VALUES = st.one_of(TEXTS, st.just(("red", "l")), st.sampled_from([0.0, 2.5]), st.booleans())
POSITIONS = {0: Mark(7, leader_epoch=3, last=(6, "d")), 1: Mark(2)}
RED = Condition.of("colour", OneOf(("red",)))
TIMES = st.none() | st.integers(NOW_MS - 3, NOW_MS + 12)


@st.composite
def states(draw: st.DrawFn) -> ItemState:
    return ItemState(
        item_id=draw(st.sampled_from(IDS)),
        title=draw(st.none() | st.sampled_from(["A title", "Another"])),
        categories=draw(st.none() | st.sampled_from([(), ("x",), ("x", "y"), ("z",)])),
        attributes=draw(st.dictionaries(st.sampled_from(NAMES), VALUES)),
        available=draw(st.booleans()),
        published_ms=draw(TIMES),
        expires_ms=draw(TIMES),
        value=draw(st.none() | st.just(3.0)),
    )


def catalogue_of(item_ids: list[str], category: str) -> Catalogue:
    """Return a catalogue of these items, each in a shared category and a category of its own."""
    return Catalogue(
        item_ids=tuple(item_ids),
        titles=tuple(f"Title of {item_id}" for item_id in item_ids),
        categories=tuple((category, f"of {item_id}") for item_id in item_ids),
        codes=np.arange(len(item_ids), dtype=np.int32)[:, None],
        level_sizes=(len(item_ids),),
        popularity=np.ones(len(item_ids)),
    )


class LiveCatalogue(RuleBasedStateMachine):
    """Every layout in use shows the states of a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ms = NOW_MS
        self.items = LiveItems(lambda: self.now_ms / 1_000)
        self.layouts: list[ItemLayout] = []
        self.closed: list[ItemLayout] = []
        self.expressions: dict[ItemLayout, Expressions] = {}
        self.stated: dict[str, ItemState | None] = {}

    @initialize()
    def begin(self) -> None:
        self.layouts = [self.items.lay(catalogue_of(IDS[:3], "x"))]

    @rule(given=st.lists(states(), max_size=4) | st.lists(states(), min_size=8, max_size=12))
    def put(self, given: list[ItemState]) -> None:
        """Apply states."""
        self.items.apply((state.item_id, state) for state in given)
        self.stated |= {state.item_id: state for state in given}

    @rule(item_id=st.sampled_from(IDS))
    def delete(self, item_id: str) -> None:
        """Delete an item, known or not."""
        self.items.apply([(item_id, None)])
        self.stated[item_id] = None

    @rule(step_ms=st.integers(1, 5))
    def wait(self, step_ms: int) -> None:
        """Advance the clock."""
        self.now_ms += step_ms
        self.items.act_on_time()

    @rule(known=st.sets(st.sampled_from(IDS)), category=st.sampled_from(["x", "new"]))
    def swap(self, known: set[str], category: str) -> None:
        """Lay out another bundle; requests still use the previous layout."""
        self.layouts = [self.layouts[-1], self.items.lay(catalogue_of(sorted(known), category))]

    @rule(known=st.sets(st.sampled_from(IDS), min_size=1), is_at_once=st.booleans())
    def lay_closed(self, known: set[str], is_at_once: bool) -> None:
        """Lay out the popular items of a bundle that is not loaded; requests still use the previous such layout."""
        lay = self.items.lay_at_once if is_at_once else self.items.lay_closed
        layout = lay(catalogue_of(sorted(known), "x"))
        assert layout is not None
        self.closed = [*self.closed[-1:], layout]

    @rule()
    def start_again(self) -> None:
        """Start a new process that reads the snapshot over the same bundle."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "snapshot.parquet"
            write_snapshot(path, self.items, Positions("topic", POSITIONS))
            self.items = LiveItems(lambda: self.now_ms / 1_000)
            self.layouts = [self.items.lay(self.layouts[-1].catalogue)]
            assert read_snapshot(path, self.items) == Positions("topic", POSITIONS)
        self.closed = []

    @invariant()
    def every_layout_shows_the_dict(self) -> None:
        """States, titles, categories and availability equal the dict's."""
        for layout in self.layouts:
            for item_id in IDS:
                self.check(layout, item_id)
            num_available = int(layout.columns.available.sum())
            assert num_available == sum(self.is_shown(layout, item_id) for item_id in IDS)

    @invariant()
    def every_closed_layout_shows_its_own_items(self) -> None:
        """A closed layout has the states of its catalogue's items, and no other item."""
        for layout in self.closed:
            own = layout.catalogue.item_ids
            assert layout.num_named == len(own)
            for item_id in own:
                self.check(layout, item_id)
            assert int(layout.columns.available.sum()) == sum(self.is_shown(layout, item_id) for item_id in own)

    @invariant()
    def every_mask_follows_the_dict(self) -> None:
        """Compiled expressions, which are updated where cells changed, match the attributes of the dict's states."""
        for layout in (*self.layouts, *self.closed):
            mask = self.expressions.setdefault(layout, Expressions(layout)).mask(RED)
            for item_id in (layout.item_id(index) for index in range(layout.num_named)):
                stated = self.stated.get(item_id)
                colour = None if stated is None else stated.attributes.get("colour")
                assert mask[layout.index(item_id)] == (
                    colour == "red" or (isinstance(colour, tuple) and "red" in colour)
                )

    def check(self, layout: ItemLayout, item_id: str) -> None:
        """Compare one item."""
        stated, index = self.stated.get(item_id), layout.index(item_id)
        is_known = item_id in layout.catalogue.item_ids
        if item_id not in self.stated:
            assert layout.state(item_id) == (ItemState(item_id=item_id) if is_known else None)
            assert (index is not None) == is_known
            return
        assert index is not None
        assert layout.state(item_id) == stated
        if stated is not None:
            known = layout.catalogue.categories[index] if is_known else ()
            column = layout.columns.texts["categories"]
            own = stated.categories if stated.categories is not None else known
            assert column.values[column.codes[index]] == own
            title = f"Title of {item_id}" if is_known else item_id
            assert (layout.title(index), layout.item_id(index)) == (stated.title or title, item_id)
        assert layout.columns.available[index] == self.is_shown(layout, item_id)

    def is_shown(self, layout: ItemLayout, item_id: str) -> bool:
        """Return whether the item may be shown now, by the dict."""
        if item_id not in self.stated:
            return item_id in layout.catalogue.item_ids
        stated = self.stated[item_id]
        if stated is None or not stated.available:
            return False
        is_out = stated.published_ms is None or stated.published_ms <= self.now_ms
        return is_out and (stated.expires_ms is None or self.now_ms < stated.expires_ms)


LiveCatalogue.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestLiveCatalogue = LiveCatalogue.TestCase


def test_filters_find_what_the_live_catalogue_has() -> None:
    """Filters match stated categories and new ids; unknown names are rejected."""
    items = LiveItems(lambda: NOW_MS / 1_000)
    layout = items.lay(catalogue_of(IDS[:3], "x"))
    new = [f"n{number}" for number in range(200)]  # more than the columns have space for
    items.apply((item_id, ItemState(item_id=item_id, categories=("fresh",))) for item_id in new)
    items.apply([("i0", ItemState(item_id="i0", categories=("fresh",))), ("n7", None)])

    def found(**filters: object) -> list[str]:
        mask = layout.allowed(**filters)  # type: ignore[arg-type]
        return [layout.item_id(index) for index in np.flatnonzero(mask).tolist()]

    assert found(categories=("fresh",)) == ["i0", *(item_id for item_id in new if item_id != "n7")]
    assert found(categories=("x",)) == ["i1", "i2"]
    assert found(allowed_item_ids=("n7", "n8", "i1", "none"), excluded_item_ids=("i1",)) == ["n8"]
    layout.check_filters(("fresh", "x"), ("n8", "i0"))
    with pytest.raises(InvalidRequest, match=r"filters.categories\[1\]"):
        layout.check_filters(("fresh", "stale"), None)
    with pytest.raises(InvalidRequest, match=r"filters.allowed_item_ids\[0\]"):
        layout.check_filters(None, ("none",))


def test_a_deleted_item_that_no_bundle_has_is_unknown() -> None:
    """Deleting an id, even one that never was, makes it no item of the catalogue; the bundle's items stay its items."""
    items = LiveItems(lambda: NOW_MS / 1_000)
    layout = items.lay(catalogue_of(IDS[:3], "x"))
    items.apply([("new", ItemState(item_id="new")), ("gone", ItemState(item_id="gone")), ("gone", None)])
    items.apply([("never", None), ("i0", None)])

    assert [layout.has(item_id) for item_id in ("i0", "i1", "new", "gone", "never", "none")] == [True] * 3 + [False] * 3
    with pytest.raises(InvalidRequest, match=r"filters.allowed_item_ids\[0\]"):
        layout.check_filters(None, ("gone",))
    items.apply([("gone", ItemState(item_id="gone"))])
    assert layout.has("gone")


def test_items_with_other_words_than_the_bundles_are_listed() -> None:
    """An import states the bundle's own words again: nothing changed; a new title or category counts until reverted."""
    items = LiveItems(lambda: NOW_MS / 1_000)
    layout = items.lay(catalogue_of(IDS[:3], "x"))
    same, begun = ItemState(item_id="i0", title="Title of i0", categories=("x", "of i0")), layout.text_revision
    items.apply([("i0", same)])
    assert (layout.reworded(), layout.text_revision) == ([], begun)

    items.apply([("i1", ItemState(item_id="i1", title="Other")), ("i2", ItemState(item_id="i2", categories=()))])
    assert (layout.reworded(), layout.text_revision) == ([1, 2], (begun[0], begun[1] + 2))

    items.apply([("i1", ItemState(item_id="i1"))])
    assert layout.reworded() == [2]
    relaid = items.lay(catalogue_of(IDS[1:4], "x"))
    assert [relaid.item_id(index) for index in relaid.reworded()] == ["i2"]
    assert relaid.text_revision > (0, 0), "readers that begin at no revision read the states of the earlier bundle"


def test_a_longer_copy_of_the_columns_keeps_what_a_reader_has() -> None:
    """Growth copies the columns; indices keep their items, and columns held by a request keep their length."""
    items = LiveItems(lambda: NOW_MS / 1_000)
    layout = items.lay(catalogue_of(IDS[:3], "x"))
    items.apply([("n0", ItemState(item_id="n0", attributes={"price": 2.0, "sale": True, "colour": "red"}))])
    before, index = layout.columns, layout.index("n0")
    assert index is not None
    items.apply((f"more {number}", ItemState(item_id=f"more {number}")) for number in range(500))

    assert layout.columns is not before
    assert (len(before.available), layout.index("n0")) == (before.num_items, index)
    assert layout.columns.numbers["price"].numbers[index] == 2.0
    assert layout.columns.kinds("sale") == ("flag",)
    assert layout.state("n0") == ItemState(item_id="n0", attributes={"price": 2.0, "sale": True, "colour": "red"})


def test_names_of_attributes_are_bounded_and_what_is_left_out_is_counted() -> None:
    """Of 6,400 attribute names only MAX_NAMES have columns, also in the next layout; hiding still works."""
    items = LiveItems(lambda: NOW_MS / 1_000)
    layout = items.lay(catalogue_of(IDS[:3], "x"))
    values = ("red", 2.5)
    states = [
        ItemState(
            item_id=f"n{item}", available=False, attributes={f"a{item}.{name}": values[name % 2] for name in range(64)}
        )
        for item in range(100)
    ]

    num_left_out = items.apply((state.item_id, state) for state in states)

    assert (layout.num_names, num_left_out) == (MAX_NAMES, 6_400 - MAX_NAMES)
    assert layout.state("n0") == states[0]
    assert not layout.allowed(allowed_item_ids=[state.item_id for state in states]).any()
    assert items.lay(catalogue_of(IDS[:2], "x")).num_names == MAX_NAMES
    with pytest.raises(InvalidRequest) as refused:
        layout.check_names(ItemState(item_id="i0", attributes={"a0.0": "blue", "one more": True}), set())
    assert refused.value.field == "attributes.one more"


def test_a_name_that_no_item_has_any_more_makes_room() -> None:
    """A column is removed with its last value; a filter finds the new name and not the old name."""
    items = LiveItems(lambda: NOW_MS / 1_000)
    layout = items.lay(catalogue_of(IDS[:3], "x"))
    names = [f"a{number}" for number in range(MAX_NAMES)]
    items.apply((name, ItemState(item_id=name, attributes={name: True})) for name in names)
    items.apply([("a0", ItemState(item_id="a0")), ("a1", ItemState(item_id="a1", attributes={"new": 1.0}))])

    assert layout.num_names == MAX_NAMES - 1
    assert [layout.columns.kinds(name) for name in ("a0", "a1", "a2", "new")] == [(), (), ("flag",), ("number",)]


def test_texts_that_no_item_has_are_freed() -> None:
    """20,000 updates of one item leave few values in every column and layout, and codes keep their meaning."""
    items = LiveItems(lambda: NOW_MS / 1_000)
    layouts = [items.lay(catalogue_of(IDS[:3], "x")), items.lay(catalogue_of(IDS[:4], "x"))]
    kept = ItemState(item_id="i1", categories=("kept",), attributes={"colour": "kept"})
    items.apply([("i1", kept)])

    for number in range(20_000):
        text = f"t{number}"
        items.apply([("i0", ItemState(item_id="i0", categories=(text,), attributes={"colour": text}))])

    for layout in layouts:
        columns = layout.columns.texts
        assert max(len(column.values) for column in columns.values()) < 5_000
        assert layout.state("i1") == kept
        for name in ("categories", "colour"):
            assert np.flatnonzero(columns[name].holding(["t19999", "kept", "t7"])).tolist() == [0, 1]


def test_a_snapshot_with_any_flipped_bit_is_refused(tmp_path: Path) -> None:
    """A corrupt or truncated snapshot is an error that names the file and the fix; a missing snapshot is none."""
    path, items = tmp_path / "snapshot.parquet", LiveItems()
    items.apply((item_id, ItemState(item_id=item_id, available=False)) for item_id in IDS)
    write_snapshot(path, items, Positions("topic", {0: Mark(1)}))
    data = path.read_bytes()
    assert read_snapshot(path, LiveItems()) == Positions("topic", {0: Mark(1)})

    for offset in range(0, len(data), 7):
        flipped = bytearray(data)
        flipped[offset] ^= 1 << offset % 8
        path.write_bytes(flipped)
        with pytest.raises(EnvironmentFault, match=f"{path}: damaged .*restore it, or remove"):
            read_snapshot(path, LiveItems())
    for length in (0, 3, 31, 40, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(EnvironmentFault):
            read_snapshot(path, LiveItems())
    path.unlink()
    assert read_snapshot(path, LiveItems()) is None


def test_tenants_have_catalogues_of_their_own(tmp_path: Path) -> None:
    """States of one id under two owners are apart, in memory and after a restart from the snapshot."""
    items, path = LiveItems(), tmp_path / "items.snapshot"
    items.apply(
        [("i0", ItemState(item_id="i0", title="Ours")), ("acme\x1fi0", ItemState(item_id="i0", title="Theirs"))]
    )
    write_snapshot(path, items, Positions("t", POSITIONS))

    read = LiveItems()
    positions = read_snapshot(path, read)
    read.apply([("acme\x1fi0", None)])

    assert positions == Positions("t", POSITIONS)
    assert [catalogue.layout.state("i0").title for catalogue in (items, items.of("acme"))] == ["Ours", "Theirs"]  # type: ignore[union-attr]
    assert (read.layout.state("i0") is None, read.of("acme").layout.state("i0")) == (False, None)


def test_a_snapshot_without_the_file_of_a_tenant_is_refused(tmp_path: Path) -> None:
    """It has no positions, so that no state is skipped, and the error names the missing file."""
    items, path = LiveItems(), tmp_path / "items.snapshot"
    items.of("acme")
    write_snapshot(path, items, Positions("t", POSITIONS))
    (tmp_path / "items.snapshot.acme").unlink()

    with pytest.raises(EnvironmentFault, match=r"items\.snapshot\.acme: damaged"):
        read_snapshot(path, LiveItems())


def test_a_deleted_tenant_leaves_no_state(tmp_path: Path) -> None:
    """The record of the tenant's prefix drops its catalogue, and later deletions of its items bring no id back."""
    items, path = LiveItems(), tmp_path / "items.snapshot"
    items.apply([("acme\x1fi0", ItemState(item_id="i0")), ("i0", ItemState(item_id="i0"))])
    write_snapshot(path, items, Positions("t", POSITIONS))

    items.apply([("acme\x1fi1", None), ("acme\x1f", None), ("acme\x1fi0", None)])
    write_snapshot(path, items, Positions("t", POSITIONS))

    assert items.tenants == {}
    assert {file.name for file in tmp_path.iterdir()} == {path.name, "whole_topic"}
    assert items.layout.state("i0") is not None


def test_catalogues_laid_while_their_items_change_have_the_last_states() -> None:
    """Bundles load while the shop changes and deletes the same items: each catalogue in use ends with every change."""
    ids = [f"i{number}" for number in range(20)]
    changes = [
        (item_id, None if turn % 7 == 0 else ItemState(item_id=item_id, title=f"{turn}", available=turn % 2 == 0))
        for turn in range(1, 60)
        for item_id in (*ids, "new")
    ]
    racing, in_turn = LiveItems(), LiveItems()
    catalogues = [catalogue_of(ids, "a"), catalogue_of(ids[5:], "b")]
    with ThreadPoolExecutor(2) as pool:
        laying = [pool.submit(racing.lay, catalogues[number % 2]) for number in range(40)]
        for change in changes:
            racing.apply([change])
    laid = [future.result() for future in laying]

    in_turn.apply(changes)
    for layout in laid:
        expected = in_turn.lay(layout.catalogue)
        assert [layout.state(item_id) for item_id in (*ids, "new")] == [
            expected.state(item_id) for item_id in (*ids, "new")
        ]
        assert [layout.allowed()[layout.indices([item_id])].tolist() for item_id in ids] == [
            expected.allowed()[expected.indices([item_id])].tolist() for item_id in ids
        ]


def test_a_snapshot_names_no_file_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If writing stops after a tenant was deleted, the earlier snapshot is still whole."""
    items, path = LiveItems(), tmp_path / "items.snapshot"
    items.apply([("i1", ItemState(item_id="i1", available=False)), ("acme\x1fi1", ItemState(item_id="i1"))])
    write_snapshot(path, items, Positions("t", POSITIONS))
    items.apply([("acme\x1f", None)])
    write = snapshot.write_durably

    def full(target: Path, data: bytes) -> None:
        if target == path:
            raise OSError("no space left")
        write(target, data)

    monkeypatch.setattr(snapshot, "write_durably", full)
    with pytest.raises(OSError, match="no space"):
        write_snapshot(path, items, Positions("t", POSITIONS))
    read = LiveItems()

    assert read_snapshot(path, read) == Positions("t", POSITIONS)
    assert read.hides("i1")
    monkeypatch.undo()
    write_snapshot(path, items, Positions("t", POSITIONS))
    assert {file.name for file in tmp_path.iterdir()} == {path.name, "whole_topic"}
