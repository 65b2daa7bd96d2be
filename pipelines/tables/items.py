"""Rows of items: validation and normalisation. Rows of an item are merged: the first present value of each column wins.

A bad cell costs only the cell: a price that is not a number, an attribute text that is too long. Where the cell decides
whether the item is shown, the item counts as unavailable. Only a row without a usable id is set aside.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import polars as pl

from pipelines.tables.cells import as_text, entities, flags, lists, numbers, present, printable
from pipelines.tables.columns import Named
from pipelines.tables.delimited import RowBatch
from pipelines.tables.events import SAME_ITEM_NOTE, count_batch, id_text, reject
from pipelines.tables.findings import Findings
from pipelines.tables.ids import IdColumn, is_bad
from pipelines.tables.options import TableOptions
from pipelines.tables.times import DayOrder, any_times
from services.contracts.items import MAX_TEXT_CHARS, MAX_TEXTS, MAX_TIME_MS, MAX_TITLE_CHARS, MIN_TIME_MS

ITEM_TYPES: dict[str, pl.DataType | type[pl.DataType]] = {
    "row": pl.Int64,
    "item_id": pl.String,
    "title": pl.String,
    "categories": pl.List(pl.String),
    "text": pl.String,
    "available": pl.Boolean,
    "published_ms": pl.Int64,
    "expires_ms": pl.Int64,
    "value": pl.Float64,
}
"""The columns of accepted rows; attributes follow, named ATTRIBUTE plus their name."""
ATTRIBUTE = "attributes."
HEADER_AGAIN = "the header again"
Reader = Callable[[pl.Series], pl.Series]
_TIMES = {"published_ms": MAX_TIME_MS, "expires_ms": MIN_TIME_MS}
"""The times that decide whether an item is shown, and values of items that are not."""
HIDING = ("available", *_TIMES)
_FLAG, _TIME = "true or false", "2026-12-31 or Unix milliseconds"
"""What to write in such cells."""


@dataclass(frozen=True, slots=True)
class ItemSurvey:
    """Facts of a whole table, needed before its rows are read.

    Forms of its ids (None: an exact table) and of its columns of categories, and day order.
    """

    ids: IdColumn | None
    categories: Mapping[str, IdColumn] = field(default_factory=dict)
    days: DayOrder = field(default_factory=DayOrder)


def survey_items(batches: Iterable[RowBatch], named: Named, *, is_exact: bool) -> ItemSurvey:
    """Survey all rows; with `is_exact`, ids need no survey."""
    categories = () if is_exact else named.fields.get("categories", ())
    surveyed = ItemSurvey(None if is_exact else IdColumn(), {column: IdColumn() for column in categories})
    columns = [named.column(name) for name in _TIMES if name in named.fields]
    for batch in batches if columns or not is_exact else ():
        if surveyed.ids is not None:
            for column, form in ((named.column("item_id"), surveyed.ids), *surveyed.categories.items()):
                form.look_at(present(as_text(batch.frame[column]))[0])
        for column in columns:
            surveyed.days.look_at(batch.frame[column])
    return surveyed


def read_items(
    batch: RowBatch,
    named: Named,
    options: TableOptions,
    sequences: frozenset[str],
    about: ItemSurvey,
    findings: Findings,
    rejected_before: set[int],
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return the accepted rows, and the rejected rows as text with `row` and `reason`; count both in `findings`.

    `sequences` are columns of lists separated by blanks.
    """
    frame = batch.frame
    broken = count_batch(batch, findings)
    cells = _Cells(_without_zero_dates(frame, named), named, options, sequences, about, findings)
    columns = {
        "row": batch.rows,
        "item_id": id_text(frame[named.column("item_id")], "item_id", about.ids, findings),
        "title": cells.text("title", MAX_TITLE_CHARS),
        "categories": cells.categories(),
        "text": cells.text("text", None),
        "available": cells.deciding("available", _is_available, pl.Boolean, False, _FLAG),
        **{
            name: cells.deciding(name, partial(_time_ms, about.days), pl.Int64, hidden, _TIME)
            for name, hidden in _TIMES.items()
        },
        "value": cells.read("value", numbers, pl.Float64),
    }
    table = pl.DataFrame(columns, schema_overrides=ITEM_TYPES)
    attributes = [
        cells.attribute(name, column).alias(f"{ATTRIBUTE}{name}") for name, column in named.attributes.items()
    ]
    table = table.with_columns(*attributes) if attributes else table
    reason = pl.when(is_bad("item_id")).then(pl.lit("item_id")).when(_is_header(frame)).then(pl.lit(HEADER_AGAIN))
    table = table.with_columns(reason=reason, at=pl.int_range(pl.len(), dtype=pl.Int64))
    rejected = reject(table.filter(pl.col("reason").is_not_null()), frame, findings, rejected_before)
    return table.filter(pl.col("reason").is_null()).drop("reason", "at"), pl.concat([broken, rejected], how="diagonal")


