"""Watches one fit: logs its events, and forwards its measurements to the configured sinks."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import structlog
import torch

from pipelines.training.fit.checkpoints import Checkpoints
from pipelines.training.fit.watch import UNWATCHED, Watch
from pipelines.training.options import Reporting
from pipelines.training.parallel.mesh import Mesh
from services.errors import ConfigError

_MAX_ENTRIES = 100_000
"""Maximum number of recorded allocations and frees: a few steps of a large model."""


@contextmanager
def recorded_memory(path: Path, device: torch.device) -> Iterator[None]:
    """Record the allocator's history inside this block, and write it at its end, even after running out of memory.

    For https://pytorch.org/memory_viz: allocations with their stacks, and the memory held at the end.
    """
    torch.cuda.memory._record_memory_history(
        max_entries=_MAX_ENTRIES, device=device
    )  # torch documents both under these names
    try:
        yield
    finally:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
        torch.cuda.memory._record_memory_history(enabled=None, device=device)


log = structlog.get_logger()


class Sink(Protocol):
    """Receives the measurements of one fit, by step and name."""

    def measured(self, step: int, values: Mapping[str, float]) -> None:
        """Record the measurements of one step. Does not raise or block."""


class LoggedFit(Watch):
    """Logs events and forwards measurements."""

    def __init__(self, sinks: Sequence[Sink] = ()) -> None:
        self._sinks = sinks

    def note(self, event: str, *, is_warning: bool = True, **fields: Any) -> None:
        (log.warning if is_warning else log.info)(event, **fields)

    def measured(self, step: int, values: Mapping[str, float]) -> None:
        for sink in self._sinks:
            sink.measured(step, values)


@contextmanager
def watched(
    checkpoints: Checkpoints, parameters: Mapping[str, Any], device: torch.device, mesh: Mesh
) -> Iterator[Watch]:
    """Return the context that reports one process's fit as configured in its checkpoints' `reporting`.

    Rank 0 reports, except that each GPU reports its memory. `parameters` may be nested; they are reported with the
    fit's layout.
    """
    reporting = checkpoints.reporting
    with ExitStack() as stack:
        if reporting.memory_snapshot_dir is not None:
            name = f"{reporting.run.replace('/', '-')}-rank-{mesh.rank}.pickle"
            stack.enter_context(recorded_memory(reporting.memory_snapshot_dir / name, device))
        if not mesh.is_main:
            yield UNWATCHED
            return
        sinks: list[Sink] = []
        if reporting.tensorboard_dir is not None:
            from pipelines.training.reports.tensorboard import TensorBoardFiles

            sinks.append(stack.enter_context(TensorBoardFiles(reporting.tensorboard_dir / reporting.run)))
        if reporting.mlflow_uri:
            from pipelines.training.reports.mlflow import MlflowRun

            laid_out = {"workers": mesh.world_size, "device": device.type, "recompute": mesh.method.recompute}
            laid_out["precision"] = "bf16" if mesh.method.uses_bf16(device) else "fp32"
            described = flat(parameters) | {name: str(value) for name, value in laid_out.items()}
            run = MlflowRun(reporting.mlflow_uri, reporting.run, described, checkpoints.folder)
            sinks.append(stack.enter_context(run))
        yield LoggedFit(sinks)


@contextmanager
def ended_where_left(checkpoints: Checkpoints) -> Iterator[None]:
    """Return the context of a fit over several processes. It reports the end of processes that were terminated."""
    try:
        yield
    except BaseException as error:
        if checkpoints.reporting.mlflow_uri:
            from pipelines.training.reports.mlflow import end_left_run

            end_left_run(checkpoints.folder, is_interrupted=not isinstance(error, Exception))
        raise


def refuse_unreportable(reporting: Reporting, device: torch.device) -> None:
    """Raise ConfigError naming the option and the fix for a report that is unavailable here."""
    if reporting.tensorboard_dir is not None and find_spec("tensorboard") is None:
        raise ConfigError(
            "--tensorboard: its files need the package tensorboard; run pip install 'tailrace[tensorboard]', "
            "or leave the option out"
        )
    if reporting.mlflow_uri and not reporting.mlflow_uri.startswith(("http://", "https://")):
        raise ConfigError(
            f"--mlflow (MLFLOW_TRACKING_URI): {reporting.mlflow_uri!r} is no tracking server; "
            "give its address, such as http://127.0.0.1:5000, or --mlflow ''"
        )
    if reporting.memory_snapshot_dir is not None and device.type != "cuda":
        raise ConfigError(
            f"--memory-snapshot: torch records a GPU's allocations, and this training is on the {device.type}; "
            "leave the option out, or train with --device cuda"
        )


def flat(parameters: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return nested parameters by their names joined with dots."""
    flattened: dict[str, str] = {}
    for name, value in parameters.items():
        flattened |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": str(value)}
    return flattened
