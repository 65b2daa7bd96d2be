"""Rows of events: validation and normalisation.

    user_id, item_id    text; whole numbers that a tool wrote as `7.0` become 7
    event_time          timestamp[us, UTC] (pipelines.tables.times)
    offset_ms           milliseconds added to event_time, where a table has the day and the time within a session apart
    event_type          `interaction` if missing
    value               1 if missing or unreadable
    event_id            distinguishes events that are otherwise equal
    impressions         items shown, `N1-1 N2-0`: each is an event, a click or an impression
    history             items that the user had before the first row: clicks just before it

A row whose item is a list, such as a basket, is an event for each item. Events are ordered by time, ties by row; exact
duplicates are dropped.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import polars as pl

from pipelines.tables.cells import as_text, lists, numbers, present
from pipelines.tables.columns import EXAMPLES, Named
from pipelines.tables.delimited import RowBatch
from pipelines.tables.findings import Findings
from pipelines.tables.ids import IdColumn, is_bad, looks_whole, whole_form
from pipelines.tables.times import PLAUSIBLE_TIME, UTC_US, DayOrder, SerialDays, is_day, times
from services.contracts.message import MAX_ID_CHARS
from services.errors import DataError

DEFAULT_TYPE = "interaction"
EVENT_TYPES: dict[str, pl.DataType | type[pl.DataType]] = {
    "row": pl.Int64,
    "user_id": pl.String,
    "item_id": pl.String,
    "event_time": UTC_US,
    "event_type": pl.String,
    "value": pl.Float64,
    "event_id": pl.String,
}
"""The columns of accepted rows."""
SAME_EVENT = ("user_id", "item_id", "event_time", "event_type", "value", "event_id")
SAME_NOTE = (
    "{n} exact duplicates (same user, item, time, type and value) are dropped; a finer event_time or an event_id "
    "would tell real repeats apart"
)
SAME_ITEM_NOTE = "{n} exact duplicates are dropped"
MAX_OFFSET_MS = 366 * 86_400_000
_TRUTHS = {"true": 1.0, "false": 0.0}
_ASIDE = {"row": pl.Int64, "reason": pl.String}
UNKNOWN_ITEM = "item_id not in items"
_IDS = ("user_id", "item_id")
_CODES = (*_IDS, "event_type")
"""Fields whose numbers are names, so that `7.0` is 7."""
_MOST = {"user": pl.UInt64, "most": pl.Int64}
_CLICK, _IMPRESSION = "click", "impression"


@dataclass(slots=True)
class EventSurvey:
    """Facts of a whole table, needed before its rows are read: form of its ids, day order, first event times."""

    ids: dict[str, IdColumn] = field(default_factory=lambda: {name: IdColumn() for name in _CODES})
    days: DayOrder = field(default_factory=DayOrder)
    serial: SerialDays = field(default_factory=SerialDays)
    first_times: pl.DataFrame | None = None
    num_midnights: int = 0
    num_times: int = 0
    num_back: int = 0
    num_forward: int = 0
    num_ancient: int = 0
    ancient: str = ""
    rejected: set[int] = field(default_factory=set)
    newest: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=_MOST))
    oldest: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=_MOST))

    @property
    def is_newest_first(self) -> bool:
        """Whether the times of each user fall from row to row, so that of equal times the last row is the earliest."""
        return self.num_back > 0 and not self.num_forward

    def refuse(self, named: Named, table: str) -> None:
        """Raise DataError for an id column with fractions, or times in days."""
        for name in _IDS:
            self.ids[name].refuse(named.column(name), table, EXAMPLES[name])
        self.serial.refuse(named.column("event_time"), table, EXAMPLES["event_time"])


def survey(batches: Iterable[RowBatch], named: Named) -> EventSurvey:
    """Survey all rows."""
    surveyed = EventSurvey()
    for batch in batches:
        for name in (name for name in _CODES if name in named.fields):
            words = (_all_items if name == "item_id" else as_text)(batch.frame[named.column(name)])
            surveyed.ids[name].look_at(present(words if name in _IDS else words.unique())[0])
        times_written = batch.frame[named.column("event_time")]
        surveyed.days.look_at(times_written)
        if times_written.dtype.is_numeric() or times_written.dtype == pl.String:
            surveyed.serial.look_at(present(as_text(times_written))[0])
    return surveyed


def survey_histories(batches: Iterable[RowBatch], named: Named, surveyed: EventSurvey) -> None:
    """Survey the time of each user's first row, which ends the given history."""
    for batch in batches:
        users = whole_form(present(as_text(batch.frame[named.column("user_id")]))[0], surveyed.ids["user_id"])
        at, _ = _times(batch.frame, named, surveyed)
        first = pl.DataFrame({"user_id": users, "first": at}).drop_nulls()
        first = first if surveyed.first_times is None else pl.concat([surveyed.first_times, first])
        surveyed.first_times = first.group_by("user_id").agg(pl.col("first").min())