def _is_header(frame: pl.DataFrame) -> pl.Series:
    """Return which rows repeat the header, as where files were appended to each other."""
    texts = [name for name, dtype in frame.schema.items() if dtype == pl.String]
    if len(texts) < frame.width:
        return pl.repeat(value=False, n=frame.height, eager=True)
    return frame.select(pl.all_horizontal(pl.col(name) == name for name in texts)).to_series().fill_null(value=False)


def merge_items(items: pl.DataFrame, findings: Findings) -> pl.DataFrame:
    """Return a row per item, in order of first occurrence; note merged rows and differing values."""
    content = pl.struct(pl.exclude("row"))
    is_first = (
        items.select(content.is_first_distinct()).to_series() if items.height else pl.Series([], dtype=pl.Boolean)
    )
    dropped, items = items.filter(~is_first), items.filter(is_first)
    findings.num_duplicates += dropped.height
    findings.note(SAME_ITEM_NOTE, dropped.height, f"item_id={dropped['item_id'][0]}" if dropped.height else "")
    is_repeated = items["item_id"].is_duplicated()
    if is_repeated.any():
        repeated = items.filter(is_repeated)
        merged = repeated.group_by("item_id", maintain_order=True).agg(pl.exclude("item_id").drop_nulls().first())
        num_merged = repeated.height - merged.height
        later = repeated.filter(~repeated["item_id"].is_first_distinct())
        what = "{n} rows are merged into the first row of their item, whose values stay"
        findings.note(what, num_merged, f"row {later['row'][0]}, item_id={later['item_id'][0]}")
        _note_differences(repeated, merged, findings)
        items = pl.concat([items.filter(~is_repeated), merged.select(items.columns)]).sort("row")
    untitled = items.filter(pl.col("title").is_null())
    example = f"item_id={untitled['item_id'][0]}" if untitled.height else ""
    findings.note("{n} without a title are kept under their id", untitled.height, example)
    return items


def _note_differences(repeated: pl.DataFrame, merged: pl.DataFrame, findings: Findings) -> None:
    """Note how many values of later rows differ from the kept values."""
    names = [name for name in repeated.columns if name not in ("row", "item_id")]
    pairs = repeated.join(merged.select("item_id", pl.col(names).name.prefix("kept:")), on="item_id", how="left")
    counts = pairs.select((pl.col(name) != pl.col(f"kept:{name}")).fill_null(value=False).sum() for name in names).row(
        0
    )
    differing = {name.removeprefix(ATTRIBUTE): count for name, count in zip(names, counts, strict=True) if count}
    listed = ", ".join(f"{name} {count}" for name, count in differing.items())
    findings.note("{n} values of merged rows differ from those that stay", sum(differing.values()), listed)


def catalogue_items(items: pl.DataFrame, named: Named) -> pl.DataFrame:
    """Return (item_id, title, categories, text) as models learn from them.

    The title defaults to the id, the text to the title.
    """
    text = pl.col("text") if "text" in named.fields else pl.col("title")
    title = pl.col("title").fill_null(pl.col("item_id"))
    return items.select("item_id", title=title, categories=pl.col("categories").fill_null([]), text=text)


