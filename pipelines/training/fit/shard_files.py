"""The files of a sharded checkpoint: a folder with a part of each rank (torch's distributed checkpoint).

    000000007.shards/
        .metadata, __0_0.distcp, __1_0.distcp   torch's: any number of ranks in any layout reads its part
        state.json                              the JSON values, and the SHA-256 of each of torch's files

`state.json` is written last, before the folder is renamed to its final name. A folder without it, or with a file whose
hash differs, is skipped. torch's own files are partly pickled: hashes are compared before a file is opened, but anyone
who can write to the folder can run code, as with the rest of the state folder.
"""

import hashlib
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from models.errors import CheckpointError
from models.files import file_sha256
from pipelines.training.parallel.tensors import ELSEWHERE, Like

STATE_FILE = "state.json"


def read_state(folder: Path) -> dict[str, Any]:
    """Return the values after checking every file's hash. Raises CheckpointError if the checkpoint is damaged."""
    try:
        about = json.loads((folder / STATE_FILE).read_text())
        changed = [name for name, written in about["sha256"].items() if file_sha256(folder / name) != written]
        is_changed = about["state_sha256"] != state_sha256(about["values"])
        values: dict[str, Any] = json.loads(about["values"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{folder}: not readable ({error}); the previous checkpoint is used") from error
    if changed or is_changed:
        names = ", ".join(changed) or STATE_FILE
        raise CheckpointError(
            f"{folder}: the content of {names} differs from its SHA-256; the previous checkpoint is used"
        )
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
    with quiet_torch():
        load(tensors, storage_reader=reader, no_dist=not dist.is_initialized())
    return tensors, values


def state_sha256(values: str) -> str:
    return hashlib.sha256(values.encode()).hexdigest()


@contextmanager
def quiet_torch() -> Iterator[None]:
    """Suppress warnings that torch raises about its own calls."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
