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


def measured_by_the_model(runs: list[PublishedRun], factor: Callable[[int], float]) -> list[PublishedRun]:
    """Return the runs with the MFU that the stored constants predict, times a factor."""
    return [replace(run, mfu=predict(run).mfu * factor(index)) for index, run in enumerate(runs)]


def test_a_fit_finds_the_constants_that_made_its_runs(write: Write) -> None:
    """A fit from other starting values recovers the constants, also with a few outlier runs."""
    runs, _ = read_runs(write(*grid()))
    stored = fitted()

    exact = fit(measured_by_the_model(runs, lambda _: 1.0))
    robust = fit(measured_by_the_model(runs, lambda index: 0.7 if index % 12 == 0 else 1.0))

    for chip, share in stored.efficiency.items():
        assert exact.efficiency[chip] == pytest.approx(share, rel=0.02)
        assert robust.efficiency[chip] == pytest.approx(share, rel=0.15)
    assert exact.attention == pytest.approx(stored.attention, rel=0.02)
    assert exact.passes == pytest.approx(stored.passes, rel=0.05)


def test_few_errors_give_an_interval_that_holds_all_of_them() -> None:
    """The interval of few errors covers all of them and zero, with a margin; coverage is checked source by source."""
    low, high = whole_range([-0.2, -0.1])

    assert (low, high) == (pytest.approx(-0.22), 0)
    assert share_left_out({"a": [-0.1, 0.1], "b": [0.05], "c": [0.3]}) == 0.5