class _Cells:
    """The cells of one batch, by our fields. Exact texts and categories are ours and stay as they are."""

    def __init__(
        self,
        frame: pl.DataFrame,
        named: Named,
        options: TableOptions,
        sequences: frozenset[str],
        about: ItemSurvey,
        findings: Findings,
    ) -> None:
        self._frame, self._named, self._options, self._findings = frame, named, options, findings
        self._sequences, self._about, self._is_exact = sequences, about, about.ids is None

    def text(self, field: str, max_chars: int | None) -> pl.Series:
        """Return a text, cut to its maximal length."""
        if field not in self._named.fields:
            return self._nothing(pl.String)
        column = self._named.column(field)
        if self._is_exact:
            return self._frame[column]
        words, is_word = present(as_text(self._frame[column]))
        if is_word.any():
            self._findings.note(f"{{n}} values of column {column} are words for a missing one", int(is_word.sum()))
        words = self._decoded(words, column)
        if max_chars is None:
            return words
        clean, num_changed = printable(words, max_chars)
        what = f"{{n}} values of column {column} are cut to {max_chars} characters, or lose control characters"
        self._findings.note(what, num_changed)
        return clean

    def read(self, field: str, reader: Reader, dtype: pl.DataType | type[pl.DataType]) -> pl.Series:
        """Return a field's values; unreadable values are missing and counted."""
        if field not in self._named.fields:
            return self._nothing(dtype)
        return self._read(self._named.column(field), reader)[0]

    def deciding(
        self, field: str, reader: Reader, dtype: pl.DataType | type[pl.DataType], hidden: Any, fix: str
    ) -> pl.Series:
        """Return the values of a field that decides whether an item is shown; unreadable values become `hidden`.

        `fix` says what to write instead.
        """
        if field not in self._named.fields:
            return self._nothing(dtype)
        parsed, is_unread = self._read(self._named.column(field), reader, fix)
        return parsed.set(is_unread, hidden)

    def categories(self) -> pl.Series:
        """Return the categories of all category columns; a column of only flags contributes its name."""
        columns = self._named.fields.get("categories", ())
        if not columns:
            return self._nothing(pl.List(pl.String))
        if self._is_exact:
            return self._frame[columns[0]]
        parts = [self._categories_of(column, is_only=len(columns) == 1) for column in columns]
        categories = parts[0] if len(parts) == 1 else _joined(parts)
        is_long = (categories.list.len() > MAX_TEXTS).fill_null(value=False)
        self._findings.note(f"{{n}} items have more than {MAX_TEXTS} categories; the first stay", int(is_long.sum()))
        categories = categories.list.head(MAX_TEXTS) if is_long.any() else categories
        return (
            categories.set((categories.list.len() == 0).fill_null(value=False), None)
            if (categories.list.len() == 0).any()
            else categories
        )

    def _categories_of(self, column: str, *, is_only: bool) -> pl.Series:
        values = self._frame[column]
        if (codes := self._about.categories[column]).num_floats and codes.reads_scientific:
            values = id_text(values, column, codes, self._findings)
        if (
            not is_only
            and (is_set := flags(values)).drop_nulls().len() == (present(as_text(values))[0]).drop_nulls().len()
        ):
            return pl.Series([[column] if flag else None for flag in is_set], dtype=pl.List(pl.String))
        split = self._options.splits.get(column) or self._options.splits.get("categories")
        split = split or (" " if column in self._sequences else None)
        categories = lists(values, split)
        if decoded := entities(categories.explode()):
            self._note_entities(column, categories.list.eval(pl.element().is_in([*decoded])).list.any(), decoded)
            categories = categories.list.eval(pl.element().replace(decoded))
        if values.dtype == pl.String and split is None:
            whole = categories.list.len() == 1
            for sign in (",", ">"):
                has_sign = (categories.list.first().str.contains(sign, literal=True) & whole).fill_null(value=False)
                if has_sign.any():
                    what = (
                        f"{{n}} values of column {column} hold '{sign}' and are one category each; "
                        f"--list '{column}={sign}' splits them"
                    )
                    self._findings.note(what, int(has_sign.sum()), str(categories.filter(has_sign)[0][0]))
        texts = categories.list.eval(pl.element().str.replace_all(r"[\p{C}\p{Z}]+", " ").str.slice(0, MAX_TEXT_CHARS))
        return texts.list.eval(pl.element().filter(pl.element() != ""))

    def attribute(self, name: str, column: str) -> pl.Series:
        """Return an attribute's values: numbers, flags, texts or lists of texts."""
        values, options = self._frame[column], self._options
        if {name, column} & options.numbers:
            return self._read(column, numbers)[0]
        if {name, column} & options.flags:
            return self._read(column, flags)[0]
        if split := options.splits.get(column) or options.splits.get(name):
            return self._texts(column, lists(values, split))
        dtype = values.dtype
        if dtype == pl.Boolean:
            return values
        if dtype.is_numeric():
            return self._read(column, numbers)[0]
        if isinstance(dtype, pl.List | pl.Array):
            return self._texts(column, lists(values))
        if isinstance(dtype, pl.Datetime):
            return values.dt.to_string("iso:strict")
        words, is_word = present(as_text(values))
        if is_word.any():
            what = f"{{n}} values of column {column} are words for a missing one"
            self._findings.note(what, int(is_word.sum()), str(values.filter(is_word)[0]))
        is_long = (words.str.len_chars() > MAX_TEXT_CHARS).fill_null(value=False)
        if is_long.any():
            self._findings.unread(
                column,
                int(is_long.sum()),
                (
                    f"one of {words.filter(is_long).str.len_chars()[0]} characters where an attribute has at most "
                    f"{MAX_TEXT_CHARS}"
                ),
            )
            words = words.set(is_long, None)
        return printable(words, MAX_TEXT_CHARS)[0]

    def _texts(self, column: str, texts: pl.Series) -> pl.Series:
        is_bad = (texts.list.len() > MAX_TEXTS) | (
            texts.list.eval(pl.element().str.len_chars()).list.max() > MAX_TEXT_CHARS
        )
        is_bad = is_bad.fill_null(value=False)
        self._findings.unread(
            column, int(is_bad.sum()), f"a list of more than {MAX_TEXTS} texts or {MAX_TEXT_CHARS} characters"
        )
        texts = texts.set(is_bad, None) if is_bad.any() else texts
        clean = texts.list.eval(pl.element().str.replace_all(r"[\p{C}\p{Z}]+", " ").str.strip_chars())
        clean = clean.list.eval(pl.element().filter(pl.element() != ""))
        return pl.Series(
            [names if names is not None and len(names) else None for names in clean.to_list()], dtype=pl.List(pl.String)
        )

    def _read(self, column: str, reader: Reader, fix: str = "") -> tuple[pl.Series, pl.Series]:
        """Return a column's values, and which are unreadable; count these."""
        values = self._frame[column]
        parsed = reader(values)
        written = as_text(values)
        words, _ = present(written)
        is_missing = values.is_null() | (written.is_not_null() & words.is_null())
        is_unread = parsed.is_null() & ~(is_missing | values.is_nan() if values.dtype.is_float() else is_missing)
        if is_unread.any():
            example = words.filter(is_unread)[0] or values.filter(is_unread)[0]
            self._findings.unread(column, int(is_unread.sum()), str(example)[:60], fix)
        return parsed, is_unread

    def _decoded(self, words: pl.Series, column: str) -> pl.Series:
        """Return texts without HTML entities."""
        if not (decoded := entities(words)):
            return words
        self._note_entities(column, words.is_in([*decoded]), decoded)
        return words.replace(decoded)

    def _note_entities(self, column: str, is_decoded: pl.Series, decoded: Mapping[str, str]) -> None:
        what = f"{{n}} values of column {column} have HTML entities, which are decoded"
        self._findings.note(what, int(is_decoded.sum()), next(iter(decoded)))

    def _nothing(self, dtype: pl.DataType | type[pl.DataType]) -> pl.Series:
        return pl.Series([None], dtype=dtype).new_from_index(0, self._frame.height)


