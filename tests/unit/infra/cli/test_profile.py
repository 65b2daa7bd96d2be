"""`tailrace profile` over recorded traces; tests/integration/pipelines/test_profile_records.py covers recording."""

import json
from html import escape
from pathlib import Path

import pytest
from typer.testing import CliRunner

from infra.cli.main import app
from services.errors import InvalidRequest
from tests.support.profiler.traces import kernel, memcpy, write

SUM = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


def run(*words: str) -> str:
    """Run the command and return its output; exceptions propagate."""
    done = CliRunner().invoke(app, ["profile", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture
def traces(tmp_path: Path) -> list[str]:
    """Traces of two ranks, each with a copy, a kernel and a collective."""
    events = [memcpy(0, 1_000), kernel("ampere_sgemm_128x64_nn", 1_000, 5_000), kernel(SUM, 6_000, 4_000)]
    return [str(write(tmp_path / f"{rank}.json", events, distributedInfo={"rank": rank})) for rank in range(2)]


def test_one_rank_is_at_the_top_of_the_file_too(tmp_path: Path, traces: list[str]) -> None:
    """The time shares are printed, followed by a summary sentence, and are top-level fields of the JSON file."""
    out = tmp_path / "out.json"

    printed = run("train", "--trace", traces[0], "--json", str(out))

    profile = json.loads(out.read_text())
    parts = {
        "span_us": 10_000,
        "compute_us": 5_000,
        "communication_exposed_us": 4_000,
        "copy_exposed_us": 1_000,
        "idle_us": 0,
    }
    assert {name: profile[name] for name in parts} == parts
    assert profile["bottleneck"] == "communication"
    assert printed.splitlines()[-1] == profile["sentence"]
    assert printed.count("%") >= 8


@pytest.mark.parametrize("how", ["one option", "an option each", "without a subject"])
def test_several_traces_are_several_ranks(tmp_path: Path, traces: list[str], how: str) -> None:
    """`--trace A B` and `--trace A --trace B` are equivalent."""
    out = tmp_path / "out.json"
    words = {
        "one option": ["train", "--trace", *traces],
        "an option each": ["rank", "--trace", traces[0], "--trace", traces[1]],
        "without a subject": ["--trace", *traces],
    }[how]

    run(*words, "--json", str(out))

    assert [row["rank"] for row in json.loads(out.read_text())["ranks"]] == [0, 1]


def test_the_timeline_is_one_page_and_one_picture(tmp_path: Path, traces: list[str]) -> None:
    """The page is self-contained, and the picture is a PNG."""
    pytest.importorskip("matplotlib")
    page, picture = tmp_path / "out.html", tmp_path / "out.png"

    printed = run("train", "--trace", *traces, "--html", str(page), "--png", str(picture))

    html = page.read_text()
    assert html.count("<svg") == 2
    assert html.count("<rect") == 2 * 3
    assert "http" not in html
    assert escape(printed.splitlines()[-1]) in html
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_names_in_a_trace_are_no_markup(tmp_path: Path) -> None:
    """A kernel's name is escaped in the page."""
    trace = write(tmp_path / "it.json", [kernel("<script>alert(1)</script>", 0, 5)])
    page = tmp_path / "out.html"

    run("--trace", str(trace), "--html", str(page))

    assert "<script" not in page.read_text()


@pytest.mark.parametrize("words", [[], ["tarin"], ["train", "more"]])
def test_what_is_not_known_is_refused_with_what_is(words: list[str]) -> None:
    """The error names the three subjects."""
    with pytest.raises(InvalidRequest, match="give one of train, rank, text, or --trace FILE"):
        run(*words)
