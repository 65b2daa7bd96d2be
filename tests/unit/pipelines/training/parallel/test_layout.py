"""Parsing of --parallel."""

import pytest

from pipelines.planner.mesh import ParallelLayout
from pipelines.training.parallel.layout import layout_of, words_of
from pipelines.training.workers.team import Team
from services.errors import ConfigError


@pytest.mark.parametrize(
    ("words", "workers", "layout"),
    [
        ("auto", 4, ParallelLayout(data=4)),
        ("ddp", 2, ParallelLayout(data=2)),
        ("fsdp", 4, ParallelLayout(shard=4)),
        ("tp2", 2, ParallelLayout(tensor=2)),
        ("fsdp+tp2", 8, ParallelLayout(shard=4, tensor=2)),
        ("hsdp4", 8, ParallelLayout(data=2, shard=4)),
        ("ddp+tp2", 4, ParallelLayout(data=2, tensor=2)),
        ("pp2", 2, ParallelLayout(pipeline=2, accumulation=8)),
        ("pp2+ddp", 8, ParallelLayout(data=4, pipeline=2, accumulation=8)),
    ],
)
def test_a_layout_uses_all_workers(words: str, workers: int, layout: ParallelLayout) -> None:
    """The sizes of a layout multiply to the number of workers, and the layout maps back to the words."""
    assert layout_of(words, workers) == layout
    assert words_of(layout) == ("ddp" if words == "auto" else words)
    assert layout.num_gpus == workers


@pytest.mark.parametrize(
    ("words", "workers"),
    [
        *(("dp", 2), ("tp3", 4), ("tp1", 2), ("tp2", 4), ("pp2", 4), ("pp3", 4), ("hsdp", 4), ("hsdp3", 4), ("", 2)),
        *(("pp2+tp2", 4), ("pp2+fsdp", 4), ("hsdp2+tp2", 8), ("ddp+fsdp", 4), ("ddp+ddp", 2), ("ddp2", 2)),
    ],
)
def test_what_is_no_layout_is_refused_with_the_option(words: str, workers: int) -> None:
    """Unknown words, sizes that do not divide the workers, and unsupported combinations are rejected."""
    with pytest.raises(ConfigError, match="--parallel"):
        layout_of(words, workers)


def test_a_product_that_is_not_offered_has_no_words() -> None:
    """Unsupported combinations have no words, so the planner tries the next layout."""
    assert words_of(ParallelLayout(pipeline=2, tensor=2)) is None
    assert words_of(ParallelLayout(data=2, shard=2, tensor=2)) is None
    assert words_of(ParallelLayout()) == "auto"


@pytest.mark.parametrize(
    ("given", "option"),
    [
        ({"workers": 0}, "--workers"),
        ({"timeout_s": 0.0}, "--worker-timeout-s"),
        ({"precision": "fp8"}, "--precision"),
        ({"recompute": "some"}, "--recompute"),
        ({"workers": 3, "parallel": "tp2"}, "--parallel"),
        ({"compression": "int8"}, "--compression"),
        ({"bucket_mb": 0.0}, "--bucket-mb"),
        ({"workers": 2, "parallel": "fsdp", "compression": "bf16"}, "--compression"),
        ({"workers": 2, "parallel": "tp2", "bucket_mb": 1.0}, "--bucket-mb"),
    ],
)
def test_a_team_that_cannot_be_started_is_refused_with_the_option(given: dict[str, object], option: str) -> None:
    """Invalid options are rejected before the run starts."""
    with pytest.raises(ConfigError, match=option):
        Team(**given)  # type: ignore[arg-type]
