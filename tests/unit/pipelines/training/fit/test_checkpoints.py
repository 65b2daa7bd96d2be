"""Checkpoints of both forms in one folder: a run goes on from the newest whole one, whatever a killed run of the other form left."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pipelines.training.fit.checkpoints import FitState
from pipelines.training.fit.shard_files import ShardWriter
from tests.unit.pipelines.conftest import checkpoints_in


def state(number: float) -> FitState:
    """A state with a number."""
    return FitState({"weight": torch.full((4,), number)}, {"step": number})


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A group of one process, which writes shards."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "meeting"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def write(folder: Path, form: str, number: float) -> None:
    """Write a checkpoint in one of the forms."""
    saved = checkpoints_in(folder)
    if form == "file":
        saved.save(state(number))
        return
    writer = ShardWriter(saved, is_main=True)
    writer.save(state(number))
    writer.wait()


def leave(folder: Path, form: str, number: int) -> Path:
    """Leave what a process that was killed while it wrote had written so far."""
    left = folder / f"{number:09d}.partial"
    if form == "file":
        left.write_bytes(b"half a file")
    else:
        left.mkdir()
        (left / "__0_0.distcp").write_bytes(b"half a shard")
    return left


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("now", ["file", "shards"])
@pytest.mark.parametrize("before", ["file", "shards"])
def test_a_run_goes_on_whatever_form_was_left(tmp_path: Path, before: str, now: str) -> None:
    """The last whole checkpoint is read, the next one is written over what was left, and nothing of that stays."""
    folder = tmp_path / "fit"
    write(folder, before, 1.0)
    left = leave(folder, before, 2)
    saved = checkpoints_in(folder)

    found = saved.newest()
    write(folder, now, 2.0)

    assert found is not None
    assert found.values == {"step": 1.0}
    assert not left.exists()
    again = checkpoints_in(folder).newest()
    assert again is not None
    assert (again.values, again.tensors["weight"].tolist()) == ({"step": 2.0}, [2.0] * 4)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("form", ["file", "shards"])
def test_the_checkpoint_that_is_used_is_the_one_that_is_named(tmp_path: Path, form: str) -> None:
    """A damaged newest one is passed over by both; a foreign file is none."""
    write(tmp_path, form, 1.0)
    write(tmp_path, form, 2.0)
    saved = checkpoints_in(tmp_path)
    (tmp_path / "notes.safetensors").write_text("mine")
    older, newest = sorted(path for path in tmp_path.iterdir() if path.stem.isdigit())
    assert saved.newest_whole_name() == newest.name
    harmed = newest if newest.is_file() else newest / "state.json"
    harmed.write_bytes(harmed.read_bytes()[:-9])

    found = saved.newest()
    assert found is not None
    assert (found.values, saved.newest_whole_name()) == ({"step": 1.0}, older.name)


@pytest.mark.parametrize("about", [[], {}, {"sha256": []}, {"sha256": {}, "values": 1, "state_sha256": ""}])
def test_a_state_of_wrong_types_is_passed_over(tmp_path: Path, about: object) -> None:
    """A folder whose state.json was written by others is no checkpoint, and ends no run."""
    folder = tmp_path / "000000001.shards"
    folder.mkdir()
    (folder / "state.json").write_text(json.dumps(about))

    assert checkpoints_in(tmp_path).newest() is None
