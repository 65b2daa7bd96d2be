"""What outliers cost the others, in virtual time: the gate, the predictors, the breakers and the engine's scheduler are the real ones."""

import pytest

from tests.support.outliers import SCENARIOS, Simulation


@pytest.mark.parametrize("name", SCENARIOS)
def test_light_requests_reach_the_llm_whatever_the_others_do(name: str) -> None:
    """A ranking of 0.6 s, a hung or slow replica, or a burst of long prompts leaves at least 90 % of the light ones in time."""
    simulation = Simulation(SCENARIOS[name])
    simulation.run()

    assert simulation.num_light > 800
    assert simulation.num_in_time >= 0.9 * simulation.num_light
