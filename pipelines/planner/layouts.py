"""Training layouts that fit into the GPUs' memory, and the fastest of them. Pure: for trainer and command."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from models.errors import InvalidRequest
from pipelines.planner.devices import Gpus
from pipelines.planner.memory import Memory, training_memory
from pipelines.planner.mesh import PLAIN, Asked, Checkpointing, Execution, ParallelLayout
from pipelines.planner.shapes import DecoderShape, PlainShape, Shape
from pipelines.planner.step_time import PlannedStepTime, step_time

NUM_BEST = 3
_SIMPLER = 0.02
"""Each kind of parallelism beyond data parallelism must gain this fraction of the time: it is harder to run."""
_ALIKE = 0.01
"""Within this fraction of the time, larger micro-batches win: small products are less efficient than modelled."""
USABLE = 0.95
"""Fraction of a device's memory that a plan may fill; the rest is for the allocator's gaps. An assumption."""
CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "selective", "full")


@dataclass(frozen=True, slots=True)
class PlannedLayout:
    """A layout with its memory on the fullest GPU, and its time if it fits."""

    layout: ParallelLayout
    memory: Memory
    step: PlannedStepTime

    @property
    def cost(self) -> float:
        """The step's time, raised a little for each kind of parallelism."""
        layout = self.layout
        kinds = sum(size > 1 for size in (layout.shard, layout.tensor, layout.pipeline))
        return self.step.total_s * (1 + _SIMPLER * kinds)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """The fastest layouts that fit, and the smallest layout of each kind of parallelism.

    `refusal` says why no layout fits, else it is empty.
    """

    shape: Shape
    gpus: Gpus
    batch: int
    length: int
    execution: Execution
    best: tuple[PlannedLayout, ...]
    smallest: dict[str, PlannedLayout]
    refusal: str


def best_layouts(shape: Shape, gpus: Gpus, batch: int, length: int, number: int = NUM_BEST) -> list[ParallelLayout]:
    """Return the fastest layouts that fit, the best first; empty if none does.

    `batch` is the number of rows of one step over all GPUs, `length` a row's tokens. Raises InvalidRequest if the GPUs
    cannot share the batch.
    """
    return [made.layout for made in plan_training(shape, gpus, batch, length, number).best]


def plan_training(
    shape: Shape,
    gpus: Gpus,
    batch: int,
    length: int,
    number: int = NUM_BEST,
    *,
    asked: Asked | None = None,
    execution: Execution = PLAIN,
    dtype: str = "bf16",
) -> TrainingPlan:
    """Return the plan of a training: the fastest layouts, one for each mesh, and why others do not fit.

    `asked` restricts it to one mesh. `dtype` is the layers' product type. Raises InvalidRequest naming the option.
    """
    if dtype not in gpus.device.flops_per_s:
        known = ", ".join(gpus.device.flops_per_s)
        raise InvalidRequest("--dtype", f"{gpus.device.name} has no products in {dtype}", f"give one of {known}")
    if asked is not None:
        _refuse_impossible(shape, gpus, batch, asked, execution)
    fitting: dict[tuple[int, ...], list[PlannedLayout]] = {}
    smallest: dict[str, PlannedLayout] = {}
    for layout in _layouts(shape, gpus, batch, asked, execution):
        memory, step = training_memory(shape, layout, length), step_time(shape, layout, length, gpus, dtype=dtype)
        made = PlannedLayout(layout, memory, step)
        kind = kind_of(layout)
        if kind not in smallest or made.memory.total < smallest[kind].memory.total:
            smallest[kind] = made
        mesh = (layout.data, layout.shard, layout.tensor, layout.pipeline)
        if not why_not(made.memory, gpus):
            fitting.setdefault(mesh, []).append(made)
    if not smallest:
        raise InvalidRequest(
            "--batch",
            f"{batch} rows cannot be shared by {gpus.number} GPUs",
            f"give a multiple of {gpus.number}",
        )
    best = tuple(sorted(map(_fastest, fitting.values()), key=lambda made: made.cost)[:number])
    return TrainingPlan(
        shape=shape,
        gpus=gpus,
        batch=batch,
        length=length,
        execution=execution,
        best=best,
        smallest=smallest,
        refusal="" if best else _refusal(shape, gpus, length, smallest),
    )