def count_batch(batch: RowBatch, findings: Findings) -> pl.DataFrame:
    """Count a batch's rows and notes; return the rows that its format could not read, as `row` and `reason`."""
    for what, count, example in batch.notes:
        findings.note(what, count, example)
    findings.num_rows += len(batch.rows) + len(batch.set_aside)
    for row, why in batch.set_aside:
        findings.reject(why, [row])
    return pl.DataFrame([*batch.set_aside], _ASIDE, orient="row")


def read_events(
    batch: RowBatch,
    named: Named,
    about: EventSurvey,
    findings: Findings,
    known: pl.Series | None = None,
    keeps: Callable[[pl.DataFrame], pl.Series] | None = None,
    refuse: pl.Expr | None = None,
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return the accepted rows, and the rejected rows as text with `row` and `reason`; count both in `findings`.

    Args:
        batch: Rows as written.
        named: The columns to read.
        about: The survey of the whole table.
        findings: Counts changes and rejected rows.
        known: Ids of items; rows of other items are set aside. None: all are accepted.
        keeps: Predicate over rows with user_id and event_time; other rows are ignored.
        refuse: Expression over accepted rows: the reason to set a row aside all the same, or null.
    """
    frame = batch.frame
    broken = count_batch(batch, findings)
    if not frame.height:
        return pl.DataFrame(schema=EVENT_TYPES), broken
    at, num_unread = _times(frame, named, about)
    findings.note("{n} with an invalid offset_ms keep their event_time", num_unread)
    users = id_text(frame[named.column("user_id")], "user_id", about.ids["user_id"], findings)
    value, unread = _values(frame, named, findings)
    table = pl.DataFrame(
        {
            "at": pl.int_range(frame.height, dtype=pl.Int64, eager=True),
            "row": batch.rows,
            "user_id": users,
            "event_time": at,
            "event_type": _types(frame, named, about, findings),
            "value": value,
            "event_id": _optional_text(frame, named, "event_id"),
            "unread": unread,
        }
    )
    if keeps is not None:
        stays = keeps(table)
        findings.num_rows -= int((~stays).sum())
        frame = frame.filter(stays)
        table = table.filter(stays).with_columns(at=pl.int_range(pl.len(), dtype=pl.Int64))
    table = _with_items(table, frame, named, about, findings)
    if known is not None and "written" in table.columns:
        table = _as_known(table, known)
    reason = _reason(about, known)
    reason = reason if refuse is None else pl.coalesce(reason, refuse)
    table = table.with_columns(reason=reason)
    rejected = reject(table.filter(pl.col("reason").is_not_null()), frame, findings, about.rejected)
    good = table.filter(pl.col("reason").is_null())
    unread_rows = good.filter(pl.col("unread").is_not_null())
    if unread_rows.height:
        findings.num_unread["value"] = findings.num_unread.get("value", 0) + unread_rows.height
        what = "{n} with an invalid value count with the value 1"
        findings.note(what, unread_rows.height, f"{_example(unread_rows)}, value={unread_rows['unread'][0]}")
    _count_times(good, about)
    return good.select(*EVENT_TYPES), pl.concat([broken, rejected], how="diagonal")


def note_times(about: EventSurvey, findings: Findings) -> None:
    """Note the times of the whole table: dates without times, or an order that differs from the rows'."""
    if about.num_times and about.num_midnights == about.num_times:
        order = "are in reverse order of" if about.is_newest_first else "keep the order of"
        findings.note(f"all times are whole days: events of one day {order} their rows")
    findings.note(
        "{n} times are before 1990: numbers are Unix seconds or finer; write days, minutes and years as dates",
        about.num_ancient,
        about.ancient,
    )
    ties = ", and equal times from the last row up" if about.is_newest_first else ""
    findings.note(
        f"{{n}} rows are older than a row of the same user above them: events are ordered by time{ties}", about.num_back
    )


def distinct(events: pl.DataFrame, findings: Findings) -> pl.DataFrame:
    """Return events without exact duplicates, keeping the first; note duplicates and rows that differ only in value."""
    is_first = events.select(pl.struct(SAME_EVENT).is_first_distinct()).to_series()
    dropped, kept = events.filter(~is_first), events.filter(is_first)
    findings.num_duplicates += dropped.height
    findings.note(SAME_NOTE, dropped.height, _example(dropped))
    by_value = kept.filter(~pl.struct([name for name in SAME_EVENT if name != "value"]).is_first_distinct())
    findings.note("{n} that differ from another row only in the value are kept", by_value.height, _example(by_value))
    return kept


def _example(rows: pl.DataFrame) -> str:
    if not rows.height:
        return ""
    row = rows.row(0, named=True)
    return f"user_id={row['user_id']}, item_id={row['item_id']}, event_time={row['event_time']}"


def refuse_empty(
    findings: Findings, table: str, named: Named, num_accepted: int, known: pl.Series | None = None
) -> None:
    """Raise DataError if no row is accepted: the wrong file or wrong options."""
    if not findings.num_rows:
        raise DataError("", f"{table} has no rows", "a file with a row for each event or item")
    if not num_accepted and findings.set_aside:
        reason, group = max(findings.set_aside.items(), key=lambda pair: pair[1].num_rows)
        field = reason.partition(" ")[0]
        sample = group.samples[0].get(named.column(field)) if group.samples and field in named.fields else None
        shown = f"such as {sample!r:.80}" if sample is not None else f"such as row {group.rows[0]}"
        problem = f"not one row can be used, {shown} in {table}" + ("" if reason == field else f" ({reason})")
        if reason == field and (other := named.others.get(field)) is not None:
            problem += f"; --column {other}={field} reads another column"
        if reason == field and field.endswith("_id") and len(str(sample)) >= MAX_ID_CHARS:
            problem += f"; ids have at most {MAX_ID_CHARS} characters"
        if reason == UNKNOWN_ITEM and known is not None:
            problem += f"; the items have ids such as {', '.join(map(repr, known.head(3)))}"
        raise DataError(field if field in EXAMPLES else "", problem, EXAMPLES.get(field, f"a table of {findings.kind}"))


def id_text(values: pl.Series, name: str, column: IdColumn | None, findings: Findings) -> pl.Series:
    """Return ids or codes in their original form, null where missing, and note changes.

    Without a `column`, they are exact.
    """
    written = as_text(values)
    if column is None:
        return written
    words, is_word = present(written)
    num_blank = (
        int((written.str.len_bytes() != words.str.len_bytes()).fill_null(value=False).sum())
        if written.dtype == pl.String
        else 0
    )
    findings.note(f"{{n}} values of column {name} have blanks around them, which are removed", num_blank)
    findings.note(
        f"{{n}} values of column {name} are words for a missing one",
        int(is_word.sum()),
        str(written.filter(is_word)[0]) if is_word.any() else "",
    )
    if not column.num_floats:
        return words
    ids, what = whole_form(words, column), f"{{n}} values of column {name}"
    if column.keeps_fractions:
        changed = looks_whole(words)
        what += " look like floating-point numbers, and others have fractions: all stay as they are written"
    else:
        changed = (ids != words).fill_null(value=False)
        what += " are written as floating-point numbers and read as integers"
    if changed.any():
        example = words.filter(changed)[0]
        example += "" if column.keeps_fractions else f" as {ids.filter(changed)[0]}"
        findings.note(what, int(changed.sum()), example)
    return ids


def _times(frame: pl.DataFrame, named: Named, about: EventSurvey) -> tuple[pl.Series, int]:
    """Return the times, offsets included, and the number of unreadable offsets."""
    at = times(frame[named.column("event_time")], about.days.day_first)
    if "offset_ms" not in named.fields:
        return at, 0
    written = frame[named.column("offset_ms")]
    offset = numbers(written)
    offset = offset.set((offset.abs() > MAX_OFFSET_MS).fill_null(value=False), None)
    is_unread = offset.is_null() & present(as_text(written))[0].is_not_null()
    micros = (offset * 1_000).round().cast(pl.Int64).fill_null(0)
    return times(at + micros.cast(pl.Duration("us"))), int(is_unread.sum())


def _types(frame: pl.DataFrame, named: Named, about: EventSurvey, findings: Findings) -> pl.Series:
    if "event_type" not in named.fields:
        return pl.Series([DEFAULT_TYPE]).new_from_index(0, frame.height)
    types = id_text(frame[named.column("event_type")], "event_type", about.ids["event_type"], findings)
    return types.fill_null(DEFAULT_TYPE)


def _values(frame: pl.DataFrame, named: Named, findings: Findings) -> tuple[pl.Series, pl.Series]:
    """Return the values, 1 where missing or unreadable, and the text of unreadable values; count missing values."""
    all_readable = pl.Series([None], dtype=pl.String).new_from_index(0, frame.height)
    if "value" not in named.fields:
        return pl.Series([1.0]).new_from_index(0, frame.height), all_readable
    column = frame[named.column("value")]
    values = numbers(column)
    if not values.is_null().any():
        return values, all_readable
    words, _ = present(as_text(column))
    truths = words.str.to_lowercase().replace_strict(_TRUTHS, default=None, return_dtype=pl.Float64)
    values = values.fill_null(truths)
    findings.note(
        "{n} without a value count with the value 1, also where rules have a `min_value`",
        int((values.is_null() & words.is_null()).sum()),
    )
    return values.fill_null(1.0), words.set(values.is_not_null(), None)


def _optional_text(frame: pl.DataFrame, named: Named, name: str) -> pl.Series:
    if name not in named.fields:
        return pl.Series([None], dtype=pl.String).new_from_index(0, frame.height)
    return present(as_text(frame[named.column(name)]))[0]


def _with_items(
    table: pl.DataFrame, frame: pl.DataFrame, named: Named, about: EventSurvey, findings: Findings
) -> pl.DataFrame:
    """Add the item of each row; a row with several items becomes several rows."""
    parts = []
    if "item_id" in named.fields:
        rows, column = _each_item(table, frame[named.column("item_id")], findings), about.ids["item_id"]
        written = {"written": present(rows["item_id"])[0]} if column.num_floats else {}
        parts.append(rows.with_columns(item_id=id_text(rows["item_id"], "item_id", column, findings), **written))
    if "impressions" in named.fields:
        shown = as_text(frame[named.column("impressions")]).str.split(" ").list.drop_nulls()
        exploded = table.with_columns(item_id=shown).explode("item_id").filter(pl.col("item_id") != "")
        clicked = pl.col("item_id").str.ends_with("-1")
        is_labelled = pl.col("item_id").str.contains(r"-[01]$")
        kind = pl.when(clicked).then(pl.lit(_CLICK)).when(is_labelled).then(pl.lit(_IMPRESSION)).otherwise("event_type")
        parts.append(exploded.with_columns(event_type=kind, item_id=pl.col("item_id").str.replace(r"-[01]$", "")))
    if "history" in named.fields:
        parts.append(_histories(table, as_text(frame[named.column("history")]), about))
    return pl.concat(parts, how="diagonal").sort("at", maintain_order=True) if len(parts) > 1 else parts[0]


def _each_item(table: pl.DataFrame, column: pl.Series, findings: Findings) -> pl.DataFrame:
    """Add the item of each row as written; a row that lists items becomes a row for each."""
    if isinstance(column.dtype, pl.List | pl.Array):
        return _exploded(table, lists(column), findings)
    words = as_text(column)
    table = table.with_columns(item_id=words)
    if not words.str.contains("[", literal=True).any():
        return table
    is_list = words.str.contains(r"^\s*\[.*\]\s*$").fill_null(value=False)
    listed = _exploded(table.filter(is_list), lists(words.filter(is_list)), findings)
    return pl.concat([table.filter(~is_list), listed]).sort("at", maintain_order=True)


def _all_items(column: pl.Series) -> pl.Series:
    """Return the items of all rows as written."""
    rows = pl.DataFrame({"at": pl.int_range(len(column), eager=True)})
    return _each_item(rows, column, Findings("events"))["item_id"]


def _exploded(table: pl.DataFrame, items: pl.Series, findings: Findings) -> pl.DataFrame:
    findings.note("{n} rows list several items: each is an event", int((items.list.len() > 1).sum()))
    items = items.set((items.list.len() == 0).fill_null(value=False), None)
    return table.with_columns(item_id=items).explode("item_id")


def _histories(table: pl.DataFrame, written: pl.Series, about: EventSurvey) -> pl.DataFrame:
    """Return the histories of users' first rows as clicks, a millisecond apart, just before them."""
    items = written.str.split(" ").list.eval(pl.element().filter(pl.element() != ""))
    first = (
        about.first_times
        if about.first_times is not None
        else pl.DataFrame(schema={"user_id": pl.String, "first": UTC_US})
    )
    rows = table.with_columns(item_id=items).join(first, on="user_id", how="inner", maintain_order="left")
    rows = rows.filter((pl.col("event_time") == pl.col("first")) & (pl.col("item_id").list.len() > 0)).unique(
        "user_id", keep="first", maintain_order=True
    )
    length = pl.col("item_id").list.len()
    rows = (
        rows.with_columns(nth=pl.int_ranges(0, length), many=length).explode("item_id", "nth", empty_as_null=False)
        if rows.height
        else rows.with_columns(nth=pl.lit(0, pl.Int64), many=length).with_columns(pl.col("item_id").list.first())
    )
    before = pl.duration(milliseconds=pl.col("many").cast(pl.Int64) - pl.col("nth"))
    return rows.with_columns(
        event_time=pl.col("event_time") - before, event_type=pl.lit(_CLICK), unread=pl.lit(None, pl.String)
    ).drop("first", "nth", "many")


def _as_known(table: pl.DataFrame, known: pl.Series) -> pl.DataFrame:
    """Return rows with item ids in the form of `known` if both are the same number."""
    words = table["written"]
    whole = words.str.replace(r"\.0+$", "")
    item = pl.col("item_id")
    ids = known.implode()
    joined = (
        pl.when(item.is_in(ids))
        .then(item)
        .when(pl.col("written").is_in(ids))
        .then("written")
        .when(pl.col("whole").is_in(ids))
        .then("whole")
        .otherwise(item)
    )
    return table.with_columns(whole=whole).with_columns(item_id=joined).drop("whole")


def _reason(about: EventSurvey, known: pl.Series | None) -> pl.Expr:
    reason = pl.when(is_bad("user_id")).then(pl.lit("user_id")).when(is_bad("item_id")).then(pl.lit("item_id"))
    late = "event_time"
    if about.days.day_first is None and about.days.num_slashed:
        late = "event_time may start with the day or the month; write 2026-12-31"
    reason = (
        reason.when(pl.col("event_time").is_null())
        .then(pl.lit(late))
        .when(is_bad("event_type"))
        .then(pl.lit("event_type"))
    )
    reason = reason.when(pl.col("event_id").is_not_null() & is_bad("event_id")).then(pl.lit("event_id"))
    return (
        reason if known is None else reason.when(~pl.col("item_id").is_in(known.implode())).then(pl.lit(UNKNOWN_ITEM))
    )


def reject(rows: pl.DataFrame, frame: pl.DataFrame, findings: Findings, before: set[int]) -> pl.DataFrame:
    """Count rows by their `reason`, and return them as text; a row equal to one in `before` is an exact duplicate.

    Rows of events have `user_id` as it is read, by which an erasure finds them.
    """
    if not rows.height:
        return pl.DataFrame(schema=_ASIDE)
    text = frame[rows["at"]].select(pl.all().map_batches(_as_shown, return_dtype=pl.String))
    hashes = text.hash_rows(seed=7)
    is_first = hashes.is_first_distinct() & ~hashes.is_in(list(before))
    before.update(hashes.filter(is_first))
    if not is_first.all():
        findings.num_duplicates += int((~is_first).sum())
        findings.note(SAME_NOTE if findings.kind == "events" else SAME_ITEM_NOTE, int((~is_first).sum()))
    rows, text = rows.filter(is_first), text.filter(is_first)
    for (reason,), group in rows.with_columns(nth=pl.int_range(pl.len())).group_by("reason", maintain_order=True):
        findings.reject(
            str(reason), group["row"].unique(maintain_order=True).to_list(), text[group["nth"].head(5)].to_dicts()
        )
    aside = rows.select("row", "reason").with_columns(column for column in text if column.name not in _ASIDE)
    if "user_id" not in rows.columns:
        return aside
    written = [text["user_id"]] if "user_id" in text.columns else []
    return aside.with_columns(user_id=pl.select(pl.coalesce(rows["user_id"], *written)).to_series())


def _as_shown(column: pl.Series) -> pl.Series:
    values = column.to_list()
    return pl.Series(column.name, [None if value is None else str(value)[:256] for value in values], dtype=pl.String)


def _count_times(good: pl.DataFrame, about: EventSurvey) -> None:
    """Count dates without a time, times before 1990, and rows older or newer than an earlier row of the same user."""
    about.num_times += good.height
    about.num_midnights += int(is_day(good["event_time"]).sum())
    ancient = good.filter(pl.col("event_time") < PLAUSIBLE_TIME)
    if ancient.height:
        about.num_ancient, about.ancient = about.num_ancient + ancient.height, about.ancient or _example(ancient)
    rows = good.select(user=pl.col("user_id").hash(), at=pl.col("event_time").dt.epoch("us"))
    num_back, about.newest = _num_fallen(rows, about.newest)
    about.num_back += num_back
    if not about.num_forward:
        about.num_forward, about.oldest = _num_fallen(rows.with_columns(-pl.col("at")), about.oldest)


def _num_fallen(rows: pl.DataFrame, most: pl.DataFrame) -> tuple[int, pl.DataFrame]:
    """Return how many rows (user, at) are below an earlier row of their user, and the largest `at` of each user."""
    rows = rows.join(most, on="user", how="left", maintain_order="left")
    rows = rows.with_columns(most=pl.max_horizontal("most", pl.col("at").cum_max().over("user")))
    most = pl.concat([most, rows.select("user", "most")]).group_by("user").agg(pl.col("most").max())
    return int((rows["at"] < rows["most"]).sum()), most


def order_events(events: pl.DataFrame) -> pl.DataFrame:
    """Sort by time, ties by row; shift ties within a user by microseconds, so that each user's times rise strictly."""
    ordered = events.with_row_index("place").sort("user_id", "event_time", "place")
    nth = pl.int_range(pl.len(), dtype=pl.Int64).over("user_id")
    micros = pl.col("event_time").dt.epoch("us")
    risen = ((micros - nth).cum_max().over("user_id") + nth).cast(pl.Datetime("us")).dt.replace_time_zone("UTC")
    return ordered.with_columns(event_time=risen).sort("event_time", "user_id").drop("place")
