"""The words of --parallel."""

import pytest

from pipelines.planner.mesh import Layout
from pipelines.training.fit.layout import layout_of
from pipelines.training.workers.team import Team
from services.errors import ConfigError


@pytest.mark.parametrize(
    ("words", "workers", "layout"),
    [
        ("auto", 4, Layout(data=4)),
        ("ddp", 2, Layout(data=2)),
        ("fsdp", 4, Layout(shard=4)),
        ("tp2", 2, Layout(tensor=2)),
        ("fsdp+tp2", 8, Layout(shard=4, tensor=2)),
    ],
)
def test_a_layout_uses_all_workers(words: str, workers: int, layout: Layout) -> None:
    """Its sizes multiply to their number; ranks that divide a layer's products share rows."""
    assert layout_of(words, workers) == layout
    assert layout.num_gpus == workers


@pytest.mark.parametrize(("words", "workers"), [("dp", 2), ("tp3", 4), ("tp1", 2), ("tp2", 4), ("ddp+tp2", 4), ("", 2)])
def test_what_is_no_layout_is_refused_with_the_option(words: str, workers: int) -> None:
    """An unknown word, a number that divides nothing, and workers that are left over."""
    with pytest.raises(ConfigError, match="--parallel"):
        layout_of(words, workers)


@pytest.mark.parametrize(
    ("given", "option"),
    [
        ({"workers": 0}, "--workers"),
        ({"timeout_s": 0.0}, "--worker-timeout-s"),
        ({"precision": "fp8"}, "--precision"),
        ({"recompute": "some"}, "--recompute"),
        ({"workers": 3, "parallel": "tp2"}, "--parallel"),
    ],
)
def test_a_team_that_cannot_be_started_is_refused_with_the_option(given: dict[str, object], option: str) -> None:
    """Before anything runs."""
    with pytest.raises(ConfigError, match=option):
        Team(**given)  # type: ignore[arg-type]
