"""The planner against published runs: reading a file of runs and evaluating it. The rows here are made up."""

import csv
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.plan import __main__ as command
from benchmarks.plan.fit import fit, share_left_out, whole_range
from benchmarks.plan.runs import COLUMNS, Run, predict, read_runs
from pipelines.planner.step_time import FITTED, fitted
from services.errors import ConfigError

ROW = {
    "Model": "1b",
    "SeqLen (T)": "2048",
    "# GPUs": "8",
    "GPU": "a100_80gb",
    "MFU": "51.5",
    "HFU": "51.5",
    "MicroBatchSize": "8",
    "GradAccum": "4",
    "Precision": "amp_bf16",
    "Sharding Strategy": "FULL_SHARD",
    "Activation Checkpointing": "False",
    "NumParams": "1315950592",
}

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a file of rows with these changes to ROW."""

    def made(*changes: dict[str, str], columns: tuple[str, ...] = tuple(ROW)) -> Path:
        path = tmp_path / "runs.csv"
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(ROW | change for change in changes)
        return path

    return made


def grid() -> list[dict[str, str]]:
    """Return runs of several models, lengths and devices."""
    return [
        {"Model": model, "NumParams": size, "SeqLen (T)": str(length), "GPU": gpu, "MicroBatchSize": str(rows)}
        for model, size in (("125m", "125311488"), ("760m", "760470528"), ("3b", "2651837440"), ("13b", "12853954560"))
        for length, rows in ((512, 32), (2_048, 8), (16_384, 1))
        for gpu in ("a100_40gb", "a100_80gb", "h100_80gb")
    ]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"MFU": ""}, "MFU: '' is not a percentage"),
        ({"MFU": "0.53"}, "MFU: '0.53' is not a percentage from 1 to 100"),
        ({"MFU": "nan"}, "MFU: 'nan' is not a percentage"),
        ({"GPU": "tpu_v4"}, "GPU: unknown device 'tpu_v4'"),
        ({"# GPUs": "0"}, "# GPUs: '0' is not a whole number from 1"),
        ({"SeqLen (T)": "2k"}, "SeqLen (T): '2k' is not a whole number"),
        ({"Precision": "int4"}, "Precision: 'int4' is none of bf16, fp16, fp8, fp32"),
        ({"Precision": "amp_fp8"}, "Precision: a100-80 has no products in fp8"),
        ({"Sharding Strategy": "ZERO"}, "Sharding Strategy: 'ZERO' is none of FULL_SHARD"),
        ({"Activation Checkpointing": "maybe"}, "Activation Checkpointing: 'maybe' is none of true, yes"),
    ],
)
def test_a_row_that_cannot_be_read_is_named_and_the_others_stay(
    write: Write, change: dict[str, str], problem: str
) -> None:
    """The error names line, column and value, and valid rows are still read."""
    runs, bad = read_runs(write({}, change, {}))

    assert len(runs) == 2
    assert [row.line for row in bad] == [3]
    assert bad[0].problem.startswith(problem)


def test_odd_spellings_are_read(write: Write) -> None:
    """Thousands separators, floats, percent signs, capitals, and unknown models with a size are accepted."""
    runs, bad = read_runs(
        write(
            {"# GPUs": "1,024", "MFU": "51.5%", "GPU": "A100-80GB", "Activation Checkpointing": "TRUE"},
            {"MicroBatchSize": "8.0", "Sharding Strategy": "shard_grad_op", "Precision": "BF16"},
            {"Model": "our-20b", "NumParams": "20000000000"},
        )
    )

    assert bad == []
    assert (runs[0].num_gpus, runs[0].mfu, runs[0].is_checkpointed, runs[1].gathers) == (1_024, 51.5, True, 1)
    assert runs[2].shape.num_parameters == pytest.approx(20e9, rel=0.1)


def test_a_file_without_a_column_is_refused_by_its_name(write: Write) -> None:
    """A missing column is named; column order and additional columns do not matter."""
    columns = tuple(column for column in ROW if column != "GradAccum")

    with pytest.raises(ConfigError, match=r"--runs: .* has no column GradAccum"):
        read_runs(write({}, columns=columns))
    assert read_runs(write({}, columns=tuple(reversed(ROW))))[0]
    assert "HFU" not in COLUMNS


def measured_by_the_model(runs: list[Run], factor: Callable[[int], float]) -> list[Run]:
    """Return the runs with the MFU that the stored constants predict, times a factor."""
    return [replace(run, mfu=predict(run).mfu * factor(index)) for index, run in enumerate(runs)]


def test_a_fit_finds_the_constants_that_made_its_runs(write: Write) -> None:
    """A fit from other starting values recovers the constants, also with a few outlier runs."""
    runs, _ = read_runs(write(*grid()))
    stored = fitted()

    found = fit(measured_by_the_model(runs, lambda _: 1.0))
    robust = fit(measured_by_the_model(runs, lambda index: 0.7 if index % 12 == 0 else 1.0))

    for chip, share in stored.efficiency.items():
        assert found.efficiency[chip] == pytest.approx(share, rel=0.02)
        assert robust.efficiency[chip] == pytest.approx(share, rel=0.15)
    assert found.attention == pytest.approx(stored.attention, rel=0.02)
    assert found.passes == pytest.approx(stored.passes, rel=0.05)


def test_few_errors_give_an_interval_that_holds_all_of_them() -> None:
    """The interval of few errors covers all of them and zero, with a margin; coverage is checked source by source."""
    low, high = whole_range([-0.2, -0.1])

    assert (low, high) == (pytest.approx(-0.22), 0)
    assert share_left_out({"a": [-0.1, 0.1], "b": [0.05], "c": [0.3]}) == 0.5


def judged(monkeypatch: pytest.MonkeyPatch, runs: Path, out: Path) -> dict[str, Any]:
    """Run the command and return its report."""
    monkeypatch.setattr(sys, "argv", ["benchmarks.plan", "--runs", str(runs), "--json", str(out)])
    command.main()
    report: dict[str, Any] = json.loads(out.read_text())
    return report


def test_the_command_judges_the_stored_constants(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report has the error and interval coverage of all readable rows; the stored constants do not change."""
    before, plain = FITTED.read_text(), read_runs(write(*grid()))[0]
    rows = [change | {"MFU": f"{predict(run).mfu - 2:.6f}"} for change, run in zip(grid(), plain, strict=True)]

    report = judged(monkeypatch, write(*rows, {"GPU": "abacus"}), tmp_path / "out.json")

    assert FITTED.read_text() == before
    assert report["median_error_points"] == report["p90_error_points"] == 2
    assert report["share_within_interval"] == 1
    assert 2 < report["median_half_width_points"] < 10
    assert report["num_judged"] == len(rows)
    assert [row["line"] for row in report["bad_rows"]] == [len(rows) + 2]


def test_runs_that_were_fitted_to_are_not_judged(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs used for the fit are skipped and counted."""
    path = write({}, {"MFU": "50"})
    known = tmp_path / "fitted.json"
    known.write_text(json.dumps(json.loads(FITTED.read_text()) | {"runs": [read_runs(path)[0][0].key]}))
    monkeypatch.setattr(command, "FITTED", known)

    report = judged(monkeypatch, path, tmp_path / "out.json")

    assert (report["num_judged"], report["num_fitted_rows"]) == (1, 1)
