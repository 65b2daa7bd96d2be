"""A layout of a training over GPUs, as one mesh (pipeline, data, shard, tensor). Pure arithmetic.

Tensor is innermost: its group lies within a node. Shard is fully sharded data parallelism (FSDP2), data replicates;
both take different batches.
"""

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from models.errors import InvalidRequest
from pipelines.declaration import Option, check_bounds

Checkpointing = Literal["none", "selective", "full"]
"""Activations that the forward pass keeps: all, the results of products and attention, or each layer's input."""

MAX_VIRTUAL_STAGES = 64
MICRO_BATCHES = 4
"""Maximal number of micro-batches in flight per stage: the pipeline then idles at most a quarter of the ideal time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """How a trainer executes a layout. Defaults are this trainer's; other trainers' techniques are for comparison."""

    sequence_parallel: Annotated[
        bool, Option("TP splits norms and the residual stream by tokens.", names=("--sequence-parallel",))
    ] = False
    """Korthikanti et al. 2022."""
    vocab_parallel: Annotated[bool, Option("TP splits embedding and head.", names=("--vocab-parallel",))] = False
    async_tp: Annotated[bool, Option("TP's collectives overlap with products.", names=("--async-tp",))] = False
    keep_gathered: Annotated[
        bool,
        Option("FSDP gathers weights and reduces gradients once per step.", names=("--keep-gathered",)),
    ] = False
    """Not per micro-batch, as torchtitan does under pipelines."""
    virtual_stages: Annotated[
        int,
        Option("Interleaved 1F1B: stages of each pipeline rank.", at_least=1, at_most=MAX_VIRTUAL_STAGES),
    ] = 1

    def __post_init__(self) -> None:
        """Validate the number of stages. Raises ConfigError naming the option."""
        check_bounds(self)

    @property
    def name(self) -> str:
        """The techniques in words."""
        techniques = {
            "sequence parallelism": self.sequence_parallel,
            "split vocabulary": self.vocab_parallel,
            "asynchronous tensor parallelism": self.async_tp,
            "weights that stay gathered": self.keep_gathered,
            f"{self.virtual_stages} interleaved stages a rank": self.virtual_stages > 1,
        }
        return ", ".join(words for words, is_used in techniques.items() if is_used)


PLAIN = Execution()
"""This trainer's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """The layout of a training. A step's batch has `data * shard * micro_batch * accumulation` rows."""

    data: int = 1
    shard: int = 1
    tensor: int = 1
    pipeline: int = 1
    micro_batch: int = 1
    """Rows that a GPU computes at a time."""
    accumulation: int = 1
    """Micro-batches of a step, whose gradients add up; in a pipeline they follow each other."""
    checkpointing: Checkpointing = "none"
    execution: Execution = PLAIN

    @property
    def num_gpus(self) -> int:
        return self.data * self.shard * self.tensor * self.pipeline

    @property
    def batch(self) -> int:
        """Rows of one step."""
        return self.data * self.shard * self.micro_batch * self.accumulation

    @property
    def name(self) -> str:
        """The layout in the field's words, such as FSDP2 8 x TP 2."""
        sizes = {"PP": self.pipeline, "DDP": self.data, "FSDP2": self.shard, "TP": self.tensor}
        return " x ".join(f"{word} {size}" for word, size in sizes.items() if size > 1) or "one GPU"

    def spans(self) -> dict[str, int]:
        """Return by dimension over how many neighbouring GPUs one of its groups extends."""
        shard = self.tensor * self.shard
        data = shard * self.data
        return {"tensor": self.tensor, "shard": shard, "data": data, "pipeline": data * self.pipeline}


_SIZE = re.compile(r"(tp|pp|dp|ddp|fsdp|mb)(\d{1,6})|(none|selective|full)")
_FIELDS = {"tp": "tensor", "pp": "pipeline", "dp": "data", "ddp": "data", "fsdp": "shard", "mb": "micro_batch"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A requested layout: the sizes of its mesh, and optionally rows of a micro-batch and checkpointing."""

    data: int = 1
    shard: int = 1
    tensor: int = 1
    pipeline: int = 1
    micro_batch: int | None = None
    checkpointing: Checkpointing | None = None


def layout_asked(text: str, num_gpus: int) -> Asked:
    """Read `tp8,pp2,dp4`, optionally with `fsdp`, `mb` and a kind of checkpointing.

    Raises InvalidRequest unless it is a layout of `num_gpus`.
    """
    sizes: dict[str, Any] = {}
    for word in re.split(r"[,+\s]+", text.strip().lower()):
        match = _SIZE.fullmatch(word)
        name, value = (_FIELDS[match[1]], int(match[2])) if match and match[1] else ("checkpointing", word)
        if match is None or value == 0 or name in sizes:
            fix = "give sizes above 0 of tp, pp, dp, fsdp and mb, each once, such as tp8,pp2,dp4"
            raise InvalidRequest("--layout", f"{word!r} is not a size of a layout", fix)
        sizes[name] = value
    asked = Asked(**sizes)
    size = asked.data * asked.shard * asked.tensor * asked.pipeline
    if size != num_gpus:
        raise InvalidRequest("--layout", f"{text} is of {size:,} GPUs, --gpus of {num_gpus:,}", "give equal numbers")
    return asked


def bubble_of_ideal(stages: int, micro_batches: int, virtual_stages: int = 1) -> float:
    """Return the idle time of a 1F1B pipeline relative to the ideal time: (P - 1) / (V M) (Narayanan et al. 2021)."""
    return (stages - 1) / (virtual_stages * micro_batches)


def bubble_of_step(stages: int, micro_batches: int, virtual_stages: int = 1) -> float:
    """Return the same idle time as a fraction of the whole step: (P - 1) / (V M + P - 1)."""
    return (stages - 1) / (virtual_stages * micro_batches + stages - 1)
