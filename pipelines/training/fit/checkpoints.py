"""Saves the complete state of an unfinished fit, so that a killed run resumes where it stopped.

A checkpoint is one file: tensors as safetensors, JSON values in its header, with the SHA-256 of both next to it. Never
pickle. A file is flushed before it is renamed, so a kill or a full disk leaves the previous checkpoint intact; the
newest two are kept, and a damaged one is skipped. If no process has the whole state, a checkpoint is a folder
(`shard_files.py`, `shard_writer.py`). `fitting.py` defines the state.
"""

import hashlib
import json
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from models.files import rename_durably
from pipelines.training.fit.watch import UNWATCHED, Watch
from pipelines.training.options import Reporting
from pipelines.training.parallel.tensors import Like, nothing_alike
from services.errors import CheckpointError, StageFailed

_NUM_KEPT = 2
_SUFFIX, PARTIAL = ".safetensors", ".partial"
FOLDER_SUFFIX = ".shards"


@dataclass(frozen=True, slots=True)
class FitState:
    """Saved state of a fit: tensors by name, and JSON values."""

    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any]


class Checkpoints:
    """Checkpoints of one fit in its folder, written every `every_s` seconds.

    `stage` names the stage in errors; `reporting` says where the fit is reported.
    """

    def __init__(self, folder: Path, stage: str, every_s: float, reporting: Reporting | None = None) -> None:
        self.folder, self.stage, self._every_s = folder, stage, every_s
        self.reporting = reporting or Reporting(run=stage)
        self._saved_at_s = time.monotonic()

    def of(self, part: str) -> "Checkpoints":
        return Checkpoints(self.folder / part, self.stage, self._every_s, self.reporting.of(part))

    def is_due(self) -> bool:
        return time.monotonic() - self._saved_at_s >= self._every_s

    def next_path(self) -> Path:
        """Return the path of the next checkpoint without its suffix; create its folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        number = max((int(path.stem) for path in self._files()), default=0) + 1
        return self.folder / f"{number:09d}"

    def note_saved(self) -> None:
        """Restart the interval until the next checkpoint."""
        self._saved_at_s = time.monotonic()

    def prune(self) -> None:
        """Remove all but the newest two checkpoints."""
        for old in self._files()[_NUM_KEPT:]:
            shutil.rmtree(old) if old.is_dir() else old.unlink()

    def discard_partial(self) -> None:
        """Remove partial checkpoints of a killed process: a file, or a folder of rank files."""
        for left in self.folder.glob(f"*{PARTIAL}"):
            shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)

    def save(self, state: FitState) -> None:
        """Write a checkpoint durably and remove all but the newest two. Raises StageFailed, keeping the older files."""
        path = self.next_path().with_suffix(_SUFFIX)
        partial = path.with_suffix(PARTIAL)
        try:
            self.discard_partial()
            _write(state, partial)
            rename_durably(partial, path)
        except (OSError, SafetensorError) as error:
            with suppress(OSError):
                self.discard_partial()
            raise self.not_written(path, error) from error
        self.prune()
        self.note_saved()

    def newest_name(self) -> str | None:
        """Return the name of the newest checkpoint, intact or not; None if there is none."""
        return next((path.name for path in self._files()), None)

    def newest_whole_name(self) -> str | None:
        """Return the name of the newest checkpoint that can be read; None if the fit starts from scratch."""
        for path in self._files():
            with suppress(CheckpointError):
                if path.is_dir():
                    from pipelines.training.fit.shard_files import read_state

                    read_state(path)
                else:
                    _read(path)
                return path.name
        return None

    def newest(self, like: Like = nothing_alike, watch: Watch = UNWATCHED) -> FitState | None:
        """Return the newest intact checkpoint; None if there is none. Damaged ones are reported to `watch`.

        Tensors of a folder are read in the layout that `like` returns for their names; all processes must call this.
        """
        for path in self._files():
            try:
                if path.is_dir():
                    from pipelines.training.fit.shard_files import read_shards

                    return FitState(*read_shards(path, like))
                return _read(path)
            except CheckpointError as error:
                watch.note("checkpoint_refused", stage=self.stage, why=str(error))
        return None

    def _files(self) -> list[Path]:
        suffixes = (_SUFFIX, FOLDER_SUFFIX)
        paths = [path for suffix in suffixes for path in self.folder.glob(f"*{suffix}") if path.stem.isdigit()]
        return sorted(paths, key=lambda path: path.stem, reverse=True)

    def not_written(self, path: Path, error: Exception) -> StageFailed:
        """Return the error for a checkpoint that cannot be written."""
        kept = self.newest_whole_name()
        last = f"the next run resumes from {kept}" if kept else "the next run starts over"
        why = f"the checkpoint {path} cannot be written ({error}); free space on that disk and run again: {last}"
        return StageFailed(self.stage, why)


def _write(state: FitState, path: Path) -> None:
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.tensors.items()}
    values = json.dumps(state.values)
    save_file(tensors, path, metadata={"values": values, "sha256": _sha256(tensors, values)})


def _read(path: Path) -> FitState:
    """Read a checkpoint onto the CPU. Raises CheckpointError if it is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path}: not readable as safetensors ({error}); the previous checkpoint is used"
        ) from error
    if about.get("sha256") != _sha256(tensors, about.get("values", "")):
        raise CheckpointError(f"{path}: its content differs from its SHA-256; the previous checkpoint is used")
    return FitState(tensors, json.loads(about["values"]))


def _sha256(tensors: Mapping[str, Tensor], values: str) -> str:
    digest = hashlib.sha256(values.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
