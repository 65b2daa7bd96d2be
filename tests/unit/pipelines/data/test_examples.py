"""Training examples: split by time; each history holds only events before its label."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl
import pytest

from models.catalogue import load_catalogue
from pipelines.data.arrivals import logged_events
from pipelines.data.examples import (
    Split,
    as_of_rows,
    read_cases,
    read_labelled_sequences,
    read_sequences,
)
from pipelines.data.labelled import items_of, weights_of
from pipelines.data.roles import with_labels
from pipelines.features.tables import replay
from services.contracts.event_roles import parse_event_roles
from services.stream.aggregate import history_limits
from tests.support.training.synthetic import tokenized, write_arrivals, write_events, write_ingested

ROLES = parse_event_roles("[types.view]\nrole = 'weak'")
T0 = datetime(2026, 1, 1, tzinfo=UTC)


def events_of(**users: str) -> pl.DataFrame:
    """Build events from one letter each: `ann="abC"` clicked a and b and viewed C, a second apart."""
    rows = [(user, item, T0 + timedelta(seconds=n)) for user, items in users.items() for n, item in enumerate(items)]
    events = pl.DataFrame(rows, schema=["user_id", "item_id", "event_time"], orient="row").sort("event_time", "user_id")
    kind = pl.when(pl.col("item_id").str.contains("[A-Z]")).then(pl.lit("view")).otherwise(pl.lit("click"))
    return events.with_columns(event_type=kind, value=1.0)


def test_weak_events_are_history_and_no_labels(tmp_path: Path) -> None:
    """Only clicks are labels, histories include views, and training rows learn only from the clicks."""
    events = events_of(ann="aBcDeFgH", bob="XyZ").sort("event_time", "user_id")
    items = pl.DataFrame({"item_id": [*"BDFHXZaceghy"]}).with_columns(
        title="item_id", categories=pl.lit([""]), text="item_id"
    )
    write_events(events, tmp_path, ROLES)
    items.write_parquet(tmp_path / "items.parquet")
    tokenized(tmp_path, tmp_path)

    names = load_catalogue(tmp_path / "catalogue.parquet").item_ids
    test, valid = read_cases(tmp_path, Split.TEST), read_cases(tmp_path, Split.VALID)
    ann, bob = sorted(read_labelled_sequences(tmp_path), key=len, reverse=True)
    assert [[names[item] for item in case] for case in (*test.histories, test.targets)] == [[*"aBcDeF"], ["g"]]
    assert [[names[item] for item in case] for case in (*valid.histories, valid.targets)] == [[*"aBcD"], ["e"]]
    assert [names[item] for item in items_of(ann)] == [*"aBcD"]
    assert (weights_of(ann) == 0).tolist() == [False, True, False, True]
    assert (weights_of(bob) == 0).tolist() == [True, False, True]


def test_what_a_user_dislikes_in_the_end_is_no_label() -> None:
    """A negative event removes the item's labels, a later positive event restores them; weights follow the rules."""
    roles = parse_event_roles("[types.buy]\nweight = 5\n[types.view]\nrole = 'weak'\nweight = 0.5")
    rows = [
        ("ann", "a", "buy"), ("ann", "b", "click"), ("bob", "a", "click"), ("ann", "a", "dislike"),
        ("ann", "b", "hide"), ("ann", "b", "buy"), ("ann", "a", "view"), ("cid", "c", "view"),
    ]  # fmt: skip
    events = pl.DataFrame(rows, schema=["user_id", "item_id", "event_type"], orient="row")

    labelled = with_labels(events.with_columns(value=1.0), roles)

    assert labelled["weight"].to_list() == [0.0, 1.0, 1.0, 0.0, 0.0, 5.0, 0.0, 0.5]
    assert labelled["count"].to_list() == labelled["weight"].to_list()


@pytest.mark.parametrize("max_items", [1, 2, 4, 5, 7])
@pytest.mark.parametrize(
    "num_events", [2, 3, 9, 23, *(pytest.param(num, marks=pytest.mark.grid) for num in range(1, 24))]
)
def test_training_rows_hold_each_event_once(num_events: int, max_items: int, tmp_path: Path) -> None:
    """For any history limit, the training rows together hold each training event exactly once."""
    letters = "abcdefghijklmnopqrstuvwxyz"[:num_events]
    events = events_of(ann=letters)
    write_arrivals(events, tmp_path)
    arrived = logged_events(pl.read_parquet(tmp_path / "arrivals.parquet"))
    stored = {row.row_time_us: row.item_ids for row in replay(arrived, history_limits(max_items))}

    rows = (
        as_of_rows(with_labels(events, ROLES), max_items).filter(pl.col("split") == Split.TRAIN).sort("event_timestamp")
    )

    seen = [item for time in rows["event_timestamp"].dt.epoch("us") for item in stored[time]]
    assert "".join(seen) == (letters if num_events < 3 else letters[:-2])


def test_examples_and_catalogue_use_the_same_indices(tmp_path: Path) -> None:
    """Indices map back to the events' ids, every item has a code, and popularity counts the training events."""
    ingested = write_ingested(tmp_path / "in")
    out = tokenized(ingested, tmp_path / "out")

    catalogue, cases = load_catalogue(out / "catalogue.parquet"), read_cases(out, Split.TEST)
    last = pl.read_parquet(ingested / "events.parquet").group_by("user_id", maintain_order=True).last()
    targets = {user: catalogue.item_ids[item] for user, item in zip(cases.user_ids, cases.targets, strict=True)}
    assert targets == dict(zip(last["user_id"], last["item_id"], strict=True))
    assert catalogue.item_ids == tuple(sorted(catalogue.item_ids))
    assert (catalogue.depth, catalogue.vocab_size) == (1, 31)
    assert catalogue.popularity.sum() == sum(map(len, read_sequences(out))) == 40 * 10
