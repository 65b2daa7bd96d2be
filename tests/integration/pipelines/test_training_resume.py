"""A fit that is killed, or whose checkpoints are damaged, resumes to the same weights."""

import random
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from pipelines.codes.tokenize import tokenize
from pipelines.runner.stage import silent
from pipelines.training.fit.checkpoints import Checkpoints, FitState
from pipelines.training.reports.watched import LoggedFit
from pipelines.training.speed import SPEED
from pipelines.training.train_decoder import train
from services.errors import StageFailed
from tests.support.training.killed_fit import fit_one
from tests.support.training.synthetic import histories_from, write_ingested
from tests.unit.pipelines.conftest import CPU, DROPPED_DECODER

STATE = FitState({"weight": torch.arange(1_000.0)}, {"epoch": 1})


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens of the ring, and a teacher."""
    folder = tmp_path_factory.mktemp("data")
    ingested = write_ingested(folder / "ingest")
    (folder / "tokens").mkdir()
    tokenize(ingested, histories_from(ingested), 1_000, folder / "tokens")
    torch.set_num_threads(1)
    train(folder / "tokens", DROPPED_DECODER, folder, Checkpoints(folder / "saved", "train", 60), CPU, silent)
    return folder


def written(folder: Path) -> dict[str, bytes]:
    """Return a fit's results without checkpoints and speed: weights, curve, counts and options."""
    files = [path for path in folder.rglob("*") if path.is_file() and "saved" not in path.parts]
    return {path.name: path.read_bytes() for path in files if path.name != SPEED}


@pytest.mark.parametrize(
    ("model", "how"),
    [
        ("decoder", []),
        ("decoder", ["ahead"]),
        *(pytest.param(name, how, marks=pytest.mark.grid) for name in ("student", "twin") for how in ([], ["ahead"])),
    ],
)
def test_a_killed_fit_ends_with_the_same_bytes(model: str, how: list[str], data: Path, tmp_path: Path) -> None:
    """Repeated SIGKILL before random steps of a child process gives the weights and curve of an undisturbed run.

    This holds with a prefetch thread too: the checkpoint then has the state of the batch that was learned.
    """
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    fit_one(model, data, Checkpoints(whole / "saved", "train", 60))
    draw, num_kills = random.Random(model), 0

    for every_s in (0.0, 0.03):
        nth = str(draw.randint(2, 14))
        child = [
            sys.executable,
            "-m",
            "tests.support.training.killed_fit",
            model,
            str(data),
            str(broken),
            str(every_s),
            nth,
            *how,
        ]
        num_kills += subprocess.run(child, check=False).returncode == -signal.SIGKILL
    fit_one(model, data, Checkpoints(broken / "saved", "train", 60))

    assert num_kills == 2
    assert written(broken) == written(whole)


@pytest.mark.parametrize("position", [0, 100, -1])
def test_a_damaged_checkpoint_is_refused_and_the_one_before_used(position: int, tmp_path: Path) -> None:
    """A flipped byte in the length, the header or a tensor is logged, and the fit resumes from the older file."""
    saved = Checkpoints(tmp_path, "train", 60)
    for epoch in (1, 2, 3):
        saved.save(FitState(STATE.tensors, {"epoch": epoch}))
    newest = max(tmp_path.iterdir())
    content = bytearray(newest.read_bytes())
    content[position] ^= 1
    newest.write_bytes(content)

    with capture_logs() as logged:
        state = saved.newest(watch=LoggedFit())

    assert len(list(tmp_path.iterdir())) == 2
    assert state is not None
    assert state.values == {"epoch": 2}
    assert newest.name in logged[0]["why"]


def test_a_full_disk_leaves_the_last_good_checkpoint_and_says_so(tmp_path: Path) -> None:
    """On a full file system the stage fails and names the intact file, where the next run resumes."""
    saved = Checkpoints(tmp_path, "train", 60)
    saved.save(STATE)

    with (
        no_room(),
        pytest.raises(StageFailed, match=r"cannot be written.*free space.*resumes from 000000001.safetensors"),
    ):
        saved.save(FitState(STATE.tensors, {"epoch": 2}))

    state = saved.newest()
    assert [path.name for path in tmp_path.iterdir()] == ["000000001.safetensors"]
    assert state is not None
    assert state.values == {"epoch": 1}


@contextmanager
def no_room() -> Iterator[None]:
    """Let the kernel refuse files of this process over 1,000 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
