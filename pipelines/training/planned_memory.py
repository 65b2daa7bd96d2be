"""What the planner predicts that the steps of a fit take of one process's memory, beside what they took.

Both without the device's context and libraries: on a GPU what tensors took, by torch's allocator; on a CPU how much more was resident. The planner knows the
decoder and its batches; a teacher, the rows learned from text, sampled items and dropout's masks are not in it.
"""

from dataclasses import replace
from typing import Any, cast

import torch

from models.decoder.config import DecoderConfig
from pipelines.planner.memory import training_memory
from pipelines.planner.mesh import Checkpointing
from pipelines.planner.shapes import shape_of
from pipelines.training.fit.fitting import Fitted
from pipelines.training.fit.parallel import Group


def memory_of(
    fitted: Fitted, config: DecoderConfig, group: Group, device: torch.device, batch_tokens: int, num_parts: int
) -> dict[str, Any]:
    """Return {predicted: bytes by component, predicted_bytes, measured_bytes or None}. `batch_tokens` are those of a step of all processes, which computes them in `num_parts` parts."""
    layout = group.layout
    rows = -(-batch_tokens // (num_parts * group.accumulation * layout.data * layout.shard))
    layout = replace(layout, micro_batch=rows, checkpointing=cast("Checkpointing", group.method.recompute))
    planned = training_memory(
        shape_of(config, "decoder"),
        layout,
        length=1,  # memory follows from rows times length
        is_bf16=group.uses_bf16(device),
        fuses_norms=device.type == "cuda",
    )
    parts = {name: size for name, size in planned.parts.items() if name != "framework"}
    return {"predicted": parts, "predicted_bytes": sum(parts.values()), "measured_bytes": fitted.step_bytes}


def describe_memory(memory: dict[str, Any]) -> str:
    """Return a line: measured and predicted, by component where it counts."""
    predicted, measured = memory["predicted_bytes"], memory["measured_bytes"]
    found = "not measured here" if measured is None else f"{measured / 1e6:,.0f} MB measured"
    parts = ", ".join(
        f"{name} {size / 1e6:,.0f}" for name, size in memory["predicted"].items() if size >= 0.01 * predicted
    )
    return f"{found}, {predicted / 1e6:,.0f} MB predicted ({parts})"
