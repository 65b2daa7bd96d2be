"""Dislikes reach the training data with their preceding history, without leaking evaluation data."""

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from models.prompt import window_start
from pipelines.codes.tokenize import ReadHistories, tokenize
from pipelines.data.examples import REFIT, Split, global_cuts, read_labelled_sequences, read_sequences
from pipelines.data.labelled import Dislikes, dislikes_in, items_of, weights_of
from pipelines.data.options import SplitKind
from pipelines.data.roles import dislikes_of, joins_history, with_labels
from services.contracts.event_roles import parse_event_roles
from services.errors import StageFailed
from services.stream.aggregate import history_limits
from tests.support.training.synthetic import histories_from, write_events

ROLES = parse_event_roles(
    "[types.view]\nrole = 'weak'\n[types.hide]\nrole = 'negative'\nweight = 3\n[types.skip]\nrole = 'negative'\n"
    "weight = 0"
)
T0 = datetime(2026, 1, 1, tzinfo=UTC)
KINDS = st.sampled_from(["click", "click", "view", "dislike", "hide", "skip", "impression"])
EVENTS = st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("ABCDE"), KINDS), max_size=40)
WEIGHTS = {"dislike": 1.0, "hide": 3.0}


def table(events: list[tuple[str, str, str]]) -> pl.DataFrame:
    """Build events of (user, item, type), a second apart."""
    rows = [(user, item, T0 + timedelta(seconds=n), kind, 1.0) for n, (user, item, kind) in enumerate(events)]
    schema: dict[str, Any] = {"user_id": pl.String, "item_id": pl.String, "event_time": pl.Datetime("us", "UTC")}
    return pl.DataFrame(rows, schema=schema | {"event_type": pl.String, "value": pl.Float64}, orient="row")


def write_items(folder: Path, names: str) -> None:
    """Write items with one-letter ids."""
    items = pl.DataFrame({"item_id": [*names]})
    items.with_columns(title="item_id", categories=pl.lit([""]), text="item_id").write_parquet(folder / "items.parquet")


def slow_dislikes(events: pl.DataFrame) -> list[tuple[str, str, datetime, float, datetime | None]]:
    """Compute `dislikes_of` by a loop over the events, tracking open dislikes by user and item."""
    opened: dict[tuple[str, str], list[Any]] = {}
    dislikes = []
    for user, item, when, kind, _ in events.iter_rows():
        if kind in ("dislike", "hide", "skip") and (user, item) not in opened:
            opened[user, item] = [user, item, when, WEIGHTS.get(kind, 0.0), None]
            dislikes.append(opened[user, item])
        elif kind == "click" and (user, item) in opened:
            opened.pop((user, item))[4] = when
    return sorted(tuple(dislike) for dislike in dislikes if dislike[3] > 0)


@given(EVENTS)
def test_a_dislike_counts_once_from_the_first_negative_event_until_a_positive_one(
    events: list[tuple[str, str, str]],
) -> None:
    """A dislike has its type's weight and ends at a positive event; retracted events are not labels."""
    drawn = table(events)

    dislikes = dislikes_of(drawn, ROLES)

    assert sorted(dislikes.select("user_id", "item_id", "event_time", "weight", "until").iter_rows()) == slow_dislikes(
        drawn
    )
    labelled = with_labels(drawn, ROLES)
    assert labelled.filter(~joins_history())["weight"].sum() == labelled.filter(~joins_history())["count"].sum() == 0


def limited(ingested: Path, max_items: int) -> ReadHistories:
    """Return a reader of histories as the store keeps them: the newest items, cut by whole strides."""
    whole, stride = histories_from(ingested), history_limits(max_items).stride

    def read(rows: pl.DataFrame) -> pl.DataFrame:
        windows = [
            history[window_start(len(history), max_items, stride) :]
            for history in whole(rows)["history_item_ids"].to_list()
        ]
        return rows.with_columns(history_item_ids=pl.Series(windows, dtype=pl.List(pl.String)))

    return read


