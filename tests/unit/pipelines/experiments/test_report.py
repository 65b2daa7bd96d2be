"""The report of an experiment: from a joined table to terminal lines, pages and pictures."""

import math
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from pipelines.experiments.describe import as_lines, as_markdown
from pipelines.experiments.lists import Lists, read_lists, sums_by_day
from pipelines.experiments.picture import write_pictures
from pipelines.experiments.report import ExperimentReportOptions, a_a, report
from services.errors import DataError, InvalidRequest
from tests.support.joined_table import write_table


@pytest.fixture(scope="module")
def worse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_table(tmp_path_factory.mktemp("worse") / "table", click_factor=0.6)


@pytest.fixture(scope="module")
def lists(worse: Path) -> Lists:
    return read_lists(worse, experiment="fresher", segments=["surface"])


def test_sums_are_those_of_the_table(worse: Path, lists: Lists) -> None:
    """Each variant's sums equal counts over the table's rows; daily sums are cumulative."""
    table = pl.read_parquet(worse / "*.parquet").with_columns(fresh=pl.col("variant").str.contains("fresher=fresh"))
    for name, is_fresh in (("fresh", True), ("control", False)):
        rows = table.filter(pl.col("fresh") == is_fresh)
        first = rows.filter(pl.col("position") == 1)
        by_day = [sums_by_day(lists, metric) for metric in ("clicks", "value", "latency_ms")]
        clicks, value, latency = (days[-1][name] for days in by_day)
        assert (clicks.total, value.total) == (rows["clicks"].sum(), rows["value"].sum())
        assert clicks.exposure == latency.exposure == len(first)
        cut = lists.cuts["elapsed_ms"]
        assert cut is not None
        assert latency.total == pytest.approx(first["elapsed_ms"].clip(upper_bound=cut).sum())
        assert clicks.num_users == rows["user_id"].n_unique()
        assert by_day[0][0][name].exposure == first["request_id"].str.starts_with("r0-").sum()


def test_a_visitor_s_session_is_the_unit_of_chance(worse: Path, lists: Lists, tmp_path: Path) -> None:
    """A visitor's lists are grouped by session, like a user's; without a session each list is its own unit."""
    for name, session in (("sessions", pl.col("user_id")), ("none", pl.lit(None, pl.String))):
        (tmp_path / name).mkdir()
        for file in worse.glob("*.parquet"):
            table = pl.read_parquet(file).with_columns(session=session, user_id=pl.lit(None, pl.String))
            table.write_parquet(tmp_path / name / file.name)

    visitors, strangers = (read_lists(tmp_path / name, experiment="fresher") for name in ("sessions", "none"))

    variants = [report(table, ExperimentReportOptions())["variants"] for table in (lists, visitors, strangers)]
    assert [variant["num_users"] for variant in variants[1]] == [variant["num_users"] for variant in variants[0]]
    assert [variant["num_users"] for variant in variants[2]] == [variant["num_impressions"] for variant in variants[0]]


def test_novelty_is_the_self_information_of_what_was_shown(worse: Path, lists: Lists) -> None:
    """Novelty is the mean of -log2 of the fraction of lists that show an item."""
    table = pl.read_parquet(worse / "*.parquet")
    number = table["request_id"].n_unique()
    times = dict(table.group_by("item_id").len().iter_rows())
    fresh = table.filter(pl.col("variant").str.contains("fresher=fresh"))
    wanted = np.mean([-math.log2(times[item] / number) for item in fresh["item_id"]])

    variants = {variant["variant"]: variant for variant in report(lists, ExperimentReportOptions())["variants"]}
    assert variants["fresh"]["novelty_bits"] == pytest.approx(wanted)
    assert variants["fresh"]["tiers"]["student"] == pytest.approx(2 / 3, abs=0.02)


def test_a_loss_is_found_and_equal_metrics_are_not(lists: Lists) -> None:
    """The clicks' interval contains the true loss and excludes 0; intervals of equal metrics include 0."""
    differences = {
        difference["metric"]: difference
        for difference in report(lists, ExperimentReportOptions(segments=["surface"]))["differences"]
    }

    assert differences["clicks"]["low"] <= -0.04 <= differences["clicks"]["high"] < 0
    assert differences["clicks"]["p_value"] < 0.05
    for metric in ("latency_ms", "novelty_bits"):
        assert differences[metric]["low"] < 0 < differences[metric]["high"]


def test_segments_are_corrected(lists: Lists) -> None:
    """Each surface has a row, and corrected p-values are not below the uncorrected p-values."""
    rows = report(lists, ExperimentReportOptions(segments=["surface"]))["segments"]

    assert [row["segment"] for row in rows] == ["surface=cart", "surface=home"]
    assert all(row["holm_p_value"] >= row["p_value"] for row in rows)


def test_a_mismatch_is_found(worse: Path, tmp_path: Path) -> None:
    """A 60 to 40 split instead of halves is reported first as a mismatch, but not if those fractions are expected."""
    lists = read_lists(write_table(tmp_path / "t", share=0.6, num_days=1), experiment="fresher")

    assert report(lists, ExperimentReportOptions())["mismatch"]["is_mismatch"]
    assert "Sample-ratio mismatch" in "\n".join(as_lines(report(lists, ExperimentReportOptions())))
    assert not report(lists, ExperimentReportOptions(shares={"fresh": 3, "control": 2}))["mismatch"]["is_mismatch"]


def test_halves_of_one_variant_rarely_differ(lists: Lists) -> None:
    """Of 40 random splits with daily looks, at most 7 differ in clicks (at most 2 are expected)."""
    result = a_a(lists, "control", 40, seed=0)

    assert result["num_looks"] == 4
    assert result["false_alarms"]["clicks"] <= 7


def test_a_page_has_tables_and_pictures_and_no_user(lists: Lists, tmp_path: Path) -> None:
    """Terminal lines and Markdown show the same numbers, all pictures exist, and user ids do not appear."""
    content = report(lists, ExperimentReportOptions(segments=["surface"]))

    pictures = write_pictures(content, tmp_path / "page")
    page, lines = as_markdown(content, pictures), "\n".join(as_lines(content))

    clicks = next(difference for difference in content["differences"] if difference["metric"] == "clicks")
    assert f"{clicks['estimate']:+.4g}" in page
    assert f"{clicks['estimate']:+.4g}" in lines
    assert set(pictures) == {"clicks", "value", "latency_ms", "novelty_bits"}
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") and name in page for name in pictures.values())
    assert "u17" not in page + lines


def test_what_cannot_be_compared_is_refused_by_name(worse: Path, lists: Lists, tmp_path: Path) -> None:
    """Unknown columns, segments affected by the variant, unknown controls and empty folders are named."""
    with pytest.raises(InvalidRequest, match="tier"):
        read_lists(worse, segments=["tier"])
    with pytest.raises(DataError, match="colour"):
        read_lists(worse, by="colour")
    with pytest.raises(DataError, match="no list of"):
        read_lists(worse, experiment="none")
    with pytest.raises(DataError, match="no Parquet file"):
        read_lists(tmp_path)
    with pytest.raises(InvalidRequest, match="control"):
        report(lists, ExperimentReportOptions(control="none"))
    with pytest.raises(InvalidRequest, match="shares"):
        report(lists, ExperimentReportOptions(shares={"fresh": 1.0}))
