"""An import delivers each row, resumes after an interruption, and has no effect when repeated."""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.imports.delivered import Record
from pipelines.imports.importing import BATCH_ROWS, ImportResult
from pipelines.imports.old_events import OldEvents
from pipelines.imports.ordered import OrderedEvents
from pipelines.imports.run import ERASED, ImportRun, import_events, import_items
from pipelines.tables.findings import Findings
from pipelines.tables.options import PLAIN
from services.contracts.erasure import Erasure
from services.contracts.events import Interaction, decode_interaction
from services.contracts.items import MAX_ATTRIBUTES, ItemState, decode_item
from services.errors import ConfigError, DataError, DependencyUnavailable
from services.features.schema import LogPosition
from services.stream.decode import LoggedErasure
from services.stream.log.ledger import ErasureLedger
from tests.support.item_topic import ItemTopic

BATCHES = 3


class Shop:
    """A topic of items whose broker fails after `num_batches`, and an import into it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.progress = folder / "p.json"
        self.topic = ItemTopic()
        self.sent: list[int] = []
        self.findings = Findings("items")
        self.is_behind = False
        """Whether records are read only when the reader has to catch up."""
        self.before_send: Callable[[], object] = lambda: None

    def run(
        self,
        rows: Sequence[dict[str, Any]],
        num_batches: int | None = None,
        *,
        again: bool = False,
        delete_missing: bool = False,
    ) -> ImportResult:
        """Run the import; the broker becomes unavailable after this number of batches."""
        left = [num_batches]

        def send(records: Sequence[Record]) -> None:
            if left[0] == 0:
                raise DependencyUnavailable("broker", 1.0)
            left[0] = None if left[0] is None else left[0] - 1
            self.sent.append(len(records))
            self.before_send()
            for record in records:
                self.topic.record(*record)
            if not self.is_behind:
                self.topic.read()

        self.topic.read()
        path = self.folder / "items.csv"
        pl.DataFrame(rows, infer_schema_length=None).write_csv(path)
        run = ImportRun(path=path, options=PLAIN, send=send, progress_file=self.progress, scratch=self.folder / "s")
        delivered = self.folder / "delivered.json"
        outcome, self.findings = import_items(
            run, delivered, self.topic.catalogue, again=again, delete_missing=delete_missing
        )
        return outcome

    @property
    def states(self) -> dict[str, ItemState]:
        """The states of the items that are not deleted."""
        stated = ((item_id, self.topic.live.stated(item_id)) for _, item_id in self.topic.live.layout.stated())
        return {item_id: state for item_id, state in stated if state is not None}

    @property
    def notes(self) -> str:
        return "; ".join(self.findings.sentences())


def table(num_rows: int, title: str = "Item") -> list[dict[str, Any]]:
    return [{"item_id": f"i{number}", "title": f"{title} {number}"} for number in range(num_rows)]


def test_an_interrupted_import_goes_on_where_it_was(tmp_path: Path) -> None:
    """Delivered batches are not sent again, and the import completes."""
    shop, rows = Shop(tmp_path), table(BATCHES * BATCH_ROWS + 7)
    with pytest.raises(DependencyUnavailable):
        shop.run(rows, num_batches=2)
    before = list(shop.sent)
    outcome = shop.run(rows)

    assert (before, shop.sent[2:]) == ([BATCH_ROWS] * 2, [BATCH_ROWS, 7])
    assert (outcome.num_before, outcome.num_rows, outcome.is_again) == (2 * BATCH_ROWS, len(rows), False)
    assert shop.states.keys() == {row["item_id"] for row in rows}


@given(first=st.integers(1, 40), more=st.integers(0, 40), changed=st.sets(st.integers(0, 39)), begun=st.booleans())
def test_rows_that_are_new_or_have_changed_are_sent(
    tmp_path_factory: pytest.TempPathFactory, first: int, more: int, changed: set[int], begun: bool
) -> None:
    """At any position in the source; also rows that an interrupted import may have sent with other values."""
    shop = Shop(tmp_path_factory.mktemp("grown"))
    now = table(first + more)
    changed = {at for at in changed if at < first}
    shop.run(now[:first])
    if begun:
        between = [row | {"title": "Between"} if at in changed else row for at, row in enumerate(now[:first])]
        with contextlib.suppress(DependencyUnavailable):
            shop.run(between, num_batches=0)
    for at in () if begun else changed:
        now[at]["title"] = "Other"
    shop.sent.clear()
    outcome = shop.run(now[::-1])

    assert sum(shop.sent) == more + len(changed)
    assert (outcome.num_rows, outcome.num_before) == (first + more, first - len(changed))
    titles = {name: state.title for name, state in shop.states.items()}
    assert titles == {row["item_id"]: row["title"] for row in now}


def test_a_renamed_attribute_is_a_change(tmp_path: Path) -> None:
    """The values are the same, and the name is another."""
    shop = Shop(tmp_path)
    for name in ("colour", "color"):
        shop.run([{"item_id": "a", name: "red"}])

    assert shop.states["a"] == ItemState(item_id="a", attributes={"color": "red"})


def test_an_item_that_was_changed_since_keeps_its_state(tmp_path: Path) -> None:
    """If the table says whether items are available, only until the item's row changes, or with `again`."""
    shop, rows = Shop(tmp_path), [row | {"available": "yes"} for row in table(3)]
    shop.run(rows)
    shop.topic.patch("i0", available=False)
    rows[1]["title"] = "Other"
    shop.run(rows)
    is_hidden = [shop.topic.live.hides("i0")]
    shop.run(rows, again=True)
    is_hidden.append(shop.topic.live.hides("i0"))

    assert is_hidden == [True, False]
    assert shop.topic.live.stated("i1") == ItemState(item_id="i1", title="Other")