def _joined(parts: Sequence[pl.Series]) -> pl.Series:
    frame = pl.DataFrame([part.alias(str(index)).fill_null([]) for index, part in enumerate(parts)])
    return frame.select(pl.concat_list(pl.all()).list.unique(maintain_order=True).alias("categories"))["categories"]


def _is_available(values: pl.Series) -> pl.Series:
    """Return flags; another number is a stock."""
    return flags(values).fill_null(numbers(values) > 0)


def _without_zero_dates(frame: pl.DataFrame, named: Named) -> pl.DataFrame:
    """Return the cells without times before April 1970, such as 0000-00-00 or 0, by which tools mean none.

    Other small numbers are in an unknown unit.
    """
    for name in (named.column(name) for name in _TIMES if name in named.fields):
        words = as_text(frame[name]).str.strip_chars()
        is_early = any_times(frame[name]).dt.epoch("ms") < MIN_TIME_MS
        is_early &= ~words.str.contains(r"^\d{1,7}(?:\.\d*)?$")
        is_early = is_early.fill_null(value=False) | words.str.contains(r"^0+(?:\.0*)?$|^0000-|^-\d+(?:\.\d*)?$")
        if is_early.any():
            frame = frame.with_columns(pl.when(~is_early.fill_null(value=False)).then(pl.col(name)).alias(name))
    return frame


def _time_ms(days: DayOrder, values: pl.Series) -> pl.Series:
    parsed = any_times(values, days.day_first).dt.epoch("ms")
    return parsed.set((parsed < MIN_TIME_MS).fill_null(value=False), None)
