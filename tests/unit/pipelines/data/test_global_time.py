"""The global time split: models do not see data after the cut."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.catalogue import load_catalogue
from pipelines.codes.code_book import CODE_BOOK
from pipelines.codes.options import CodesOptions
from pipelines.codes.tokenize import describe_split
from pipelines.data.examples import Split, as_of_rows, global_cuts, read_split
from pipelines.data.options import SplitKind
from pipelines.data.roles import with_labels
from services.contracts.event_roles import parse_event_roles
from services.errors import StageFailed
from tests.support.training.synthetic import tokenized, write_ingested

ROLES = parse_event_roles("[types.view]\nrole = 'weak'")
T0 = datetime(2026, 1, 1, tzinfo=UTC)
TIMES = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 400), st.sampled_from(["click", "click", "view"])),
    min_size=4,
    max_size=60,
    unique_by=lambda event: event[:2],
)


def events_at(drawn: list[tuple[int, int, str]]) -> pl.DataFrame:
    """Build events (user, hour, type) in time order, each with its own item; times rise strictly per user."""
    rows = [
        (f"u{user}", f"i{number}", T0 + timedelta(hours=hour), kind, 1.0)
        for number, (user, hour, kind) in enumerate([(0, 0, "click"), *drawn])
        if number == 0 or (user, hour) != (0, 0)
    ]
    columns = ["user_id", "item_id", "event_time", "event_type", "value"]
    frame = pl.DataFrame(rows, schema=columns, orient="row").sort("event_time", "user_id")
    return with_labels(frame, ROLES)


@settings(max_examples=40)
@given(drawn=TIMES)
def test_what_is_learned_ends_before_all_that_validates_and_that_before_all_that_tests(
    drawn: list[tuple[int, int, str]],
) -> None:
    """Training rows end before the first cut; test labels are the leave-one-out labels after the second cut."""
    events = events_at(drawn)
    cuts = global_cuts(events)

    rows = as_of_rows(events, 100, cuts)

    parts = {part: rows.filter(pl.col("split") == part) for part in Split}
    learned, validated, tested = (parts[part]["event_timestamp"] for part in (Split.TRAIN, Split.VALID, Split.TEST))
    just_before = timedelta(microseconds=1)
    assert all(when < cuts.valid_from for when in learned)
    assert all(cuts.valid_from <= when + just_before < cuts.test_from for when in validated)
    assert all(cuts.test_from <= when + just_before for when in tested)
    newest = events.filter(pl.col("event_time") < cuts.valid_from).group_by("user_id").agg(pl.col("event_time").max())
    assert dict(parts[Split.TRAIN].select("user_id", "event_timestamp").iter_rows()) == dict(newest.iter_rows())
    one_out = as_of_rows(events, 100).filter(pl.col("split") == Split.TEST)
    late = one_out.filter(pl.col("event_timestamp") + just_before >= cuts.test_from)
    assert parts[Split.TEST].sort("user_id").equals(late.sort("user_id"))


@pytest.mark.parametrize("depth", [1, 2])
def test_other_events_after_the_cut_change_nothing_that_is_learned(tmp_path: Path, depth: int) -> None:
    """Changes after the first cut do not affect training data, popularity, codes and code book, byte for byte."""
    known, other = (write_ingested(tmp_path / name, num_users=15) for name in ("known", "other"))
    events = pl.read_parquet(known / "events.parquet")
    mirrored = pl.format("i{}", (29 - pl.col("item_id").str.slice(1).cast(pl.Int64)).cast(pl.String).str.zfill(2))
    is_later = pl.col("event_time") >= global_cuts(events).valid_from
    swapped = events.with_columns(item_id=pl.when(is_later).then(mirrored).otherwise("item_id"))
    swapped.write_parquet(other / "events.parquet")
    learned = {}
    for kind in SplitKind:
        for ingested in (known, other):
            out = tokenized(ingested, tmp_path / kind / ingested.name, CodesOptions(depth=depth), split=kind)
            examples = pl.read_parquet(out / "examples.parquet").filter(pl.col("split") == Split.TRAIN).to_dicts()
            catalogue = load_catalogue(out / "catalogue.parquet")
            book = (out / CODE_BOOK).read_bytes() if depth > 1 else b""
            items = catalogue.popularity.tolist(), catalogue.codes.tolist()
            learned[kind, ingested.name] = examples, *items, book

    assert not swapped.equals(events)
    assert learned[SplitKind.GLOBAL_TIME, "known"] == learned[SplitKind.GLOBAL_TIME, "other"]
    assert learned[SplitKind.LEAVE_ONE_OUT, "known"][0] != learned[SplitKind.LEAVE_ONE_OUT, "other"][0]


def test_the_cuts_are_kept_and_printed(tmp_path: Path) -> None:
    """Four fifths of the labels precede the first cut, and a tenth lies between the cuts."""
    ingested = write_ingested(tmp_path)
    times = pl.read_parquet(ingested / "events.parquet")["event_time"]

    tokenized(ingested, tmp_path, split=SplitKind.GLOBAL_TIME)

    about = read_split(tmp_path)
    before = [(times < datetime.fromisoformat(about[cut])).mean() for cut in ("valid_from", "test_from")]
    assert before == pytest.approx([0.8, 0.9], abs=0.01)
    assert describe_split(tmp_path)[0].startswith(f"split global-time: events before {about['valid_from']} are learned")


def test_data_without_a_part_is_refused(tmp_path: Path) -> None:
    """If all events have the same time, the error names the option, the empty parts and the fix."""
    ingested = write_ingested(tmp_path)
    events = pl.read_parquet(ingested / "events.parquet").unique("user_id").with_columns(event_time=pl.lit(T0))
    events.write_parquet(ingested / "events.parquet")

    with pytest.raises(StageFailed, match=r"--split: global-time .* no row for train and valid and test; give events"):
        tokenized(ingested, tmp_path, split=SplitKind.GLOBAL_TIME)
