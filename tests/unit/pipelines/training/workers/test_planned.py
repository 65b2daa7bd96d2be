"""--parallel auto uses the planner, which has its own tests."""

import re

import pytest

from models.decoder.config import DecoderConfig
from pipelines.planner.devices import parse_gpus
from pipelines.training.planned_memory import describe_parts, predicted_parts
from pipelines.training.workers.planned import planned
from pipelines.training.workers.team import Team
from tests.support.engine.attention_shapes import attention_shape

SMALL = attention_shape(2, 2, 32, vocab_size=1_700, hidden_size=64, intermediate_size=160)
LARGE = attention_shape(32, 8, 128, layers=32, vocab_size=128_256, hidden_size=4_096, intermediate_size=14_336)


@pytest.mark.parametrize(
    ("config", "gpus", "parallel"),
    [(SMALL, "2xh100", "ddp"), (LARGE, "8xh100", "fsdp"), (LARGE, "2xh100", "auto")],
)
def test_a_small_model_is_copied_and_one_that_does_not_fit_is_divided(
    config: DecoderConfig, gpus: str, parallel: str
) -> None:
    """A model that fits nowhere keeps its options, and fails with an out-of-memory error."""
    some = parse_gpus(gpus)

    team = planned(Team(workers=some.number), config, some, 65_536, 1_024)

    assert team.parallel == parallel
    assert team.layout.data * team.layout.shard * team.layout.tensor == some.number


def test_what_is_computed_again_is_kept_where_it_was_asked_for() -> None:
    """The planner may increase recomputation but not reduce it."""
    team = planned(Team(workers=8, recompute="full"), LARGE, parse_gpus("8xh100"), 65_536, 1_024)

    assert (team.recompute, team.parallel) == ("full", "fsdp")


@pytest.mark.parametrize(
    ("gpus", "parallel"), [("4xh100-pcie", "pp4"), ("8xh100-pcie", "pp4+ddp"), ("16xl4", "fsdp+tp2")]
)
def test_what_is_chosen_is_what_the_trainer_offers(gpus: str, parallel: str) -> None:
    """The planner uses a pipeline on slow links and combinations if needed, over all workers."""
    some = parse_gpus(gpus)

    team = planned(Team(workers=some.number), LARGE, some, 65_536, 1_024)

    assert team.parallel == parallel
    assert team.layout.num_gpus == some.number


@pytest.mark.parametrize("parallel", ["ddp", "pp2"])
def test_predicted_memory_names_its_largest_component_first(parallel: str) -> None:
    """Twice the parts halve the activations but not the states; the largest component comes first."""
    layout = Team(workers=2, parallel=parallel).layout
    whole, halved = (
        predicted_parts(LARGE, layout, "none", 65_536, parts, is_bf16=True, is_gpu=True) for parts in (1, 2)
    )

    assert halved["activations"] == pytest.approx(whole["activations"] / 2)
    assert halved["optimizer"] == whole["optimizer"]
    largest = max(whole, key=lambda name: whole[name])
    assert re.match(rf"[\d,]+ MB predicted \({largest} [\d,]+, ", describe_parts(whole))
