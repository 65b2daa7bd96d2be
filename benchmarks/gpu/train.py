"""Training on this device by the trainer's own loop, compared with the planner's figures.

    python -m benchmarks.gpu.train cuda OUT [--tiny]

Tokens/s, MFU and memory of a decoder in bf16, by kind of recomputation. Items are drawn at random, one token each: only
sizes matter. `plan` is the planner's step for the same layout, null for a device unknown to it, as any CPU;
`planned_layout` is the layout that it would choose for this batch.
"""

import argparse
import math
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from benchmarks.engine.shapes import SHAPES, random_decoder
from benchmarks.load.command import write_report
from benchmarks.scale.row import catalogue_of
from models.catalogue import BOS_TOKEN, NUM_SPECIAL_TOKENS
from models.decoder.decoder import Decoder
from pipelines.planner.devices import Gpus, device_of_driver
from pipelines.planner.layouts import plan_training
from pipelines.planner.mesh import Checkpointing, ParallelLayout
from pipelines.planner.shapes import shape_of
from pipelines.planner.step_time import step_time
from pipelines.runner.stage import silent
from pipelines.scoring.dense import hidden_states
from pipelines.training.batches import IGNORED, Batch, Loss, batch_windows
from pipelines.training.fit.checkpoints import Checkpoints
from pipelines.training.fit.descent import DescentOptions
from pipelines.training.fit.fitting import FitOptions, Fitted, Task, fit
from pipelines.training.parallel.mesh import Mesh, Method
from pipelines.training.planned_memory import describe_memory, memory_of
from pipelines.training.speed import speed_of, training_flops
from pipelines.training.target.positions import position_loss

RECOMPUTE: tuple[Checkpointing, ...] = ("none", "selective", "full")
_DESCENT = DescentOptions(learning_rate=1e-3, weight_decay=0.1, warm_up=0.5, average=0.99)


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A decoder's shape, the rows of a step and their tokens, the micro-batches of a step, and the number of steps."""

    shape: str
    rows: int
    length: int
    parts: int
    steps: int


FULL, TINY = TrainedModel("smollm2-135m", 16, 1_024, 2, 10), TrainedModel("tiny", 4, 32, 2, 2)


def main() -> None:
    """Train with each kind of recomputation, write the figures after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", choices=["cpu", "cuda"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    device, sizes = torch.device(options.device), TINY if options.tiny else FULL
    report: dict[str, Any] = {"shape": sizes.shape, "batch_tokens": sizes.rows * sizes.length, "rows": []}
    gpu = device_of_driver(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    shape = shape_of(SHAPES[sizes.shape], sizes.shape)
    if gpu is not None:
        best = plan_training(shape, Gpus(gpu, 1), sizes.rows, sizes.length).best
        report["planned_layout"] = [[planned.layout.micro_batch, planned.layout.checkpointing] for planned in best]
    _trained(replace(sizes, steps=2), device, "none")  # loading and compilation at first use
    for recompute in RECOMPUTE:
        report["rows"].append(_row(sizes, device, recompute))
        if gpu is not None:
            rows, parts = sizes.rows // sizes.parts, sizes.parts
            layout = ParallelLayout(micro_batch=rows, accumulation=parts, checkpointing=recompute)
            plan = step_time(shape, layout, sizes.length, Gpus(gpu, 1))
            report["rows"][-1]["plan"] = {"step_s": plan.total_s, "low_s": plan.low_s, "high_s": plan.high_s}
        write_report(options.out, report)
        row = report["rows"][-1]
        print(recompute, {name: value for name, value in row.items() if name != "memory"})
        print(f"  memory: {describe_memory(row['memory'])}", flush=True)


def _row(sizes: TrainedModel, device: torch.device, recompute: str) -> dict[str, Any]:
    fitted, decoder, mesh = _trained(sizes, device, recompute)
    speed = speed_of(fitted.num_tokens, fitted.flops, fitted.seconds, device, mesh)
    memory = memory_of(fitted, decoder.config, mesh, device, sizes.rows * sizes.length, sizes.parts)
    return {
        "recompute": recompute,
        "step_s": fitted.seconds / sizes.steps,
        "last_loss": fitted.curve[-1]["loss"],
        **speed,
        "memory": memory,
        "plan": None,
    }


def _trained(sizes: TrainedModel, device: torch.device, recompute: str) -> tuple[Fitted, Decoder, Mesh]:
    """Fit a decoder with fresh weights for these steps, in bf16 under fp32 weights."""
    decoder = random_decoder(sizes.shape, torch.float32, device)
    num_items = decoder.config.vocab_size - NUM_SPECIAL_TOKENS
    catalogue = catalogue_of(num_items)
    draw = np.random.default_rng(0)
    windows = [draw.integers(0, num_items, sizes.length) for _ in range(sizes.rows * sizes.steps)]
    mesh = Mesh(method=Method(is_bf16=True, recompute=recompute))
    task = Task(
        batches=lambda: batch_windows(windows, catalogue, sizes.rows * sizes.length, draw),
        rng=draw,
        loss=_loss,
        validate=lambda: 0.0,
        uniform_loss=math.log(num_items),
        flops=partial(_flops, decoder),
    )
    options = FitOptions(epochs=1, validate_every=1, descent=_DESCENT, num_parts=sizes.parts)
    with TemporaryDirectory() as folder:
        fitted = fit(decoder, task, options, Checkpoints(Path(folder), "train", 3_600.0), silent, mesh=mesh)
    return fitted, decoder, mesh


def _loss(model: nn.Module, batch: Batch) -> Loss:
    decoder = cast("Decoder", model)
    hidden_BLD = hidden_states(decoder, batch.tokens).view(*batch.tokens.shape, -1)
    items_BL = torch.where(batch.labels == IGNORED, IGNORED, batch.labels - NUM_SPECIAL_TOKENS)
    return position_loss(hidden_BLD, decoder.head_weight_VD[BOS_TOKEN + 1 :], items_BL, batch.is_label, mask_seen=False)


def _flops(decoder: Decoder, batch: Batch, num_labels: int) -> int:
    return training_flops(decoder.config, batch.lengths, num_labels * (decoder.config.vocab_size - NUM_SPECIAL_TOKENS))


if __name__ == "__main__":
    main()
