"""The names of a fit's phases in torch's own trace."""

from functools import partial
from pathlib import Path

from torch import nn
from torch.profiler import ProfilerActivity, profile

from pipelines.profiler.names import is_input
from pipelines.runner.stage import silent
from pipelines.training.fit.fitting import FitOptions, fit
from tests.support.training.lines import LINE, numbered, task_of
from tests.unit.pipelines.conftest import checkpoints_in

INSIDE = {"forward": "step", "backward": "step", "optimizer": "step"}
BESIDE = ("data", "step", "communication", "validation", "checkpoint")
NUM_EPOCHS, NUM_BATCHES = 2, 3


def test_a_profile_of_a_fit_has_its_ranges_nested_as_they_happen(tmp_path: Path) -> None:
    """Each step follows a data wait and contains forward and backward passes per part, then the optimizer."""
    task = task_of(
        lambda model, batch: (model(batch.tokens.float()).square().mean(), len(batch.tokens)),
        [partial(numbered, 1, 2)] * NUM_BATCHES,
    )
    options = FitOptions(epochs=NUM_EPOCHS, validate_every=1, descent=LINE, num_parts=2)

    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        fit(nn.Linear(1, 1), task, options, checkpoints_in(tmp_path), silent)

    spans = {name: [] for name in (*BESIDE, *INSIDE)}
    for event in recorded.events():
        if event.name in spans:
            spans[event.name].append((event.time_range.start, event.time_range.end))
    steps = sorted(spans["step"])
    assert {name: len(ranges) for name, ranges in spans.items()} == {
        **dict.fromkeys(("data", "step", "communication", "optimizer"), NUM_EPOCHS * NUM_BATCHES),
        **dict.fromkeys(("forward", "backward"), NUM_EPOCHS * NUM_BATCHES * 2),
        "validation": NUM_EPOCHS,
        "checkpoint": 1,
    }
    for begin, end in steps:
        within = sorted(
            (first, name) for name in INSIDE for first, last in spans[name] if begin <= first <= last <= end
        )
        assert [name for _, name in within] == ["forward", "backward"] * 2 + ["optimizer"]
    for name in ("data", "communication", "validation", "checkpoint"):
        assert all(last <= begin or first >= end for first, last in spans[name] for begin, end in steps)
    assert is_input("data")