def _refuse_impossible(shape: Shape, gpus: Gpus, batch: int, asked: Asked, execution: Execution) -> None:
    """Reject a mesh that no trainer could build for this model and batch. Raises InvalidRequest naming the option."""
    ways = asked.data * asked.shard
    problem = fix = ""
    if isinstance(shape, PlainShape):
        if asked.tensor * asked.pipeline > 1 or asked.checkpointing:
            problem, fix = "tp, pp and checkpointing need a decoder's config", "give dp and fsdp"
    elif shape.num_kv_heads % asked.tensor or any(width % asked.tensor for width in _ffn_widths(shape)):
        problem, fix = (
            f"tp{asked.tensor} does not divide {shape.num_kv_heads} key heads and the feed-forward width",
            "give a common divisor",
        )
    elif not _has_stages(shape, asked.pipeline, execution):
        stages = asked.pipeline * execution.virtual_stages
        problem, fix = f"{shape.num_layers} layers do not fill {stages} stages", "give fewer"
    if problem:
        raise InvalidRequest("--layout", problem, fix)
    step = ways * (asked.micro_batch or 1)
    if batch % step:
        raise InvalidRequest(
            "--batch",
            f"{batch} rows are not a multiple of {step}, which the layout needs",
            f"give {step * -(-batch // step)}",
        )
    for option, is_used, size, word in (
        ("--sequence-parallel", execution.sequence_parallel, asked.tensor, "tp"),
        ("--vocab-parallel", execution.vocab_parallel, asked.tensor, "tp"),
        ("--async-tp", execution.async_tp, asked.tensor, "tp"),
        ("--keep-gathered", execution.keep_gathered, asked.shard, "fsdp"),
        ("--virtual-stages", execution.virtual_stages > 1, asked.pipeline, "pp"),
    ):
        if is_used and size == 1:
            raise InvalidRequest(option, f"the layout has no {word}", f"omit the option, or add {word} to --layout")


def _ffn_widths(shape: DecoderShape) -> tuple[int, ...]:
    experts = shape.experts
    if experts is None:
        return (shape.ffn_size,)
    return (experts.ffn_size, experts.shared_size) + ((shape.ffn_size,) if shape.num_dense_layers else ())