def test_a_row_changes_only_the_fields_of_the_tables_columns(tmp_path: Path) -> None:
    """Other fields stay, attributes up to their maximum; an empty cell and a dropped column remove the value."""
    shop = Shop(tmp_path)
    shop.run([{"item_id": "a", "title": "A", "colour": "red", "size": "s", "brand": "b"}])
    shop.topic.patch("a", available=False, attributes={"promoted": True, "colour": "blue"})
    shop.run([{"item_id": "a", "title": "B", "colour": "red", "size": None}])

    attributes = {"promoted": True, "colour": "red"}
    assert shop.topic.live.stated("a") == ItemState(item_id="a", title="B", available=False, attributes=attributes)
    shop.topic.patch("a", attributes={f"own{number}": 1.0 for number in range(MAX_ATTRIBUTES - 2)})
    shop.run([{"item_id": "a", "title": "C", "colour": "red", "size": "l"}])
    assert shop.topic.live.stated("a") == ItemState(
        item_id="a", title="C", available=False, attributes={"colour": "red", "size": "l"}
    )


def test_a_change_during_an_import_is_kept(tmp_path: Path) -> None:
    """The import has not read it when it sends the row; after compaction the item's last record has both changes."""
    shop = Shop(tmp_path)
    shop.run(table(2))
    shop.is_behind, shop.before_send = True, lambda: len(shop.topic.log) > 2 or shop.topic.patch("i0", available=False)
    shop.run(table(2, "Other"))
    expected = ItemState(item_id="i0", title="Other 0", available=False)

    assert shop.topic.live.stated("i0") == expected
    (last,) = [record for record in shop.topic.log if record.key == b"i0"][-1:]
    assert decode_item(last.key, last.value) == ("i0", expected)
    assert shop.topic.live.stated("i1") == ItemState(item_id="i1", title="Other 1")


def test_items_that_left_the_source_are_noted_and_deleted_on_request(tmp_path: Path) -> None:
    """They stay live until --delete-missing; items that someone else put are never deleted."""
    shop = Shop(tmp_path)
    shop.run(table(5))
    shop.topic.patch("own", title="Own")
    shop.run(table(3))
    kept, notes = {*shop.states}, shop.notes
    shop.run(table(3), delete_missing=True)

    assert kept == {"i0", "i1", "i2", "i3", "i4", "own"}
    assert "2 of an earlier import are not in the table and stay live; --delete-missing deletes them" in notes
    assert {*shop.states} == {"i0", "i1", "i2", "own"}
    shop.run(table(3))
    assert shop.notes == ""


def test_an_item_whose_row_is_set_aside_is_not_deleted(tmp_path: Path) -> None:
    """A damaged row may be that of any missing item; once it is mended, the items that left are deleted."""
    shop = Shop(tmp_path)
    shop.run(table(5))
    shop.run([*table(3), {"item_id": "i3\x00", "title": "Item 3"}], delete_missing=True)
    kept, notes = {*shop.states}, shop.notes
    shop.run(table(4), delete_missing=True)

    assert kept == {"i0", "i1", "i2", "i3", "i4"}
    assert "2 of an earlier import are not in the table and stay live, because rows are set aside" in notes
    assert {*shop.states} == {"i0", "i1", "i2", "i3"}


