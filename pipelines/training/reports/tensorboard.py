"""TensorBoard's files of one fit, by torch's writer; requires the package `tensorboard`, the extra of the same name."""

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from torch.utils.tensorboard import SummaryWriter


class TensorBoardFiles:
    """Writes measurements as scalars, as a context manager.

    A fit that resumes from a checkpoint writes another file; its steps replace the steps of earlier files from there
    on.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: SummaryWriter | None = None
        self._last = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._writer is not None:
            self._writer.close()

    def measured(self, step: int, values: Mapping[str, float]) -> None:
        """Write one step's."""
        if self._writer is None or step < self._last:
            if self._writer is not None:
                self._writer.close()
            self._writer = SummaryWriter(self._folder, purge_step=step)
        self._last = step
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
