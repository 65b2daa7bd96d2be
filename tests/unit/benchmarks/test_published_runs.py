"""The planner against published runs: reading a file of runs and evaluating it. The rows here are made up."""

import csv
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.plan.fit import fit, share_left_out, whole_range
from benchmarks.plan.runs import PublishedRun, predict, read_runs
from pipelines.planner.step_time import fitted

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


def measured_by_the_model(runs: list[PublishedRun], factor: Callable[[int], float]) -> list[PublishedRun]:
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
