"""Steps of a text checkpoint as a decoder, in any layout: losses, tokens per second, shares of time, memory.

All of its layers are trained; its vocabulary becomes the items'. Module-level, since ranks are spawned.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from models.catalogue import load_catalogue
from models.decoder.decoder import Decoder
from pipelines.data.examples import read_labelled_sequences
from pipelines.runner.stage import Progress
from pipelines.training.batches import Batch, Loss, batch_windows, cut_windows
from pipelines.training.fit.checkpoints import Checkpoints
from pipelines.training.fit.descent import DescentOptions
from pipelines.training.fit.fitting import FitOptions, Task, fit
from pipelines.training.parallel.mesh import Mesh
from pipelines.training.speed import speed_of, training_flops
from pipelines.training.train_decoder import TrainOptions, first_decoder, next_token_loss

_STEPS_TOGETHER = 5
"""The step whose mean loss is recorded."""
_CPU = torch.device("cpu")
_DESCENT = DescentOptions(learning_rate=1e-5, weight_decay=0.1, warm_up=0.1, average=0.9)


@dataclass(frozen=True, slots=True)
class TextSteps:
    """The training job: a checkpoint's folder, the items' tokens, the number of steps and of positions per step.

    `moved_by` is the relative size of random perturbations of the initial weights: it shows how rounding differences
    grow.
    """

    checkpoint: Path
    tokenized: Path
    num_steps: int
    batch_tokens: int
    max_items: int
    moved_by: float = 0.0


def precision_here() -> str:
    """Return bf16 if the processor multiplies bf16 matrices (AMX), else fp32."""
    flags = Path("/proc/cpuinfo")
    return "bf16" if flags.exists() and "amx_bf16" in flags.read_text() else "fp32"


def do_steps(steps: TextSteps, checkpoints: Checkpoints, *, progress: Progress, mesh: Mesh) -> dict[str, Any]:
    """Run the steps as one process of a mesh."""
    catalogue = load_catalogue(steps.tokenized / "catalogue.parquet")
    sequences = read_labelled_sequences(steps.tokenized)
    options = TrainOptions(text_start=str(steps.checkpoint), max_items=steps.max_items)
    decoder = first_decoder(steps.tokenized, catalogue, options)
    rng = np.random.default_rng(0)
    with torch.no_grad():
        for parameter in decoder.parameters() if steps.moved_by else ():
            parameter.mul_(1 + steps.moved_by * torch.randn_like(parameter))

    def batches() -> list[Callable[[], Batch]]:
        windows = cut_windows(sequences, steps.max_items, rng)
        return batch_windows(windows, catalogue, steps.batch_tokens, rng)[:_STEPS_TOGETHER]

    def loss(model: nn.Module, batch: Batch) -> Loss:
        return next_token_loss(cast("Decoder", model), catalogue, batch, mask_seen=True)

    def flops(batch: Batch, num_labels: int) -> int:
        return training_flops(decoder.config, batch.lengths, num_labels * catalogue.level_sizes[0])

    task = Task(
        batches=batches,
        rng=rng,
        loss=loss,
        validate=lambda: 0.0,
        uniform_loss=np.log(catalogue.vocab_size),
        flops=flops,
    )
    together = FitOptions(epochs=-(-steps.num_steps // _STEPS_TOGETHER), validate_every=1, descent=_DESCENT)
    fitted = fit(decoder, task, together, checkpoints, progress, None, mesh)
    times = {name: spent for name, spent in fitted.times.items() if name not in {"validation", "checkpoint"}}
    return {
        "num_parameters": sum(parameter.numel() for parameter in decoder.parameters()),
        "steps": len(fitted.curve) * _STEPS_TOGETHER,
        "losses": [point["loss"] for point in fitted.curve],
        "seconds_of_steps": fitted.seconds,
        "shares_of_time": {name: spent / sum(times.values()) for name, spent in times.items()},
        "load_average": os.getloadavg()[0],
        **speed_of(fitted.num_tokens, fitted.flops, fitted.seconds, _CPU, mesh),
    }
