"""What a fit reports while it runs: the seam between the loop and whoever logs it, shows it or sends it elsewhere (`reports/`). Knows none of them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Reporting:
    """Where a fit is reported beside its stage's files. `run` names the fit: stage, key and part; what is empty or None is left out."""

    run: str = ""
    tensorboard_dir: Path | None = None
    """TensorBoard's files go into a folder below it by the name of the fit."""
    mlflow_uri: str = ""
    """Address of an MLflow tracking server, http or https."""
    memory_snapshot_dir: Path | None = None
    """Where what the GPU's allocator did is written, a file a fit and rank."""

    def of(self, part: str) -> "Reporting":
        """Return that of one fit of several."""
        return replace(self, run=f"{self.run}/{part}")


class Watch:
    """Is called by one process's fit with what happens in it. This one does nothing."""

    def note(self, event: str, *, is_warning: bool = True, **fields: Any) -> None:
        """Take note of something that happens now and then."""

    def measured(self, step: int, values: Mapping[str, float]) -> None:
        """Take the measurements of the fit's `step`th step, by name. Steps after a return to a checkpoint come again."""


UNWATCHED = Watch()
