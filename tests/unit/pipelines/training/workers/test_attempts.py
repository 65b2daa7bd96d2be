"""Reactions to ended ranks: an error, a restart, or the result. Ranks are simulated here."""

from pathlib import Path

import pytest
import structlog
import torch

from pipelines.training.fit.checkpoints import FitState
from pipelines.training.workers.attempts import Left, fit_again
from pipelines.training.workers.rank import ExitKind, RankExit
from services.errors import ConfigError, StageFailed
from tests.unit.pipelines.conftest import checkpoints_in

DONE, LOST = RankExit(ExitKind.DONE, "weights"), RankExit(ExitKind.LOST_PEER, why="connection closed")
FULL = RankExit(ExitKind.OUT_OF_MEMORY)


def left(*ended: RankExit | None) -> list[Left]:
    """Build the ends of ranks; None means killed without a report."""
    return [Left(rank, exit_code, "was ended by SIGKILL") for rank, exit_code in enumerate(ended)]


def test_ranks_begin_again_for_as_long_as_checkpoints_are_made(tmp_path: Path) -> None:
    """Four failures with a new checkpoint after each are retried."""
    saved, starts = checkpoints_in(tmp_path), []

    def run(accumulation: int) -> list[Left]:
        starts.append(accumulation)
        saved.save(FitState({"weight": torch.zeros(1)}, {}))
        return left(DONE, DONE) if len(starts) == 5 else left(LOST, None)

    assert fit_again(run, saved) == "weights"
    assert starts == [1] * 5


def test_a_start_names_the_checkpoint_that_it_uses(tmp_path: Path) -> None:
    """The log names the newest complete checkpoint at the time of the restart."""
    saved, starts = checkpoints_in(tmp_path), []

    def run(accumulation: int) -> list[Left]:
        starts.append(accumulation)
        saved.save(FitState({"weight": torch.zeros(1)}, {}))
        if len(starts) == 2:
            (tmp_path / "000000002.safetensors").write_bytes(b"torn")
        return left(DONE, DONE) if len(starts) == 3 else left(LOST, None)

    with structlog.testing.capture_logs() as logged:
        fit_again(run, saved)

    assert [entry["checkpoint"] for entry in logged] == ["000000001.safetensors"] * 2


def test_a_fit_that_does_not_get_on_is_given_up_with_the_rank(tmp_path: Path) -> None:
    """After three starts from the same checkpoint, the error names the stage, the rank and its end."""
    starts: list[int] = []

    def run(accumulation: int) -> list[Left]:
        starts.append(accumulation)
        return left(LOST, None)

    with pytest.raises(StageFailed, match="train: rank 1 was ended by SIGKILL"):
        fit_again(run, checkpoints_in(tmp_path))
    assert len(starts) == 3


def test_a_full_memory_is_met_with_twice_as_many_parts(tmp_path: Path) -> None:
    """If any rank runs out of memory, all ranks double the parts, up to 64."""
    starts: list[int] = []

    def run(accumulation: int) -> list[Left]:
        starts.append(accumulation)
        return left(DONE, DONE) if accumulation == 4 and len(starts) < 4 else left(LOST, FULL)

    assert fit_again(run, checkpoints_in(tmp_path)) == "weights"
    with pytest.raises(StageFailed, match="rank 1 is out of memory"):
        fit_again(run, checkpoints_in(tmp_path))
    assert starts[:3] == [1, 2, 4]
    assert max(starts) == 64


@pytest.mark.parametrize("kind", [ExitKind.REFUSED, ExitKind.BROKEN])
def test_what_another_start_would_not_mend_is_raised_at_once(kind: ExitKind, tmp_path: Path) -> None:
    """User errors are raised unchanged and unexpected errors with their rank, not the peers' lost connections."""
    refused = ConfigError("--events: no such file")
    ended = RankExit(kind, (type(refused), refused.args, vars(refused)), "KeyError: 'item'")

    with pytest.raises(ConfigError if kind == ExitKind.REFUSED else StageFailed) as raised:
        fit_again(lambda _: left(LOST, ended), checkpoints_in(tmp_path))

    assert ("--events: no such file" if kind == ExitKind.REFUSED else "rank 1: KeyError: 'item'") in str(raised.value)
