"""The examples of the protocol's split: leave one out by time. Which rows there are, and how later stages read them.

Of each user with at least three positive events the last is the test label, the one before it the validation label, and the model trains on
all before those. Users with fewer only train. Every row carries the time as of which its history is read, so the feature store, and not
this file, decides what was known then.
"""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np
import polars as pl

from models.prompt import window_start
from services.contracts.event_roles import Role
from services.stream.aggregate import history_limits

MIN_EVENTS_TO_EVALUATE = 3


class Split(StrEnum):
    """What a row is for."""

    TRAIN = "train"
    VALID = "valid"
    TEST = "test"


def as_of_rows(events: pl.DataFrame, max_items: int) -> pl.DataFrame:
    """Return (user_id, event_timestamp, split, target_item_id, idle_s) for ordered events in their roles.

    A label's row is as of the microsecond before it, and `idle_s` is its time after the user's event before, in seconds. A training row has no target: its history is the sequence to learn.
    Of a history longer than the `max_items` that the store keeps, one training row begins where the next later one was cut,
    so that each event is learned from once.
    """
    is_positive = pl.col("role") == Role.POSITIVE
    placed = events.select(
        "user_id",
        "item_id",
        "event_time",
        idle_s=pl.col("event_time").diff().over("user_id").dt.total_microseconds() / 1e6,
        place=pl.int_range(pl.len()).over("user_id"),
        total=pl.len().over("user_id"),
        from_end=pl.when(is_positive).then(is_positive.cum_sum(reverse=True).over("user_id")),
        num_labels=is_positive.sum().over("user_id"),
    )
    evaluated, from_end = pl.col("num_labels") >= MIN_EVENTS_TO_EVALUATE, pl.col("from_end")
    valid_place = pl.col("place").filter(from_end == 2).first().over("user_id")
    placed = placed.with_columns(num_train=pl.when(evaluated).then(valid_place).otherwise(pl.col("total")))
    num_train = pl.col("num_train")
    longest = int(placed.select(pl.col("total").max()).item() or 0)
    train = placed.filter(_ends_a_row(pl.col("place").cast(pl.Int64) + 1, num_train.cast(pl.Int64), max_items, longest))
    parts = [
        _rows(train, Split.TRAIN, pl.col("event_time"), pl.lit(None, pl.String)),
        _rows(placed.filter(evaluated & (from_end == 2)), Split.VALID, _just_before(), pl.col("item_id")),
        _rows(placed.filter(evaluated & (from_end == 1)), Split.TEST, _just_before(), pl.col("item_id")),
    ]
    return pl.concat(parts)


def _ends_a_row(count: pl.Expr, num_train: pl.Expr, max_items: int, longest: int) -> pl.Expr:
    """Whether a training row holds the newest of the first `count` events: all of them, or what the row after it lacks.

    `longest` is the most events that a user has.
    """
    stride = history_limits(max_items).stride
    kept = max_items // stride * stride
    starts = pl.Series([window_start(length, max_items, stride) for length in range(longest + 1)])
    cut = pl.lit(starts).gather(num_train)
    return (count == num_train) | ((count <= cut) & ((cut - count) % kept == 0))


def _just_before() -> pl.Expr:
    return pl.col("event_time") - pl.duration(microseconds=1)


def _rows(events: pl.DataFrame, split: Split, when: pl.Expr, target: pl.Expr) -> pl.DataFrame:
    idle_s = pl.when(target.is_not_null()).then("idle_s")
    return events.select(
        "user_id", event_timestamp=when, split=pl.lit(split.value), target_item_id=target, idle_s=idle_s
    )


@dataclass(frozen=True, slots=True)
class Cases:
    """Labelled histories of one split, aligned.

    Args:
        histories: Item indices, oldest first.
        targets: The index of the item that came next.
        idle_s: Its time after the history's newest event, in seconds; NaN where that is not known.
    """

    user_ids: tuple[str, ...]
    histories: tuple[np.ndarray, ...]
    targets: np.ndarray
    idle_s: np.ndarray

    def __len__(self) -> int:
        """The number of cases."""
        return len(self.user_ids)


def read_sequences(tokenized: Path) -> list[np.ndarray]:
    """Read the sequences to train on; those too short to hold a next item are left out."""
    return [np.ma.getdata(sequence) for sequence in read_labelled_sequences(tokenized)]


def read_labelled_sequences(tokenized: Path) -> list[np.ndarray]:
    """Read the same; a sequence with items that are no labels is a masked array, in which those are masked."""
    rows = _read(tokenized, Split.TRAIN).select("history", "is_label")
    return [_sequence(*row) for row in rows.iter_rows() if len(row[0]) > 1]


def read_cases(tokenized: Path, split: Split) -> Cases:
    """Read the cases of the validation or the test split."""
    rows = _read(tokenized, split)
    histories = tuple(np.array(history, dtype=np.int64) for history in rows["history"].to_list())
    idle_s = rows["idle_s"].cast(pl.Float64).fill_null(np.nan).to_numpy()
    return Cases(tuple(rows["user_id"]), histories, rows["target"].to_numpy().astype(np.int64), idle_s)


def sample_cases(cases: Cases, most: int) -> Cases:
    """Return at most this many cases, evenly taken."""
    step = max(1, -(-len(cases) // most))
    return Cases(cases.user_ids[::step], cases.histories[::step], cases.targets[::step], cases.idle_s[::step])


def _sequence(history: list[int], is_label: list[bool] | None) -> np.ndarray:
    items = np.array(history, dtype=np.int64)
    if is_label is None:
        return items
    masked: np.ndarray = np.ma.MaskedArray(items, mask=~np.array(is_label))
    return masked


def _read(tokenized: Path, split: Split) -> pl.DataFrame:
    return pl.read_parquet(tokenized / "examples.parquet").filter(pl.col("split") == split)
