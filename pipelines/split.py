"""The protocol's split: leave one out by time. Pure; polars frames in and out.

Of each user with at least three events the last is the test label, the one before it the validation label, and the model
trains on all before those. Users with fewer events only train. Every row says *as of when* its history is to be read, so
that the feature store, and not this file, decides what was known then.
"""

from enum import StrEnum

import polars as pl

MIN_EVENTS_TO_EVALUATE = 3


class Split(StrEnum):
    """What a row is for."""

    TRAIN = "train"
    VALID = "valid"
    TEST = "test"


def as_of_rows(events: pl.DataFrame, max_items: int) -> pl.DataFrame:
    """Give (user_id, event_timestamp, split, target_item_id) for ordered events.

    A label's row is as of the microsecond before it. A training row has no target: its history is the sequence to learn.
    A store that keeps `max_items` of a history gets one training row for every `max_items` events, so that none is lost.
    """
    placed = events.select(
        "user_id",
        "item_id",
        "event_time",
        place=pl.int_range(pl.len()).over("user_id"),
        total=pl.len().over("user_id"),
    )
    evaluated = pl.col("total") >= MIN_EVENTS_TO_EVALUATE
    from_end = pl.col("total") - pl.col("place")
    num_train = pl.when(evaluated).then(pl.col("total") - 2).otherwise(pl.col("total"))
    to_train_end = num_train.cast(pl.Int64) - 1 - pl.col("place")
    train = placed.filter((to_train_end >= 0) & (to_train_end % max_items == 0))
    parts = [
        _rows(train, Split.TRAIN, pl.col("event_time"), pl.lit(None, pl.String)),
        _rows(placed.filter(evaluated & (from_end == 2)), Split.VALID, _just_before(), pl.col("item_id")),
        _rows(placed.filter(evaluated & (from_end == 1)), Split.TEST, _just_before(), pl.col("item_id")),
    ]
    return pl.concat(parts)


def _just_before() -> pl.Expr:
    return pl.col("event_time") - pl.duration(microseconds=1)


def _rows(events: pl.DataFrame, split: Split, when: pl.Expr, target: pl.Expr) -> pl.DataFrame:
    return events.select("user_id", event_timestamp=when, split=pl.lit(split.value), target_item_id=target)