def _has_stages(shape: DecoderShape, pipeline: int, execution: Execution) -> bool:
    """Whether every stage of a pipeline has a layer."""
    stages = pipeline * (execution.virtual_stages if pipeline > 1 else 1)
    return -(-shape.num_layers // stages) * (stages - 1) < shape.num_layers


def _fastest(candidates: Sequence[PlannedLayout]) -> PlannedLayout:
    """Return the fastest candidate of a mesh, or a nearly as fast candidate with a larger micro-batch."""
    limit = (1 + _ALIKE) * min(made.cost for made in candidates)
    return max(
        (made for made in candidates if made.cost <= limit), key=lambda made: (made.layout.micro_batch, -made.cost)
    )


def kind_of(layout: ParallelLayout) -> str:
    """Return the kinds of parallelism in a layout, such as FSDP2 x TP."""
    kinds = (("PP", layout.pipeline), ("DDP", layout.data), ("FSDP2", layout.shard), ("TP", layout.tensor))
    return " x ".join(name for name, size in kinds if size > 1) or "one GPU"


def why_not(memory: Memory, gpus: Gpus) -> str:
    """Return in words what does not fit, empty if all does."""
    usable = USABLE * gpus.device.memory_bytes
    if memory.total <= usable:
        return ""
    if memory.states > usable:
        what = f"its states (weights, gradients, Adam) take {memory.states / 1e9:.1f} GB"
    else:
        largest = max((name for name in memory.parts), key=lambda name: memory.parts[name])
        what = f"it takes {memory.total / 1e9:.1f} GB, of which {largest} {memory.parts[largest] / 1e9:.1f}"
    return f"{what}; {usable / 1e9:.1f} of the {gpus.device.name} can be used"


def _layouts(
    shape: Shape, gpus: Gpus, batch: int, asked: Asked | None, execution: Execution
) -> Iterator[ParallelLayout]:
    """Return every layout of the GPUs that can share the batch."""
    for tensor, pipeline, shard in _meshes(shape, gpus, asked, execution):
        ways = gpus.number // (tensor * pipeline)
        if batch % ways:
            continue
        rows = batch // ways
        kinds = CHECKPOINTING[: 1 if isinstance(shape, PlainShape) else None]
        for micro_batch in [asked.micro_batch] if asked and asked.micro_batch else _divisors(rows):
            for checkpointing in [asked.checkpointing] if asked and asked.checkpointing else kinds:
                yield ParallelLayout(
                    data=ways // shard,
                    shard=shard,
                    tensor=tensor,
                    pipeline=pipeline,
                    micro_batch=micro_batch,
                    accumulation=rows // micro_batch,
                    checkpointing=checkpointing,
                    execution=execution,
                )


def _meshes(shape: Shape, gpus: Gpus, asked: Asked | None, execution: Execution) -> Iterator[tuple[int, int, int]]:
    """Return the sizes of tensor and pipeline parallelism and of sharding: whole mesh, one node, or none."""
    if asked is not None:
        yield asked.tensor, asked.pipeline, asked.shard
        return
    for tensor, pipeline in _model_parallel(shape, gpus, execution):
        ways = gpus.number // (tensor * pipeline)
        a_node = (size for size in _divisors(ways) if size * tensor == gpus.device.gpus_per_node)
        for shard in sorted({1, ways, *a_node}):
            yield tensor, pipeline, shard


def _model_parallel(shape: Shape, gpus: Gpus, execution: Execution) -> Iterator[tuple[int, int]]:
    """Return the sizes of tensor and pipeline parallelism.

    Heads and feed-forward rows must divide, no stage may be empty, and a tensor group stays in a node.
    """
    if not isinstance(shape, DecoderShape):
        yield 1, 1
        return
    for tensor in _divisors(gpus.number):
        if tensor > gpus.device.gpus_per_node or shape.num_kv_heads % tensor:
            continue
        if any(width % tensor for width in _ffn_widths(shape)):
            continue
        for pipeline in _divisors(gpus.number // tensor):
            if pipeline <= shape.num_layers and _has_stages(shape, pipeline, execution):
                yield tensor, pipeline


def _refusal(shape: Shape, gpus: Gpus, length: int, smallest: dict[str, PlannedLayout]) -> str:
    """Return why no layout fits, from the layout with the least memory, and what would be needed."""
    kinds = {name: name.count(" x ") for name in smallest}
    made = smallest[min(smallest, key=lambda name: (kinds[name], smallest[name].memory.states))]
    why = f"{made.layout.name}: {why_not(made.memory, gpus)}"
    number = enough_gpus(shape, gpus, length)
    more = f"{number:,} GPUs would share the states" if number else "More GPUs would not fit it either"
    if made.memory.states > USABLE * gpus.device.memory_bytes:
        return f"{why}. LoRA or QLoRA would train a few parameters of it: not offered by this trainer. {more}"
    kept = made.memory.parts.get("activations", 0.0)
    if isinstance(shape, DecoderShape) and kept > 0.5 * (made.memory.total - made.memory.states):
        return (
            f"{why}. One row of {length:,} tokens is too long: context parallelism would share it, not offered "
            "by this trainer. Shorter rows fit"
        )
    return f"{why}. {more}; LoRA or QLoRA would train fewer parameters, not offered by this trainer"


def enough_gpus(shape: Shape, gpus: Gpus, length: int) -> int | None:
    """Return the least power of two of GPUs that train the model with FSDP, a row at a time; None above 65,536."""
    checkpointing: Checkpointing = "none" if isinstance(shape, PlainShape) else "full"
    for number in (1 << power for power in range(1, 17)):
        layout = ParallelLayout(shard=number, checkpointing=checkpointing)
        if number > gpus.number and not why_not(training_memory(shape, layout, length), gpus):
            return number
    return None


def _divisors(number: int) -> list[int]:
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})
