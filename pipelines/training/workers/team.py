"""The number of processes that fit a model, and where they start: this process, this machine, or Ray Train."""

import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pipelines.declaration import check_bounds
from pipelines.planner.mesh import ParallelLayout
from pipelines.training.options import BUCKET_MB, Compression, TeamOptions
from pipelines.training.parallel.layout import AUTO, layout_of
from services.errors import ConfigError

if TYPE_CHECKING:  # these import torch, which `--help` does not need
    from pipelines.runner.stage import Progress
    from pipelines.training.fit.checkpoints import Checkpoints
    from pipelines.training.parallel.mesh import Mesh, Method

_CONNECT_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Team(TeamOptions):
    """`workers` processes in the layout `parallel`.

    A process that does not answer within `timeout_s` is terminated, and all restart from the last checkpoint.
    """

    def __post_init__(self) -> None:
        """Reject options that cannot be started. Raises ConfigError naming the option."""
        check_bounds(self)
        layout = layout_of(self.parallel, self.workers)
        if self._is_tuned and layout.shard * layout.tensor > 1:
            raise ConfigError(
                f"--compression: --parallel {self.parallel} does not average gradients with DDP; "
                "omit --compression and --bucket-mb, or give --parallel ddp"
            )

    def notes(self, num_cores: int, num_gpus: int) -> list[str]:
        """Return a sentence for each option that has no effect or another effect here."""
        notes = []
        if self.workers == 1 and self.parallel != AUTO:
            notes.append(f"--parallel {self.parallel}: one worker has the whole model; --workers 2 or more divide it")
        if self.workers == 1 and self.ray:
            notes.append(f"--ray {self.ray}: one worker runs in this process, without Ray; give --workers 2 or more")
        if not self.ray and num_gpus < self.workers and self.workers > num_cores:
            notes.append(
                f"--workers {self.workers}: {num_cores} cores here, so the workers take turns; this is slower "
                f"than {num_cores}"
            )
        return notes

    def check_ray(self) -> None:
        """Raise ConfigError at once if nothing listens at the cluster's address; Ray itself would wait."""
        host, _, port = self.ray.removeprefix("ray://").rpartition(":")
        if self.workers == 1 or not host or not port.isdigit():
            return
        try:
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"--ray: no Ray cluster at {self.ray} ({error}); start it with `ray start --head`, or give --ray local"
            ) from error

    @property
    def layout(self) -> ParallelLayout:
        return layout_of(self.parallel, self.workers)

    @property
    def is_free(self) -> bool:
        """Whether the planner chooses the layout of several workers: unless options of DDP are given."""
        return self.workers > 1 and self.parallel == AUTO and not self._is_tuned

    @property
    def _is_tuned(self) -> bool:
        return (self.bucket_mb, self.compression) != (BUCKET_MB, Compression.NONE)

    @property
    def of_student(self) -> "Team":
        """The team for a small model without a table of products to shard."""
        return replace(self, parallel=AUTO)

    @property
    def method(self) -> "Method":
        """How a step is computed."""
        from pipelines.training.parallel.mesh import Method

        return Method(
            is_bf16=None if self.precision == AUTO else self.precision == "bf16",
            recompute=self.recompute,
            bucket_mb=self.bucket_mb,
            compression=self.compression,
        )

    @property
    def mesh(self) -> "Mesh":
        """The mesh of the workers, from its first rank."""
        from pipelines.training.parallel.mesh import Mesh

        return Mesh(layout=self.layout, timeout_s=self.timeout_s, method=self.method)

    def fit(
        self,
        work: Callable[..., Any],
        checkpoints: "Checkpoints",
        progress: "Progress",
        needs: Callable[[int], str] | None = None,
    ) -> Any:
        """Return the result of `work(progress=..., mesh=...)`, run here or in each process; rank 0's result counts.

        It is pickled if there are several processes. `needs` describes the predicted memory of steps with a factor on
        the number of parts of a batch. Raises its TailraceErrors, or StageFailed.
        """
        if self.workers == 1:
            return work(progress=progress, mesh=self.mesh)
        from pipelines.training.reports.watched import ended_where_left

        with ended_where_left(checkpoints):
            if self.ray:
                self.check_ray()
                from pipelines.training.workers.on_ray import fit_on_ray

                return fit_on_ray(work, self.ray, self.mesh, checkpoints, progress, needs)
            from pipelines.training.workers.local import fit_locally

            return fit_locally(work, self.mesh, checkpoints, progress, needs)


ONE = Team()
