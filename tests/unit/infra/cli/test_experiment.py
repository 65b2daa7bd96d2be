"""`tailrace experiment`: join and report, from files to files."""

import json
from pathlib import Path

import polars as pl
import pytest
from click.testing import Result
from typer.testing import CliRunner

from infra.cli.main import app
from services.errors import ConfigError
from tests.support.click_log import make_log, truth_of
from tests.support.joined_table import write_table


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of two days; the fresh variant has 40 % fewer clicks."""
    return write_table(tmp_path_factory.mktemp("t") / "table", click_factor=0.6, num_days=2)


def tailrace(*words: str | Path) -> Result:
    return CliRunner().invoke(app, ["experiment", *map(str, words)])


def test_join_prints_a_line_a_day(tmp_path: Path) -> None:
    """Each day's file, impressions and clicks are printed; the days contain every joined click."""
    log = make_log(500, seed=3)
    impressions, events = log.write(tmp_path)

    done = tailrace("join", impressions, events, tmp_path / "out")

    assert done.exit_code == 0, done.output
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert [line.split()[0] for line in done.output.splitlines()] == names
    clicks = sum(int(line.split()[3]) for line in done.output.splitlines())
    assert clicks == sum(number for number, *_ in truth_of(log).values())


def test_report_in_three_forms(table: Path, tmp_path: Path) -> None:
    """Terminal, Markdown page and JSON show the same difference; traffic fractions come from experiments.toml."""
    file = tmp_path / "experiments.toml"
    file.write_text(
        '[layers.r]\nsalt = "s"\n[experiments.fresher]\nlayer = "r"\nsurfaces = ["home"]\nshare = 1.0\n'
        "[experiments.fresher.variants.control]\n[experiments.fresher.variants.fresh]\n"
    )
    out = "--json", tmp_path / "r.json", "--markdown", tmp_path / "r.md"

    done = tailrace("report", table, "--experiment", "fresher", "--experiments", file, "--segment", "surface", *out)

    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "r.json").read_text())
    clicks = f"{report['differences'][0]['estimate']:+.4g}"
    assert clicks in done.output
    assert clicks in (tmp_path / "r.md").read_text()
    assert report["mismatch"]["shares"] == {"control": 0.5, "fresh": 0.5}
    assert (tmp_path / "r-clicks.png").exists()


def test_a_a_and_off_policy(table: Path, tmp_path: Path) -> None:
    """A/A prints how many halves differ; off-policy on a log without propensities prints a reason and exits with 0."""
    policy = tmp_path / "policy.parquet"
    requests = pl.read_parquet(table / "*.parquet")["request_id"].unique()
    pl.DataFrame({"request_id": requests, "probability": [0.5] * len(requests)}).write_parquet(policy)

    halves = tailrace("report", table, "--experiment", "fresher", "--aa", "5")
    refused = tailrace("report", table, "--off-policy", policy)

    assert "Random halves of control's users, with 2 looks each" in halves.output
    assert refused.exit_code == 0
    assert "Refused: the log is deterministic" in refused.output


def test_what_cannot_be_read_is_named(table: Path) -> None:
    """Invalid fractions, effects and rewards are rejected with the option's name."""
    for option, value in (("--shares", "a:1"), ("--effect", "0"), ("--reward", "fame")):
        words = ("--off-policy", table) if option == "--reward" else ("--experiment", "fresher")
        assert isinstance(error := tailrace("report", table, option, value, *words).exception, ConfigError)
        assert option in str(error)
