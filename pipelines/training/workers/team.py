"""Over how many processes a model is fitted, and who starts them: nobody for one, this process for those of one machine."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pipelines.runner.stage import Progress
from pipelines.training.fit.checkpoints import Checkpoints
from pipelines.training.fit.parallel import ALONE
from services.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    """`workers` processes; one that does not answer the others for `timeout_s` is ended, and all begin again at the last checkpoint."""

    workers: int = 1
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        """Refuse what cannot be started. Raises ConfigError naming the option."""
        if self.workers < 1:
            raise ConfigError(f"--workers: {self.workers} processes fit nothing; give 1 or more")
        if not self.timeout_s > 0:
            raise ConfigError(
                f"--worker-timeout-s: {self.timeout_s} is no time; give a number of seconds above that of one step"
            )

    def fit(self, work: Callable[..., Any], checkpoints: Checkpoints, progress: Progress) -> Any:
        """Return what `work(progress=..., group=...)` returns, called here or in each of the processes, of which rank 0's counts. It is pickled if there are several.

        Raises what it raises of TailraceError, or StageFailed.
        """
        if self.workers == 1:
            return work(progress=progress, group=ALONE)
        from pipelines.training.workers.local import fit_locally

        return fit_locally(work, self, checkpoints, progress)


ONE = Team()
