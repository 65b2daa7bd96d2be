"""A GPU allocator's history during a fit, for https://pytorch.org/memory_viz.

It holds allocations with their stacks, and the memory held at the end.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_MAX_ENTRIES = 100_000
"""Maximum number of recorded allocations and frees: a few steps of a large model."""


@contextmanager
def recorded_memory(path: Path, device: torch.device) -> Iterator[None]:
    """Record inside this block and write the snapshot at its end, even after running out of memory."""
    torch.cuda.memory._record_memory_history(
        max_entries=_MAX_ENTRIES, device=device
    )  # torch documents both under these names
    try:
        yield
    finally:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
        torch.cuda.memory._record_memory_history(enabled=None, device=device)