def test_items_that_were_lost_with_their_topic_are_sent_again(tmp_path: Path) -> None:
    """A state that the new topic or the snapshot has is kept: it may be newer than the source."""
    shop = Shop(tmp_path)
    shop.run(table(5))
    shop.topic = ItemTopic("t2")
    shop.topic.record(b"i1", None)
    shop.topic.patch("i2", available=False)
    shop.topic.read()
    with pytest.raises(DependencyUnavailable):
        shop.run(table(5), num_batches=0)
    shop.run(table(5))

    assert "3 of an earlier import were lost with the broker and are sent again" in shop.notes
    assert {*shop.states} == {"i0", "i2", "i3", "i4"}
    assert shop.topic.live.hides("i2")
    shop.sent.clear()
    shop.run(table(5))
    assert shop.sent == []


@pytest.mark.parametrize("written", [b"", b"not JSON", b"[]", b'{"num_rows": 1}', b'{"num_rows": 1, "digest": "x"}'])
def test_a_damaged_record_of_progress_begins_again(tmp_path: Path, written: bytes) -> None:
    """With a corrupt progress record, all rows are sent."""
    shop = Shop(tmp_path)
    shop.progress.write_bytes(written)
    shop.run(table(5))

    assert len(shop.states) == 5


def test_a_row_that_cannot_be_used_is_named_and_the_others_are_sent(tmp_path: Path) -> None:
    """Rejected rows are reported by row number across batches; the header is row 1."""
    shop, rows = Shop(tmp_path), table(BATCH_ROWS + 5)
    rows[3]["item_id"], rows[BATCH_ROWS + 1]["item_id"] = "", "x" * 300
    shop.run(rows)

    assert {reason: rejection.rows for reason, rejection in shop.findings.set_aside.items()} == {
        "item_id": [5, BATCH_ROWS + 3]
    }
    assert len(shop.states) == len(rows) - 2


def test_a_table_without_a_usable_row_is_refused(tmp_path: Path) -> None:
    """The error names the column."""
    with pytest.raises(DataError, match=r"item_id: not one row can be used"):
        Shop(tmp_path).run([{"item_id": "x" * 300}])


def test_events_of_a_large_file_are_sent_by_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file longer than a chunk is sent in time order; repeating the import sends no rows."""
    monkeypatch.setattr("pipelines.imports.ordered.STRETCH_ROWS", 100)
    now_ms, lines = 1_800_000_000_000, [f"u{n % 7},i{n},{1_799_990_000 + n}" for n in range(1_000)]
    sent: dict[str, list[tuple[bytes, bytes]]] = {"up": [], "down": [], "again": []}
    for name, rows in (("up", lines), ("down", lines[::-1]), ("again", lines[::-1])):
        path = tmp_path / "events.csv"
        path.write_text("\n".join(("user_id,item_id,event_time", *rows)))
        progress = tmp_path / ("up.json" if name == "up" else "down.json")
        run = ImportRun(
            path=path, options=PLAIN, send=sent[name].extend, progress_file=progress, scratch=tmp_path / "s"
        )
        import_events(run, None, now_ms)

    assert [decode_interaction(value).item_id for _, value in sent["up"]] == [f"i{n}" for n in range(1_000)]
    assert (sent["down"], sent["again"]) == (sent["up"], [])
    assert not (tmp_path / "s").exists()


def test_events_of_another_time_are_set_aside_or_kept_for_the_pipeline(tmp_path: Path) -> None:
    """Old events go to the pipeline's table if given, and future events are rejected."""
    now_s = 1_800_000_000
    path, old = tmp_path / "events.csv", OldEvents(tmp_path / "old.parquet")
    path.write_text(f"user_id,item_id,event_time\nu,a,{now_s - 60}\nu,b,{now_s - 90 * 86_400}\nu,c,{now_s + 3_600}\n")
    results = {}
    for name, table_of_old in (("without", None), ("with", old)):
        sent: list[tuple[bytes, bytes]] = []
        run = ImportRun(
            path=path, options=PLAIN, send=sent.extend, progress_file=tmp_path / name, scratch=tmp_path / "s"
        )
        _, findings = import_events(run, table_of_old, now_s * 1_000)
        reasons = {reason.partition(" is ")[2][:7]: rejection.rows for reason, rejection in findings.set_aside.items()}
        results[name] = [decode_interaction(value).item_id for _, value in sent], reasons

    assert results == {"without": (["a"], {"too old": [3], "in the ": [4]}), "with": (["a"], {"in the ": [4]})}
    assert old.finish() == 1


