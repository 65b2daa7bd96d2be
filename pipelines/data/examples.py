"""The examples of a split: which rows exist, and how later stages read them.

    leave-one-out   For each user with at least three positive events, the last is the test label and the one before it
                    the validation label; the model trains on all earlier events. Users with fewer events are only
                    trained on.
    global-time     One cut in time for all users: the model trains on all events before the last fifth of the positive
                    events, is validated on each user's last label in the tenth after it, and tested on each user's last
                    label in the final tenth. No model has seen an event later than its evaluation label, or any event
                    after the first cut.

In both, a test label is the user's last positive event and at least the third. Every row carries the time as of which
its history is read, so the feature store, not this file, decides what was known then.

The published model trains on all events, after the gate: in its rows (`refit_rows`) the training rows hold every event,
and the test labels validate. These rows are in a separate folder, which no stage before the gate reads.
"""

import json
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from models.prompt import window_start
from pipelines.data.labelled import Dislikes, Labelled, Weighted
from services.contracts.event_roles import Role
from services.stream.aggregate import history_limits

MIN_EVENTS_TO_EVALUATE = 3
SPLIT = "split.json"
REFIT = "refit"
"""The folder of the refit's rows; it holds the same files."""
DISLIKES = pl.List(pl.Struct({"item": pl.Int32, "place": pl.Int32, "weight": pl.Float32}))
"""The data type of the `dislikes` column."""
_VALID_FROM_SHARE, _TEST_FROM_SHARE = 0.8, 0.9
"""Fractions of the positive events, in order of time, before each cut of the global time split."""


class Split(StrEnum):
    """The split of a row."""

    TRAIN = "train"
    VALID = "valid"
    TEST = "test"


@dataclass(frozen=True, slots=True)
class Cuts:
    """The two times of the global time split; the model trains on events before the first."""

    valid_from: datetime
    test_from: datetime


def global_cuts(events: pl.DataFrame) -> Cuts:
    """Return the cuts for these events, which must include a positive event."""
    times = events.filter(pl.col("role") == Role.POSITIVE)["event_time"].sort()
    valid_from, test_from = (times[int(share * len(times))] for share in (_VALID_FROM_SHARE, _TEST_FROM_SHARE))
    return Cuts(valid_from, test_from)


def as_of_rows(events: pl.DataFrame, max_items: int, cuts: Cuts | None = None) -> pl.DataFrame:
    """Return (user_id, event_timestamp, split, target_item_id, idle_s) for ordered events in their roles.

    Without cuts, the split is leave-one-out. A label's row is as of the microsecond before it, and `idle_s` is its time
    after the user's previous event, in seconds. A training row has no target: its history is the training sequence. If
    a history exceeds the `max_items` that the store keeps, each training row begins where the next later row was cut,
    so that each event is trained on once.
    """
    placed = _placed(events)
    return _all_rows(_left_out(placed) if cuts is None else _after(placed, cuts), max_items)


def refit_rows(events: pl.DataFrame, max_items: int) -> pl.DataFrame:
    """Return the same columns for training on all events: training rows hold every event, and test labels validate."""
    placed = _left_out(_placed(events))
    return _all_rows(placed.with_columns(is_valid="is_test", is_test=pl.lit(False), num_train="total"), max_items)


def _placed(events: pl.DataFrame) -> pl.DataFrame:
    """Return each event with its position in the user's history, and each label with its position among the labels."""
    is_positive = pl.col("role") == Role.POSITIVE
    return events.select(
        "user_id",
        "item_id",
        "event_time",
        is_positive=is_positive,
        idle_s=pl.col("event_time").diff().over("user_id").dt.total_microseconds() / 1e6,
        place=pl.int_range(pl.len()).over("user_id"),
        total=pl.len().over("user_id"),
        nth_label=is_positive.cum_sum().over("user_id"),
        num_labels=is_positive.sum().over("user_id"),
    )


def _all_rows(placed: pl.DataFrame, max_items: int) -> pl.DataFrame:
    """Return the rows of all splits for events with is_valid, is_test and num_train."""
    num_train = pl.col("num_train")
    longest = int(placed.select(pl.col("total").max()).item() or 0)
    train = placed.filter(_ends_a_row(pl.col("place").cast(pl.Int64) + 1, num_train.cast(pl.Int64), max_items, longest))
    parts = [
        _rows(train, Split.TRAIN, pl.col("event_time"), pl.lit(None, pl.String)),
        _rows(placed.filter("is_valid"), Split.VALID, _just_before(), pl.col("item_id")),
        _rows(placed.filter("is_test"), Split.TEST, _just_before(), pl.col("item_id")),
    ]
    return pl.concat(parts)


def _left_out(placed: pl.DataFrame) -> pl.DataFrame:
    """Add is_valid, is_test and num_train, the number of the user's first events to train on, by leave-one-out."""
    is_evaluated = pl.col("is_positive") & (pl.col("num_labels") >= MIN_EVENTS_TO_EVALUATE)
    from_end = pl.col("num_labels") - pl.col("nth_label")
    placed = placed.with_columns(is_valid=is_evaluated & (from_end == 1), is_test=is_evaluated & (from_end == 0))
    valid_place = pl.col("place").filter("is_valid").first().over("user_id")
    return placed.with_columns(num_train=pl.coalesce(valid_place, "total"))


