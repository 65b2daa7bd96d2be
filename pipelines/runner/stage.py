"""Runs a stage of the offline pipeline: skip it if done, write to a scratch folder, rename it into place.

A stage's output is `<root>/<stage>/<key>/`, where the key is a hash of the stage's parameters, of its inputs' keys and
of the source files that it imports. Equal keys mean equal outputs: a finished folder is reused, and an unfinished
folder is never visible, because the rename is the last step. The most recently used outputs of a stage are kept and
older outputs removed; nightly runs would fill the disk otherwise. A long stage keeps checkpoints in a separate folder,
which survives a kill or an error for the next run with the same key; a finished run removes it. An output that a
tenant's training used is marked by an empty file beside it, which outlives kills: the tenant's deletion removes it. One
run at a time works in a folder (`pipelines.runner.run_lock`). This file does not know what any stage does.
"""

import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from models.files import file_sha256, rename_if_absent

Progress = Callable[[int, int, str], None]
"""Called with the amount done, the total, and a few words of detail."""
_TENANT_MARK = ".tenant-"
_NUM_KEPT = 5
"""Outputs of a stage that are kept in addition to this run's: enough to return to the previous experiments."""


@dataclass(frozen=True, slots=True)
class StageOutput:
    """One finished stage: its folder, its content key, and the seconds that this run took to make it, if it did."""

    stage: str
    key: str
    path: Path
    skipped: bool
    seconds: float


class StageCache:
    """The folder of stage outputs, by stage and key."""

    def __init__(self, root: Path, tenant: str = "") -> None:
        """`tenant` is the tenant whose model is trained, if any."""
        self._root, self._tenant = root, tenant
        self._given: set[Path] = set()

    def run(self, stage: str, key: str, work: Callable[[Path], None]) -> StageOutput:
        """Return the output with this key; when it does not exist, let `work` fill a scratch folder and rename that."""
        target = self._root / stage / key
        self._given.add(target)
        if self._tenant:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.with_name(f".{key}{_TENANT_MARK}{self._tenant}").touch()
        if target.exists():
            os.utime(target)  # it counts as new as its last use
            return StageOutput(stage, key, target, skipped=True, seconds=0.0)
        scratch = self._root / stage / f".{key}.{os.getpid()}"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        began = time.perf_counter()
        try:
            work(scratch)
            rename_if_absent(scratch, target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        self._prune(stage)
        return StageOutput(stage, key, target, skipped=False, seconds=time.perf_counter() - began)

    def checkpoint_dir(self, stage: str, key: str) -> Path:
        """Return the checkpoint folder of the work with this key. It may not exist."""
        return self._root / stage / f".{key}.checkpoints"

    def _prune(self, stage: str) -> None:
        """Remove the least recently used outputs, and what killed runs left: scratch folders and checkpoints."""
        folders = [path for path in (self._root / stage).iterdir() if path.is_dir() and path not in self._given]
        finished = sorted((path for path in folders if path.name[0] != "."), key=lambda path: path.stat().st_mtime)
        for path in {*folders} - {*finished[-_NUM_KEPT:]}:
            shutil.rmtree(path, ignore_errors=True)
            for mark in path.parent.glob(f".{path.name}{_TENANT_MARK}*"):
                mark.unlink(missing_ok=True)


def remove_outputs_of(root: Path, tenant: str) -> None:
    """Remove the outputs that a tenant's trainings used, their checkpoints and what killed runs left.

    The caller holds the folder's lock. Raises OSError.
    """
    for mark in sorted(root.glob(f"*/.*{_TENANT_MARK}{tenant}")):
        key = mark.name[1:].removesuffix(f"{_TENANT_MARK}{tenant}")
        for path in mark.parent.iterdir():
            if path.is_dir() and (path.name == key or path.name.startswith(f".{key}.")):
                shutil.rmtree(path)
        mark.unlink()  # last: a removal that was killed is repeated


def content_key(parameters: Mapping[str, Any], inputs: Sequence[str] = (), code: Sequence[ModuleType] = ()) -> str:
    """Hash parameters (JSON values), the ordered keys of inputs, and the sources of these modules to 16 hex digits.

    What a module uses of `pipelines` and `models` counts as its source, too.
    """
    digest = hashlib.sha256(json.dumps(parameters, sort_keys=True, default=str).encode())
    for part in inputs:
        digest.update(part.encode() + b"\0")
    for module in sources(code):
        digest.update(file_sha256(Path(str(module.__file__))).encode())
    return digest.hexdigest()[:16]


def sources(code: Sequence[ModuleType]) -> list[ModuleType]:
    """Return these modules and the modules of `pipelines` and `models` that they import, transitively, by name."""
    modules: dict[str, ModuleType] = {}
    waiting = list(code)
    while waiting:
        module = waiting.pop()
        if module.__name__ not in modules:
            modules[module.__name__] = module
            waiting += _used(module)
    return [modules[name] for name in sorted(modules)]


def _used(module: ModuleType) -> list[ModuleType]:
    held = vars(module).values()
    names = {
        value.__name__ if isinstance(value, ModuleType) else str(getattr(value, "__module__", "")) for value in held
    }
    return [sys.modules[name] for name in names if name.startswith(("pipelines.", "models.")) and name in sys.modules]


def silent(_done: int, _total: int, _words: str) -> None:
    """Report no progress: a Progress that does nothing."""
