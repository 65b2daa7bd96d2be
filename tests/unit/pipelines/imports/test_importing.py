"""An import delivers each row, goes on where it was, and changes nothing when it is run again."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.imports.importing import BATCH_ROWS, Import, Outcome, Refused
from pipelines.imports.values import Columns, item_of
from services.contracts.items import ItemState
from services.errors import DataError, DependencyUnavailable

BATCHES = 3


class Shop:
    """A catalogue that takes batches until `num_batches` are delivered, and an import into it."""

    def __init__(self, progress: Path) -> None:
        self.progress = progress
        self.items: dict[str, ItemState] = {}
        self.sent: list[int] = []
        self.refused: list[Refused] = []

    def run(self, rows: Sequence[dict[str, Any]], num_batches: int | None = None) -> Outcome:
        """Import; after so many batches the broker is gone."""
        columns, left = Columns(), [num_batches]

        def deliver(states: Sequence[ItemState]) -> None:
            if left[0] == 0:
                raise DependencyUnavailable("broker", 1.0)
            left[0] = None if left[0] is None else left[0] - 1
            self.sent.append(len(states))
            self.items |= {one.item_id: one for one in states}

        def open_rows() -> Iterator[dict[str, Any]]:
            return iter(rows)

        return Import(
            open_rows,
            lambda row: item_of(row, columns),
            deliver,
            self.refused.append,
            lambda _rows: None,
            self.progress,
        ).run()


def table(num_rows: int, title: str = "Item") -> list[dict[str, Any]]:
    """Return the rows of so many items."""
    return [{"item_id": f"i{number}", "title": f"{title} {number}"} for number in range(num_rows)]


def test_an_interrupted_import_goes_on_where_it_was(tmp_path: Path) -> None:
    """What the broker had before is not sent again, and all of it is there at the end."""
    shop, rows = Shop(tmp_path / "p.json"), table(BATCHES * BATCH_ROWS + 7)
    with pytest.raises(DependencyUnavailable):
        shop.run(rows, num_batches=2)
    before = list(shop.sent)
    outcome = shop.run(rows)

    assert (before, shop.sent[2:]) == ([BATCH_ROWS] * 2, [BATCH_ROWS, 7])
    assert (outcome.num_before, outcome.num_rows, outcome.is_again) == (2 * BATCH_ROWS, len(rows), False)
    assert shop.items.keys() == {row["item_id"] for row in rows}


@given(first=st.integers(1, 40), more=st.integers(0, 40), changed=st.booleans())
def test_a_source_that_grew_sends_what_is_new_and_one_that_changed_all(
    tmp_path_factory: pytest.TempPathFactory, first: int, more: int, changed: bool
) -> None:
    """Nothing, where nothing is new; in all cases the catalogue is that of the source as it is now."""
    shop = Shop(tmp_path_factory.mktemp("grown") / "p.json")
    shop.run(table(first))
    shop.sent.clear()
    now = table(first + more, "Other" if changed else "Item")
    outcome = shop.run(now)

    assert sum(shop.sent) == (first + more if changed else more)
    assert outcome.is_again == changed
    assert {name: one.title for name, one in shop.items.items()} == {row["item_id"]: row["title"] for row in now}


@pytest.mark.parametrize("written", [b"", b"not JSON", b"[]", b'{"num_rows": 1}'])
def test_a_damaged_record_of_progress_begins_anew(tmp_path: Path, written: bytes) -> None:
    """All rows are sent, and none is left out for it."""
    shop = Shop(tmp_path / "p.json")
    shop.progress.write_bytes(written)
    shop.run(table(5))

    assert len(shop.items) == 5


def test_a_row_that_cannot_be_used_is_named_and_the_others_are_sent(tmp_path: Path) -> None:
    """By its number and its column, also behind the first batch."""
    shop, rows = Shop(tmp_path / "p.json"), table(BATCH_ROWS + 5)
    rows[3]["published_ms"], rows[BATCH_ROWS + 1]["available"] = "soon", "perhaps"
    outcome = shop.run(rows)

    named = [(one.row, one.column) for one in shop.refused]
    assert named == [(4, "published_ms"), (BATCH_ROWS + 2, "available")]
    assert (outcome.num_refused, len(shop.items)) == (2, len(rows) - 2)


def test_a_table_without_a_usable_row_is_refused(tmp_path: Path) -> None:
    """It is another one than was meant; the error names column and row."""
    with pytest.raises(DataError, match=r"published_ms.*row 1"):
        Shop(tmp_path / "p.json").run([{"item_id": "i1", "published_ms": "soon"}])
