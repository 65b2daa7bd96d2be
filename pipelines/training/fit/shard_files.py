"""Sharded checkpoints: each rank writes its part into a folder (torch's distributed checkpoint) during the fit.

    000000007.shards/
        .metadata, __0_0.distcp, __1_0.distcp   torch's: any number of ranks in any layout reads its part
        state.json                              the JSON values, and the SHA-256 of each of torch's files

`state.json` is written last, before the folder is renamed to its final name. A folder without it, or with a file whose
hash differs, is skipped. torch's own files are partly pickled: hashes are compared before a file is opened, but anyone
who can write to the folder can run code, as with the rest of the state folder.
"""

import hashlib
import json
import shutil
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from models.errors import CheckpointError
from models.files import file_sha256, rename_durably
from pipelines.training.fit.checkpoints import ELSEWHERE, FOLDER_SUFFIX, PARTIAL, Checkpoints, FitState, Like

_STATE = "state.json"


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
        with _quiet():
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
        failed = writing.future.exception() or (self._named(writing) if self._is_main else None)
        seen = torch.tensor([failed is not None], dtype=torch.uint8)
        dist.all_reduce(seen, dist.ReduceOp.MAX, group=self._group)
        if seen.item():
            if self._is_main:
                shutil.rmtree(writing.partial, ignore_errors=True)
            raise self._checkpoints.not_written(writing.path, _reason(failed)) from failed
        if self._is_main:
            self._checkpoints.prune()

    @staticmethod
    def _named(writing: _Writing) -> OSError | None:
        """Write `state.json` and rename the folder. Return the error, if any."""
        try:
            _name(writing)
        except OSError as error:
            return error
        return None


def read_state(folder: Path) -> dict[str, Any]:
    """Return the values after checking every file's hash. Raises CheckpointError if the checkpoint is damaged."""
    try:
        about = json.loads((folder / _STATE).read_text())
        changed = [name for name, written in about["sha256"].items() if file_sha256(folder / name) != written]
        is_changed = about["state_sha256"] != _sha256(about["values"])
        values: dict[str, Any] = json.loads(about["values"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{folder}: not readable ({error}); the one before it is used") from error
    if changed or is_changed:
        names = ", ".join(changed) or _STATE
        raise CheckpointError(f"{folder}: the content of {names} differs from its SHA-256; the one before it is used")
    return values


def read_shards(folder: Path, like: Like) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors, each in the layout of `like`, and the values. Raises CheckpointError if damaged."""
    values = read_state(folder)
    reader = FileSystemReader(folder)
    tensors: dict[str, Tensor] = {}
    for name, stored in reader.read_metadata().state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata), "a state consists of tensors"
        alike = like(name)
        if alike is ELSEWHERE:
            continue
        dtype = stored.properties.dtype
        is_alike = alike is not None and alike.shape == stored.size
        tensors[name] = (
            torch.empty_like(cast("Tensor", alike), dtype=dtype) if is_alike else torch.empty(stored.size, dtype=dtype)
        )
    with _quiet():
        load(tensors, storage_reader=reader, no_dist=not dist.is_initialized())
    return tensors, values


def _reason(failed: BaseException | None) -> Exception:
    """Return each rank's failure from torch's combined error."""
    if isinstance(failed, CheckpointException):
        rank, (error, _) = next(iter(failed.failures.items()))
        return OSError(f"rank {rank}: {error}")
    return failed if isinstance(failed, Exception) else OSError("rank 0 could not give it its name")


def _name(writing: _Writing) -> None:
    hashes = {path.name: file_sha256(path) for path in sorted(writing.partial.iterdir())}
    about: Mapping[str, Any] = {"values": writing.values, "state_sha256": _sha256(writing.values), "sha256": hashes}
    (writing.partial / _STATE).write_text(json.dumps(about))
    rename_durably(writing.partial, writing.path)


def _sha256(values: str) -> str:
    return hashlib.sha256(values.encode()).hexdigest()


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about its own calls
        yield
