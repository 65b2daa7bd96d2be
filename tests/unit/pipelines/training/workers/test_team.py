"""Notes about worker options that have no effect, and errors of the Ray cluster option."""

import socket

import pytest

from pipelines.training.workers.team import Team
from services.errors import ConfigError


@pytest.mark.parametrize(
    ("team", "beginnings"),
    [
        (Team(), []),
        (Team(workers=2), []),
        (Team(workers=3), ["--workers 3: 2 cores here"]),
        (Team(parallel="fsdp"), ["--parallel fsdp: one worker has the whole model"]),
        (Team(ray="local"), ["--ray local: one worker runs in this process"]),
    ],
)
def test_an_option_without_effect_says_so(team: Team, beginnings: list[str]) -> None:
    """Without an effect on two cores without a GPU, an option is noted."""
    notes = team.notes(2, 0)

    assert [note[: len(begin)] for note, begin in zip(notes, beginnings, strict=True)] == beginnings


def test_a_cluster_that_is_gone_is_noticed_at_once() -> None:
    """An address without a cluster is rejected immediately; other forms are resolved by Ray."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    for cluster in (address, f"ray://{address}"):
        with pytest.raises(ConfigError, match="--ray: no Ray cluster at"):
            Team(workers=2, ray=cluster).check_ray()
    for other in ("local", "auto", ""):
        Team(workers=2, ray=other).check_ray()