def _after(placed: pl.DataFrame, cuts: Cuts) -> pl.DataFrame:
    """Add is_valid, is_test and num_train by the global time split."""
    time, may_test = pl.col("event_time"), pl.col("is_positive") & (pl.col("nth_label") >= MIN_EVENTS_TO_EVALUATE)
    in_test = may_test & (time >= cuts.test_from)
    in_valid = may_test & (time >= cuts.valid_from) & (time < cuts.test_from)
    return placed.with_columns(
        is_valid=in_valid & (in_valid.cum_sum(reverse=True).over("user_id") == 1),
        is_test=in_test & (in_test.cum_sum(reverse=True).over("user_id") == 1),
        num_train=(time < cuts.valid_from).sum().over("user_id"),
    )


def _ends_a_row(count: pl.Expr, num_train: pl.Expr, max_items: int, longest: int) -> pl.Expr:
    """Whether a training row ends with the newest of the first `count` events: all, or those the next row cuts off.

    `longest` is the largest number of events of a user.
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
        idle_s: Its time after the history's newest event, in seconds; NaN if unknown.
        label_us: Its time in Unix microseconds; None if unknown.
    """

    user_ids: tuple[str, ...]
    histories: tuple[np.ndarray, ...]
    targets: np.ndarray
    idle_s: np.ndarray
    label_us: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.user_ids)


def read_sequences(tokenized: Path) -> list[np.ndarray]:
    """Read the training sequences; sequences too short to hold a next item are skipped."""
    histories = _read(tokenized, Split.TRAIN)["history"]
    return [np.array(history, dtype=np.int64) for history in histories.to_list() if len(history) > 1]


def read_labelled_sequences(tokenized: Path) -> list[Labelled]:
    """Read the training sequences with label weights, scaled to mean 1, and dislikes with weights in the same unit.

    Without repeats, a disliked item of the history is trained against at its first position: later it is not shown
    anyway.
    """
    columns = _read(tokenized, Split.TRAIN).select("history", "weights", "dislikes")
    rows = [row for row in columns.iter_rows() if len(row[0]) > 1]
    positive = [weight for history, weights, _ in rows for weight in weights or [1.0] * len(history) if weight > 0]
    mean = sum(positive) / max(1, len(positive)) if any(weights for _, weights, _ in rows) else 1.0
    repeats = bool(read_split(tokenized)["repeats"]) if any(dislikes for *_, dislikes in rows) else False
    return [_sequence(history, weights, dislikes, mean, repeats=repeats) for history, weights, dislikes in rows]


def read_counts(tokenized: Path) -> list[np.ndarray] | None:
    """Read the counts of the events of the same sequences; None if all count 1."""
    rows = [row for row in _read(tokenized, Split.TRAIN).select("history", "counts").iter_rows() if len(row[0]) > 1]
    if not any(counts for _, counts in rows):
        return None
    return [np.array(counts or [1.0] * len(history)) for history, counts in rows]


def read_cases(tokenized: Path, split: Split) -> Cases:
    """Read the cases of the validation or the test split."""
    rows = _read(tokenized, split)
    histories = tuple(np.array(history, dtype=np.int64) for history in rows["history"].to_list())
    idle_s = rows["idle_s"].cast(pl.Float64).fill_null(np.nan).to_numpy()
    label_us = rows["label_us"].to_numpy() if "label_us" in rows.columns else None
    return Cases(tuple(rows["user_id"]), histories, rows["target"].to_numpy().astype(np.int64), idle_s, label_us)


def read_split(tokenized: Path) -> dict[str, Any]:
    """Read the `kind` of the split, the cuts of a global time split (ISO 8601), and the value of `repeats`."""
    about: dict[str, Any] = json.loads((tokenized / SPLIT).read_text())
    return about


def sample_cases(cases: Cases, most: int) -> Cases:
    """Return at most this many cases, evenly spaced."""
    step = max(1, -(-len(cases) // most))
    label_us = None if cases.label_us is None else cases.label_us[::step]
    return Cases(cases.user_ids[::step], cases.histories[::step], cases.targets[::step], cases.idle_s[::step], label_us)


def cases_where(cases: Cases, is_in_N: np.ndarray) -> Cases:
    """Return the cases of a mask (N,)."""
    at = np.flatnonzero(is_in_N)
    return Cases(
        tuple(cases.user_ids[number] for number in at.tolist()),
        tuple(cases.histories[number] for number in at.tolist()),
        cases.targets[at],
        cases.idle_s[at],
        None if cases.label_us is None else cases.label_us[at],
    )


def _sequence(
    history: list[int],
    weights: list[float] | None,
    dislikes: list[dict[str, Any]] | None,
    mean: float,
    *,
    repeats: bool,
) -> Labelled:
    items = np.array(history, dtype=np.int64)
    if weights is None and not dislikes and mean == 1:
        return items
    of_labels = np.array(weights or [1.0] * len(history), dtype=np.float32) / np.float32(mean)
    return Weighted(items, of_labels, _dislikes(items, dislikes, mean, repeats=repeats) if dislikes else None)


def _dislikes(items: np.ndarray, dislikes: list[dict[str, Any]], mean: float, *, repeats: bool) -> Dislikes:
    disliked, places, weights = (
        np.array([dislike[name] for dislike in dislikes]) for name in ("item", "place", "weight")
    )
    if not repeats:
        is_held = items == disliked[:, None]
        places = np.where(is_held.any(1), np.minimum(is_held.argmax(1), places), places)
    return Dislikes(disliked, places, (weights / mean).astype(np.float32))


def _read(tokenized: Path, split: Split) -> pl.DataFrame:
    return pl.read_parquet(tokenized / "examples.parquet").filter(pl.col("split") == split)
