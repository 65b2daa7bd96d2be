"""The planner's predicted memory of a fit's steps in one process, next to the measured memory.

Both exclude the device's context and libraries: on a GPU the memory of tensors by torch's allocator, on a CPU the
growth of resident memory. The planner knows the decoder and its batches; the prediction excludes a teacher, rows
learned from text, sampled items and dropout masks.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch

from models.decoder.config import DecoderConfig
from pipelines.planner.memory import training_memory
from pipelines.planner.mesh import Checkpointing, ParallelLayout
from pipelines.planner.shapes import shape_of
from pipelines.training.fit.fitting import Fitted
from pipelines.training.parallel.mesh import Mesh


def memory_of(
    fitted: Fitted, config: DecoderConfig, mesh: Mesh, device: torch.device, batch_tokens: int, num_parts: int
) -> dict[str, Any]:
    """Return {predicted: bytes by component, predicted_bytes, measured_bytes or None}.

    `batch_tokens` counts the tokens of a step over all processes, which compute them in `num_parts` parts.
    """
    parts = predicted_parts(
        config,
        mesh.layout,
        mesh.method.recompute,
        batch_tokens,
        num_parts * mesh.method.accumulation,
        is_bf16=mesh.method.uses_bf16(device),
        is_gpu=device.type == "cuda",
    )
    return {"predicted": parts, "predicted_bytes": sum(parts.values()), "measured_bytes": fitted.step_bytes}


def predicted_parts(
    config: DecoderConfig,
    layout: ParallelLayout,
    recompute: str,
    batch_tokens: int,
    num_parts: int,
    *,
    is_bf16: bool,
    is_gpu: bool,
) -> dict[str, float]:
    """Return the predicted bytes of one process's steps by component.

    `batch_tokens` counts the tokens of a step over all processes, in `num_parts` sequential parts.
    """
    rows = -(-batch_tokens // (num_parts * layout.data * layout.shard * layout.accumulation))
    planned = training_memory(
        shape_of(config, "decoder"),
        replace(layout, micro_batch=rows, checkpointing=cast("Checkpointing", recompute)),
        length=1,  # memory depends on rows times length
        is_bf16=is_bf16,
        fuses_norms=is_gpu,
    )
    return {name: size for name, size in planned.parts.items() if name != "framework"}


def describe_parts(parts: Mapping[str, float]) -> str:
    """Return the sum and its main components, the largest first."""
    total = sum(parts.values())
    large = sorted(((size, name) for name, size in parts.items() if size >= 0.01 * total), reverse=True)
    return f"{total / 1e6:,.0f} MB predicted ({', '.join(f'{name} {size / 1e6:,.0f}' for size, name in large)})"


def describe_memory(memory: dict[str, Any]) -> str:
    """Return a line: measured and predicted memory, with the main components."""
    measured = memory["measured_bytes"]
    measurement = "not measured here" if measured is None else f"{measured / 1e6:,.0f} MB measured"
    return f"{measurement}, {describe_parts(memory['predicted'])}"
