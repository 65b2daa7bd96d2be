"""A layout of a training over GPUs, as one mesh (pipeline, data, shard, tensor) with what each GPU computes at a time. Pure arithmetic.

Tensor is innermost: its group lies within a node. Shard is fully sharded data parallelism (FSDP2), data replicates, and both take batches of their own.
"""

from dataclasses import dataclass
from typing import Literal

Checkpointing = Literal["none", "selective", "full"]
"""What the forward pass keeps: everything, the products and attention alone, or each layer's input alone."""

MICRO_BATCHES = 4
"""The most of them that this trainer sends through a pipeline at once, for each stage: it idles at most a quarter of the ideal time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How one training is laid out. A step's batch has `data * shard * micro_batch * accumulation` rows."""

    data: int = 1
    shard: int = 1
    tensor: int = 1
    pipeline: int = 1
    micro_batch: int = 1
    """Rows that a GPU computes at a time."""
    accumulation: int = 1
    """Micro-batches of a step, whose gradients add up; a pipeline has them on their way one behind another."""
    checkpointing: Checkpointing = "none"

    @property
    def num_gpus(self) -> int:
        """GPUs of the whole mesh."""
        return self.data * self.shard * self.tensor * self.pipeline

    @property
    def batch(self) -> int:
        """Rows of one step."""
        return self.data * self.shard * self.micro_batch * self.accumulation

    @property
    def name(self) -> str:
        """The layout in the field's words, such as FSDP2 8 x TP 2."""
        parts = [
            f"{word} {size}"
            for word, size in (
                ("PP", self.pipeline),
                ("DDP", self.data),
                ("FSDP2", self.shard),
                ("TP", self.tensor),
            )
            if size > 1
        ]
        return " x ".join(parts) or "one GPU"

    def spans(self) -> dict[str, int]:
        """Return by dimension how many neighbouring GPUs one of its groups lies over."""
        shard = self.tensor * self.shard
        data = shard * self.data
        return {"tensor": self.tensor, "shard": shard, "data": data, "pipeline": data * self.pipeline}


def bubble_of_ideal(stages: int, micro_batches: int) -> float:
    """Return the idle time of a 1F1B pipeline as a share of the time without idling: (P - 1) / M (Narayanan et al. 2021)."""
    return (stages - 1) / micro_batches


def bubble_of_step(stages: int, micro_batches: int) -> float:
    """Return the same idle time as a share of the whole step: (P - 1) / (M + P - 1)."""
    return (stages - 1) / (micro_batches + stages - 1)
