"""What follows from how ranks have left: an error, another start, or an end. The ranks here are words; real ones are killed in tests/integration."""

from pathlib import Path

import pytest
import structlog
import torch

from pipelines.training.fit.checkpoints import FitState
from pipelines.training.workers.attempts import Left, fit_again
from pipelines.training.workers.rank import Ended, Ending
from services.errors import ConfigError, StageFailed
from tests.unit.pipelines.conftest import checkpoints_in

DONE, LOST = Ended(Ending.DONE, "weights"), Ended(Ending.LOST_PEER, why="connection closed")
FULL = Ended(Ending.OUT_OF_MEMORY)


def left(*ended: Ended | None) -> list[Left]:
    """How ranks have left; one without last words was killed."""
    return [Left(rank, one, "was ended by SIGKILL") for rank, one in enumerate(ended)]


def test_ranks_begin_again_for_as_long_as_checkpoints_are_made(tmp_path: Path) -> None:
    """Four ranks killed on the way, and a new checkpoint between each two."""
    saved, starts = checkpoints_in(tmp_path), []

    def run(accumulation: int) -> list[Left]:
        starts.append(accumulation)
        saved.save(FitState({"weight": torch.zeros(1)}, {}))
        return left(DONE, DONE) if len(starts) == 5 else left(LOST, None)

    assert fit_again(run, saved) == "weights"
    assert starts == [1] * 5


def test_a_start_names_the_checkpoint_that_it_uses(tmp_path: Path) -> None:
    """The newest whole one at the time of the new start, and not the newest before the run that failed."""
    saved, starts = checkpoints_in(tmp_path), []

    def run(accumulation: int) -> list[Left]:
        starts.append(accumulation)
        saved.save(FitState({"weight": torch.zeros(1)}, {}))
        if len(starts) == 2:
            (tmp_path / "000000002.safetensors").write_bytes(b"torn")
        return left(DONE, DONE) if len(starts) == 3 else left(LOST, None)

    with structlog.testing.capture_logs() as logged:
        fit_again(run, saved)

    assert [one["checkpoint"] for one in logged] == ["000000001.safetensors"] * 2


def test_a_fit_that_does_not_get_on_is_given_up_with_the_rank(tmp_path: Path) -> None:
    """Three starts from the same checkpoint: the error names the stage, the rank and how it ended."""
    starts: list[int] = []

    def run(accumulation: int) -> list[Left]:
        starts.append(accumulation)
        return left(LOST, None)

    with pytest.raises(StageFailed, match="train: rank 1 was ended by SIGKILL"):
        fit_again(run, checkpoints_in(tmp_path))
    assert len(starts) == 3


def test_a_full_memory_is_met_with_twice_as_many_parts(tmp_path: Path) -> None:
    """On all ranks, again and again, whichever was full; and at 64 parts it is given up."""
    starts: list[int] = []

    def run(accumulation: int) -> list[Left]:
        starts.append(accumulation)
        return left(DONE, DONE) if accumulation == 4 and len(starts) < 4 else left(LOST, FULL)

    assert fit_again(run, checkpoints_in(tmp_path)) == "weights"
    with pytest.raises(StageFailed, match="rank 1 is out of memory"):
        fit_again(run, checkpoints_in(tmp_path))
    assert starts[:3] == [1, 2, 4]
    assert max(starts) == 64


@pytest.mark.parametrize("kind", [Ending.REFUSED, Ending.BROKEN])
def test_what_another_start_would_not_mend_is_raised_at_once(kind: Ending, tmp_path: Path) -> None:
    """An error of the user's is the same error again; one that nobody foresaw is shown with its rank. What others then missed is not the reason."""
    refused = ConfigError("--events: no such file")
    ended = Ended(kind, (type(refused), refused.args, vars(refused)), "KeyError: 'item'")

    with pytest.raises(ConfigError if kind == Ending.REFUSED else StageFailed) as raised:
        fit_again(lambda _: left(LOST, ended), checkpoints_in(tmp_path))

    assert ("--events: no such file" if kind == Ending.REFUSED else "rank 1: KeyError: 'item'") in str(raised.value)
