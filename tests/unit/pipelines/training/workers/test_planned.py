"""--parallel auto asks the planner, whose own figures are held by its tests."""

from dataclasses import replace

import pytest

from models.decoder.config import DecoderConfig
from pipelines.planner.devices import parse_gpus
from pipelines.training.workers.planned import planned
from pipelines.training.workers.team import Team

SMALL = DecoderConfig(
    vocab_size=1_700,
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=1_024,
)
LARGE = replace(
    SMALL,
    vocab_size=128_256,
    hidden_size=4_096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
)


@pytest.mark.parametrize(
    ("config", "gpus", "parallel"),
    [(SMALL, "2xh100", "ddp"), (LARGE, "8xh100", "fsdp"), (LARGE, "2xh100", "auto")],
)
def test_a_small_model_is_copied_and_one_that_does_not_fit_is_divided(
    config: DecoderConfig, gpus: str, parallel: str
) -> None:
    """What fits nowhere stays as it was, and runs out of memory with an error that says so."""
    some = parse_gpus(gpus)

    team = planned(Team(workers=some.number), config, some, 65_536, 1_024)

    assert team.parallel == parallel
    assert team.layout.data * team.layout.shard * team.layout.tensor == some.number


def test_what_is_computed_again_is_kept_where_it_was_asked_for() -> None:
    """The planner may ask for more of it, never for less."""
    team = planned(Team(workers=8, recompute="full"), LARGE, parse_gpus("8xh100"), 65_536, 1_024)

    assert (team.recompute, team.parallel) == ("full", "fsdp")


def test_a_pipeline_is_chosen_where_nothing_else_fits_as_fast() -> None:
    """Cards without fast links between them: stages send less than shards. What is chosen is what the trainer offers, and the layout's sizes are the workers."""
    for gpus in ("8xl4", "16xh100", "8xa100-40"):
        some = parse_gpus(gpus)
        team = planned(Team(workers=some.number), LARGE, some, 65_536, 1_024)
        assert team.layout.num_gpus == some.number
        print(gpus, team.parallel)