def test_old_events_of_two_users_with_the_same_id_are_both_kept(tmp_path: Path) -> None:
    """An event id counts once for each user, as in the stream; a batch of other users is another batch."""
    old = OldEvents(tmp_path / "old.parquet")
    for user_id in ("u", "v", "u"):
        old.add([Interaction(event_id="1", user_id=user_id, item_id="a", event_time_ms=7, accepted_time_ms=8)])

    assert old.finish() == 2
    assert sorted(pl.read_parquet(tmp_path / "old.parquet")["user_id"]) == ["u", "v"]
    assert OldEvents(tmp_path / "old.parquet").finish() == 2


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_a_file_that_no_import_wrote_is_not_replaced_by_old_events(tmp_path: Path, kind: str) -> None:
    """The source named as --table would lose all rows but one, because they have no event ids."""
    path, rows = tmp_path / "clicks", pl.DataFrame({"user_id": ["u", "u"], "item_id": ["a", "b"], "event_time": [1, 2]})
    rows.write_parquet(path) if kind == "parquet" else rows.write_csv(path)
    before = path.read_bytes()

    with pytest.raises(
        ConfigError, match=r"--table: .*clicks is not the table of an earlier import; give another file"
    ):
        OldEvents(path)
    assert path.read_bytes() == before


def test_an_erased_users_earlier_events_are_not_imported_again(tmp_path: Path) -> None:
    """Also after the erasure is done everywhere, and from the start of the file; later events begin a new history."""
    now_s, sent = 1_800_000_000, list[tuple[bytes, bytes]]()
    path, ledger, old = tmp_path / "events.csv", ErasureLedger(tmp_path / "log"), OldEvents(tmp_path / "old.parquet")
    erasure = Erasure(erasure_id="x", user_id="u", accepted_time_ms=(now_s - 60) * 1_000)
    ledger.append([LoggedErasure(erasure, LogPosition("t", 0, 5))], ["t"])
    ledger.close(0, ["x"], now_s * 1_000)
    times = {"a": now_s - 90 * 86_400, "b": now_s - 61, "c": now_s - 59}
    path.write_text(
        "\n".join(["user_id,item_id,event_time", *(f"u,{item},{at}\nv,{item},{at}" for item, at in times.items())])
    )

    run = ImportRun(
        path=path,
        options=PLAIN,
        send=sent.extend,
        progress_file=tmp_path / "p",
        scratch=tmp_path / "s",
        erasures=ledger,
    )
    _, findings = import_events(run, old, now_s * 1_000)

    events = [decode_interaction(value) for _, value in sent]
    assert [(event.user_id, event.item_id) for event in events] == [("v", "b"), ("u", "c"), ("v", "c")]
    assert old.finish() == 1
    assert [note.what for note in findings.notes] == [ERASED.replace("{n}", "2")]


def test_a_user_who_is_erased_during_an_import_is_not_imported_further(tmp_path: Path) -> None:
    """The ledger is read again for each batch: a large import takes longer than an erasure."""
    now_s, sent = 1_800_000_000, list[tuple[bytes, bytes]]()
    path, ledger = tmp_path / "events.csv", ErasureLedger(tmp_path / "log")
    rows = [f"{'uv'[at % 2]},i{at},{now_s - 2 * BATCH_ROWS + at}" for at in range(2 * BATCH_ROWS)]
    path.write_text("\n".join(["user_id,item_id,event_time", *rows]))
    erasure = Erasure(erasure_id="x", user_id="u", accepted_time_ms=now_s * 1_000)

    def send(records: Sequence[tuple[bytes, bytes]]) -> None:
        sent.extend(records)
        ledger.append([LoggedErasure(erasure, LogPosition("t", 0, 5))], ["t"])

    run = ImportRun(
        path=path, options=PLAIN, send=send, progress_file=tmp_path / "p", scratch=tmp_path / "s", erasures=ledger
    )
    import_events(run, None, now_s * 1_000)

    users = [decode_interaction(value).user_id for _, value in sent]
    assert (users.count("u"), users.count("v")) == (BATCH_ROWS // 2, BATCH_ROWS)


def test_ordered_events_are_all_there_whatever_their_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ordering keeps all events, also if more events share a time than fit into a chunk."""
    monkeypatch.setattr("pipelines.imports.ordered.STRETCH_ROWS", 10)
    times = pl.Series([5] * 35 + [1, 9, 3], dtype=pl.Int64).cast(pl.Datetime("us")).dt.replace_time_zone("UTC")
    events = pl.DataFrame({"row": pl.int_range(38, eager=True), "event_time": times})
    ordered = OrderedEvents(tmp_path / "s", (events[at : at + 7] for at in range(0, 38, 7)))
    rows = pl.concat([*ordered.stretches()])

    assert rows.equals(events.sort("event_time", "row"))
    ordered.remove()
