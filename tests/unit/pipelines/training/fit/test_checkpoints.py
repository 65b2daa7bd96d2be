"""Checkpoints of both formats in a folder: a run resumes from the newest complete checkpoint of either format."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pipelines.training.fit.checkpoints import FitState
from pipelines.training.fit.shard_writer import ShardWriter
from tests.unit.pipelines.conftest import checkpoints_in


def state(number: float) -> FitState:
    return FitState({"weight": torch.full((4,), number)}, {"step": number})


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one process, which writes shards."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "meeting"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def write(folder: Path, form: str, number: float) -> None:
    """Write a checkpoint in one of the formats."""
    saved = checkpoints_in(folder)
    if form == "file":
        saved.save(state(number))
        return
    writer = ShardWriter(saved, is_main=True)
    writer.save(state(number))
    writer.wait()


def leave(folder: Path, form: str, number: int) -> Path:
    """Create the partial output of a process killed while writing a checkpoint."""
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
    """The last complete checkpoint is loaded, and the next checkpoint replaces the partial output."""
    folder = tmp_path / "fit"
    write(folder, before, 1.0)
    left = leave(folder, before, 2)
    saved = checkpoints_in(folder)

    state = saved.newest()
    write(folder, now, 2.0)

    assert state is not None
    assert state.values == {"step": 1.0}
    assert not left.exists()
    again = checkpoints_in(folder).newest()
    assert again is not None
    assert (again.values, again.tensors["weight"].tolist()) == ({"step": 2.0}, [2.0] * 4)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("form", "part"), [("file", ""), ("shards", "state.json"), ("shards", "__0_0.distcp")])
def test_the_checkpoint_that_is_used_is_the_one_that_is_named(tmp_path: Path, form: str, part: str) -> None:
    """Loading and naming both skip a newest checkpoint with a flipped byte, and ignore foreign files."""
    write(tmp_path, form, 1.0)
    write(tmp_path, form, 2.0)
    saved = checkpoints_in(tmp_path)
    (tmp_path / "notes.safetensors").write_text("mine")
    older, newest = sorted(path for path in tmp_path.iterdir() if path.stem.isdigit())
    assert saved.newest_whole_name() == newest.name
    harmed = newest / part
    content = harmed.read_bytes()
    harmed.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])

    state = saved.newest()
    assert state is not None
    assert (state.values, saved.newest_whole_name()) == ({"step": 1.0}, older.name)


@pytest.mark.parametrize("about", [[], {}, {"sha256": []}, {"sha256": {}, "values": 1, "state_sha256": ""}])
def test_a_state_of_wrong_types_is_passed_over(tmp_path: Path, about: object) -> None:
    """A folder with an invalid state.json is ignored."""
    folder = tmp_path / "000000001.shards"
    folder.mkdir()
    (folder / "state.json").write_text(json.dumps(about))

    assert checkpoints_in(tmp_path).newest() is None
