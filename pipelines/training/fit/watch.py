"""Events and measurements that a fit reports while it runs: the interface between the loop and `reports/`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Reporting:
    """Where a fit is reported, in addition to its stage's files. `run` names the fit: stage, key and part.

    Empty fields are omitted.
    """

    run: str = ""
    tensorboard_dir: Path | None = None
    """Parent folder of TensorBoard's files; each fit has a subfolder of its name."""
    mlflow_uri: str = ""
    """Address of an MLflow tracking server, http or https."""
    memory_snapshot_dir: Path | None = None
    """Folder for the GPU allocator's history, one file per fit and rank."""

    def of(self, part: str) -> "Reporting":
        """Return the reporting of one of several fits."""
        return replace(self, run=f"{self.run}/{part}")


class Watch:
    """Receives the events of one process's fit. This base class does nothing."""

    def note(self, event: str, *, is_warning: bool = True, **fields: Any) -> None:
        """Handle an occasional event."""

    def measured(self, step: int, values: Mapping[str, float]) -> None:
        """Record the measurements of step `step` by name. Steps after a return to a checkpoint are reported again."""


UNWATCHED = Watch()