@settings(max_examples=60, deadline=None)
@given(EVENTS, st.sampled_from([2, 3, 5, 1_000]), st.sampled_from(SplitKind))
def test_each_dislike_is_in_the_row_that_holds_the_history_before_it(
    drawn: list[tuple[str, str, str]], max_items: int, split: SplitKind
) -> None:
    """Each dislike before the cut that is not taken back appears once, at the next event's position."""
    walk = [("c", "ABCDE"[n % 5], "click") for n in range(12)]
    events = table([*drawn, *walk] if split is SplitKind.GLOBAL_TIME else [*walk, *drawn])
    with TemporaryDirectory() as folder:
        ingested, out = Path(folder) / "in", Path(folder) / "out"
        ingested.mkdir()
        out.mkdir()
        write_events(events, ingested, ROLES)
        write_items(ingested, "ABCDE")
        held = pl.read_parquet(ingested / "events.parquet")
        cut = global_cuts(held).valid_from if split is SplitKind.GLOBAL_TIME else None
        try:
            tokenize(ingested, limited(ingested, max_items), max_items, out, split=split)
        except StageFailed:  # the cut leaves no data for training or evaluation
            reject()
        folders = [out, *([] if cut else [out / REFIT])]
        examples = [pl.read_parquet(folder / "examples.parquet") for folder in folders]

    for rows in examples:
        assert (
            rows.filter(pl.col("split") != Split.TRAIN)["dislikes"].null_count()
            == rows.filter(pl.col("split") != Split.TRAIN).height
        )
        for user in "abc":
            own = rows.filter((pl.col("user_id") == user) & (pl.col("split") == Split.TRAIN))
            own = own.sort(pl.int_range(pl.len()))
            dislikes, start = [], 0
            for row in own.iter_rows(named=True):
                dislikes += [
                    (dislike["item"], start + dislike["place"], dislike["weight"]) for dislike in row["dislikes"] or []
                ]
                assert all(0 <= dislike["place"] <= len(row["history"]) for dislike in row["dislikes"] or [])
                start += len(row["history"])
            times = held.filter(pl.col("user_id") == user)["event_time"].to_list()
            expected = []
            for who, item, when, weight, until in slow_dislikes(events):
                position = sum(time < when for time in times)
                is_over = until is not None and start and until <= times[start - 1]
                if who == user and start and position <= start and not is_over and (cut is None or when < cut):
                    expected.append(("ABCDE".index(item), position, weight))
            assert sorted(dislikes) == sorted(expected)


def test_weights_are_in_the_unit_of_the_labels(tmp_path: Path) -> None:
    """Weights are scaled to a label mean of 1; a disliked item of the history applies at its first occurrence."""
    roles = parse_event_roles("[types.buy]\nweight = 3\n[types.hide]\nrole = 'negative'\nweight = 3")
    kinds = ["click", "buy", "click", "hide", "hide", "click", "click"]
    write_events(table([("a", item, kind) for item, kind in zip("ABCDCEF", kinds, strict=True)]), tmp_path, roles)
    write_items(tmp_path, "ABCDEF")

    tokenize(tmp_path, histories_from(tmp_path), 1_000, tmp_path)

    (sequence,) = read_labelled_sequences(tmp_path)
    dislikes = dislikes_in(sequence)
    assert dislikes is not None
    assert items_of(sequence).tolist() == read_sequences(tmp_path)[0].tolist() == [0, 1, 2]
    assert weights_of(sequence).tolist() == [0.5, 1.5, 0]
    assert [part.tolist() for part in (dislikes.items, dislikes.places, dislikes.weights)] == [
        [3, 2],
        [3, 2],
        [1.5, 1.5],
    ]


@given(st.lists(st.integers(0, 20), max_size=8), st.integers(1, 20), st.lists(st.integers(1, 19), max_size=4))
def test_parts_of_a_sequence_have_its_dislikes_once(places: list[int], length: int, cuts: list[int]) -> None:
    """Each dislike belongs to exactly one part, and keeps its overall position."""
    kept = np.array([position for position in places if position <= length], dtype=np.int64)
    whole = Dislikes(np.arange(len(kept)), kept, np.ones(len(kept)))
    borders = sorted({0, length, *(cut for cut in cuts if cut < length)})

    positions = {}
    for start, end in pairwise(borders):
        part = whole.within(start, end)
        for item, position in [] if part is None else zip(part.items, part.places, strict=True):
            assert item not in positions
            assert 0 < position <= end - start or position == start == 0
            positions[item] = start + position

    assert positions == dict(enumerate(kept))


@pytest.mark.parametrize("kind", ["dislike", "hide"])
def test_a_negative_type_of_weight_0_leaves_the_examples_as_without_its_events(tmp_path: Path, kind: str) -> None:
    """Examples equal those without the events; with the default weight there is one additional dislike."""
    walk = [("a", item, "click") for item in "ABCDABCD"]
    examples = {}
    for name, events, text in (
        ("without", walk, ""),
        ("weightless", [*walk[:3], ("a", "E", kind), *walk[3:]], f"[types.{kind}]\nrole = 'negative'\nweight = 0"),
        ("against", [*walk[:3], ("a", "E", kind), *walk[3:]], ""),
    ):
        folder = tmp_path / name
        folder.mkdir()
        write_events(table(events), folder, parse_event_roles(text))
        write_items(folder, "ABCDE")
        tokenize(folder, histories_from(folder), 1_000, folder)
        examples[name] = pl.read_parquet(folder / "examples.parquet").drop("idle_s", "label_us")

    assert examples["weightless"].equals(examples["without"])
    assert examples["against"].drop("dislikes").equals(examples["without"].drop("dislikes"))
    assert examples["against"]["dislikes"].drop_nulls().to_list() == [[{"item": 4, "place": 3, "weight": 1.0}]]
