"""The test set is opened once per run, and each opening is recorded."""

import re
from pathlib import Path

import polars as pl

from pipelines.data.examples import Split, read_cases
from pipelines.evaluation.held_out import LEDGER, HeldOut
from tests.support.pages import ROOT
from tests.support.training.synthetic import tokenized, write_ingested


def ring(folder: Path, **sizes: int) -> Path:
    return tokenized(write_ingested(folder, **sizes), folder)


def test_a_run_opens_the_test_set_once_and_the_record_has_who_and_how_often(tmp_path: Path) -> None:
    """Evaluation and comparison of a run share an opening; another run adds one with its command and purpose."""
    tokens = ring(tmp_path / "tokens")
    first, second = (HeldOut(tokens, tmp_path, f"tailrace pipeline --seed {seed}") for seed in (0, 1))
    opened = first.open("evaluation of new models")
    again = first.open("comparison with v1")
    second.open("comparison with v1")

    record = HeldOut(tokens, tmp_path, "tailrace pipeline").record()

    assert again is opened
    assert (record["num_users"], record["num_labelled"], record["num_openings"]) == (40, 40, 2)
    assert [(opening["command"], opening["purpose"]) for opening in record["openings"]] == [
        ("tailrace pipeline --seed 0", "evaluation of new models"),
        ("tailrace pipeline --seed 1", "comparison with v1"),
    ]
    assert all(re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", opening["at"]) for opening in record["openings"])


def test_of_many_users_the_same_ones_are_taken_evenly(tmp_path: Path) -> None:
    """Of 40 users with a limit of 15, every third user is taken, and the record has both numbers."""
    tokens = ring(tmp_path / "tokens")
    every = read_cases(tokens, Split.TEST)
    held_out = HeldOut(tokens, tmp_path, "tailrace pipeline", most_users=15)

    opened = held_out.open("evaluation of new models")

    assert opened.user_ids == every.user_ids[::3]
    record = held_out.record()
    assert (record["num_users"], record["num_labelled"], record["num_openings"]) == (14, 40, 1)


def test_openings_are_counted_by_user_and_label_item(tmp_path: Path) -> None:
    """A user's new event resets only that label's count; added items do not affect the counts."""
    tokens, wider, grown = ring(tmp_path / "tokens"), tmp_path / "wider", tmp_path / "grown"
    ingested = write_ingested(wider)
    items = pl.read_parquet(ingested / "items.parquet")
    pl.concat([items[:1].with_columns(item_id=pl.lit("a00")), items]).write_parquet(ingested / "items.parquet")
    tokenized(ingested, wider)
    ingested = write_ingested(grown)
    events = pl.read_parquet(ingested / "events.parquet")
    last = events.filter(pl.col("user_id") == events["user_id"][-1])[-1:]
    new = last.with_columns(item_id=pl.lit(events["item_id"][0]), event_time=pl.col("event_time") + pl.duration(days=1))
    pl.concat([events, new]).write_parquet(ingested / "events.parquet")
    tokenized(ingested, grown)
    for run in range(2):
        HeldOut(tokens, tmp_path, f"tailrace pipeline --seed {run}").open("evaluation of new models")

    records = [HeldOut(folder, tmp_path, "").record() for folder in (tokens, wider, grown)]

    assert [record["num_openings"] for record in records] == [2, 2, 2]
    assert [round(record["mean_openings"] * 40) for record in records] == [80, 80, 78]
    assert [opening["num_labels"] for opening in records[2]["openings"]] == [39, 39]
    HeldOut(grown, tmp_path, "").open("evaluation of new models")
    assert HeldOut(grown, tmp_path, "").record()["mean_openings"] == (39 * 3 + 1) / 40


def test_lines_without_their_labels_count_for_the_same_test_set_alone(tmp_path: Path) -> None:
    """Openings recorded without labels, as in earlier versions, count only for the same test set."""
    tokens, other = ring(tmp_path / "tokens"), ring(tmp_path / "other", num_users=41)
    HeldOut(tokens, tmp_path, "").open("evaluation of new models")
    (kept,) = (tmp_path / "test_labels").iterdir()
    kept.unlink()

    assert [HeldOut(folder, tmp_path, "").record()["num_openings"] for folder in (tokens, other)] == [1, 0]


def test_a_line_cut_off_by_a_power_loss_hides_no_other(tmp_path: Path) -> None:
    """The record keeps all complete lines before and after a truncated line."""
    tokens = ring(tmp_path / "tokens")
    HeldOut(tokens, tmp_path, "tailrace pipeline").open("evaluation of new models")
    with (tmp_path / LEDGER).open("a") as ledger:
        ledger.write('{"test_set": "ab')
    HeldOut(tokens, tmp_path, "tailrace pipeline").open("evaluation of new models")

    assert HeldOut(tokens, tmp_path, "").record()["num_openings"] == 2
    assert len((tmp_path / LEDGER).read_text().splitlines()) == 3


def test_no_other_part_of_the_pipeline_reads_test_labels() -> None:
    """The test split is named only where it is created and where it is opened."""
    named = [path.name for path in sorted((ROOT / "pipelines").rglob("*.py")) if "Split.TEST" in path.read_text()]

    assert named == ["examples.py", "held_out.py"]
