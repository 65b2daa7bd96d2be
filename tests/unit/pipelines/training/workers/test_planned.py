"""--parallel auto asks the planner, whose own figures are held by its tests."""

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
    """What fits nowhere stays as it was, and runs out of memory with an error that says so."""
    some = parse_gpus(gpus)

    team = planned(Team(workers=some.number), config, some, 65_536, 1_024)

    assert team.parallel == parallel
    assert team.layout.data * team.layout.shard * team.layout.tensor == some.number


def test_what_is_computed_again_is_kept_where_it_was_asked_for() -> None:
    """The planner may ask for more of it, never for less."""
    team = planned(Team(workers=8, recompute="full"), LARGE, parse_gpus("8xh100"), 65_536, 1_024)

    assert (team.recompute, team.parallel) == ("full", "fsdp")


@pytest.mark.parametrize(
    ("gpus", "parallel"), [("4xh100-pcie", "pp4"), ("8xh100-pcie", "pp4+ddp"), ("16xl4", "fsdp+tp2")]
)
def test_what_is_chosen_is_what_the_trainer_offers(gpus: str, parallel: str) -> None:
    """A pipeline where links are slow, a product where it alone fits; the layout's sizes are the workers."""
    some = parse_gpus(gpus)

    team = planned(Team(workers=some.number), LARGE, some, 65_536, 1_024)

    assert team.parallel == parallel
    assert team.layout.num_gpus == some.number


@pytest.mark.parametrize("parallel", ["ddp", "pp2"])
def test_predicted_memory_names_its_largest_component_first(parallel: str) -> None:
    """Twice the parts, half of the activations; states stay. A pipeline's last stage has a micro-batch at a time."""
    layout = Team(workers=2, parallel=parallel).layout
    whole, halved = (
        predicted_parts(LARGE, layout, "none", 65_536, parts, is_bf16=True, is_gpu=True) for parts in (1, 2)
    )

    assert halved["activations"] == pytest.approx(whole["activations"] / 2)
    assert halved["optimizer"] == whole["optimizer"]
    largest = max(whole, key=lambda name: whole[name])
    assert re.match(rf"[\d,]+ MB predicted \({largest} [\d,]+, ", describe_parts(whole))
