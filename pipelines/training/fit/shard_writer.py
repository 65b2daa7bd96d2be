"""Writes sharded checkpoints during the fit: each rank writes its part of the state in the background."""

import json
import shutil
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import async_save

from models.files import file_sha256, rename_durably
from pipelines.training.fit.checkpoints import FOLDER_SUFFIX, PARTIAL, Checkpoints, FitState
from pipelines.training.fit.shard_files import STATE_FILE, quiet_torch, state_sha256


@dataclass(frozen=True, slots=True)
class _Writing:
    future: "Future[Any]"
    partial: Path
    path: Path
    values: str


class ShardWriter:
    """Writes one checkpoint at a time in the background. All ranks call it in the same order.

    Rank 0 renames a complete one.
    """

    def __init__(self, checkpoints: Checkpoints, *, is_main: bool) -> None:
        self._checkpoints, self._is_main = checkpoints, is_main
        self._group = dist.new_group(backend="gloo")  # otherwise its messages mix with the steps' messages
        self._writing: _Writing | None = None

    def save(self, state: FitState) -> None:
        """Wait for the previous checkpoint, copy the state and begin to write it; the state may then change.

        Raises StageFailed.
        """
        self.wait()
        path = self._checkpoints.next_path()
        partial = path.with_suffix(PARTIAL)
        if self._is_main:
            self._checkpoints.discard_partial()
        dist.barrier(group=self._group)
        with quiet_torch():
            future = async_save(
                dict(state.tensors), storage_writer=FileSystemWriter(partial), process_group=self._group
            )
        self._writing = _Writing(
            cast("Future[Any]", future), partial, path.with_suffix(FOLDER_SUFFIX), json.dumps(state.values)
        )
        self._checkpoints.note_saved()

    def wait(self) -> None:
        """Wait until the pending checkpoint is written and renamed.

        Raises StageFailed on all ranks if writing fails.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return
        failed = writing.future.exception() or (_complete(writing) if self._is_main else None)
        seen = torch.tensor([failed is not None], dtype=torch.uint8)
        dist.all_reduce(seen, dist.ReduceOp.MAX, group=self._group)
        if seen.item():
            if self._is_main:
                shutil.rmtree(writing.partial, ignore_errors=True)
            raise self._checkpoints.not_written(writing.path, _reason(failed)) from failed
        if self._is_main:
            self._checkpoints.prune()


def _reason(failed: BaseException | None) -> Exception:
    """Return each rank's failure from torch's combined error."""
    if isinstance(failed, CheckpointException):
        rank, (error, _) = next(iter(failed.failures.items()))
        return OSError(f"rank {rank}: {error}")
    return failed if isinstance(failed, Exception) else OSError("rank 0 could not rename the folder")


def _complete(writing: _Writing) -> OSError | None:
    """Write `state.json` and rename the folder. Return the error, if any."""
    try:
        hashes = {path.name: file_sha256(path) for path in sorted(writing.partial.iterdir())}
        about: Mapping[str, Any] = {
            "values": writing.values,
            "state_sha256": state_sha256(writing.values),
            "sha256": hashes,
        }
        (writing.partial / STATE_FILE).write_text(json.dumps(about))
        rename_durably(writing.partial, writing.path)
    except OSError as error:
        return error
    return None
