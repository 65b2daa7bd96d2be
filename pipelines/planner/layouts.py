"""Which layouts of a training fit into the GPUs' memory, and which are fastest. Pure: the trainer and the command both ask here."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from models.errors import InvalidRequest
from pipelines.planner.devices import Gpus
from pipelines.planner.memory import Memory, training_memory
from pipelines.planner.mesh import Checkpointing, Layout
from pipelines.planner.shapes import DecoderShape, PlainShape, Shape
from pipelines.planner.step_time import StepTime, step_time

NUM_BEST = 3
_SIMPLER = 0.02
"""A layout must be this share of the time faster for each kind of parallelism beyond plain data parallelism, which is simpler to run."""
_ALIKE = 0.01
"""Within this share of the time a layout with larger micro-batches is taken: small products are less efficient than the model knows."""
USABLE = 0.95
"""Share of a device's memory that a plan may fill; the rest is for the allocator's gaps. An assumption."""
CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "selective", "full")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout with its memory on the fullest GPU, and its time where it fits."""

    layout: Layout
    memory: Memory
    step: StepTime

    @property
    def cost(self) -> float:
        """The step's time, raised a little for each kind of parallelism."""
        layout = self.layout
        kinds = sum(size > 1 for size in (layout.shard, layout.tensor, layout.pipeline))
        return self.step.total_s * (1 + _SIMPLER * kinds)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """The fastest layouts that fit, and by kind of parallelism the layout that takes least memory. `refusal` says why none fits, empty otherwise."""

    shape: Shape
    gpus: Gpus
    batch: int
    length: int
    best: tuple[Candidate, ...]
    smallest: dict[str, Candidate]
    refusal: str


def best_layouts(shape: Shape, gpus: Gpus, batch: int, length: int, number: int = NUM_BEST) -> list[Layout]:
    """Return the fastest layouts that fit, the best first; empty where none does.

    `batch` are the rows of one step over all GPUs, `length` a row's tokens. Raises InvalidRequest where the GPUs cannot share the batch.
    """
    return [one.layout for one in plan_training(shape, gpus, batch, length, number).best]


def plan_training(shape: Shape, gpus: Gpus, batch: int, length: int, number: int = NUM_BEST) -> TrainingPlan:
    """Return the plan of a training: the fastest layouts, one for each mesh, and why others do not fit. Raises InvalidRequest naming the option."""
    for option, value in (("--batch", batch), ("--length", length)):
        if value < 1:
            raise InvalidRequest(option, f"{value} is less than 1", "give a number from 1 on")
    fitting: dict[tuple[int, ...], list[Candidate]] = {}
    smallest: dict[str, Candidate] = {}
    for layout in _layouts(shape, gpus, batch):
        made = Candidate(layout, training_memory(shape, layout, length), step_time(shape, layout, length, gpus))
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
        best=best,
        smallest=smallest,
        refusal="" if best else _refusal(shape, gpus, length, smallest),
    )


def _fastest(candidates: Sequence[Candidate]) -> Candidate:
    """Return the fastest on one mesh, and among those that are about as fast the one with the largest micro-batch."""
    limit = (1 + _ALIKE) * min(made.cost for made in candidates)
    return max(
        (made for made in candidates if made.cost <= limit), key=lambda made: (made.layout.micro_batch, -made.cost)
    )


def kind_of(layout: Layout) -> str:
    """Return the kinds of parallelism in a layout, such as FSDP2 x TP."""
    kinds = (("PP", layout.pipeline), ("DDP", layout.data), ("FSDP2", layout.shard), ("TP", layout.tensor))
    return " x ".join(name for name, size in kinds if size > 1) or "one GPU"


def why_not(memory: Memory, gpus: Gpus) -> str:
    """Return in words what does not fit, empty where all does."""
    usable = USABLE * gpus.device.memory_bytes
    if memory.total <= usable:
        return ""
    if memory.states > usable:
        what = f"its states (weights, gradients, Adam) take {memory.states / 1e9:.1f} GB"
    else:
        largest = max((name for name in memory.parts), key=lambda name: memory.parts[name])
        what = f"it takes {memory.total / 1e9:.1f} GB, of which {largest} {memory.parts[largest] / 1e9:.1f}"
    return f"{what}; {usable / 1e9:.1f} of the {gpus.device.name} can be used"


def _layouts(shape: Shape, gpus: Gpus, batch: int) -> Iterator[Layout]:
    """Return every layout of the GPUs that the batch can be shared by."""
    for tensor, pipeline in _model_parallel(shape, gpus):
        ways = gpus.number // (tensor * pipeline)
        for shard in sorted(
            {1, ways, *(size for size in _divisors(ways) if size * tensor == gpus.device.gpus_per_node)}
        ):
            if batch % ways:
                continue
            rows = batch // ways
            for micro_batch in _divisors(rows):
                for checkpointing in CHECKPOINTING[: 1 if isinstance(shape, PlainShape) else None]:
                    yield Layout(
                        data=ways // shard,
                        shard=shard,
                        tensor=tensor,
                        pipeline=pipeline,
                        micro_batch=micro_batch,
                        accumulation=rows // micro_batch,
                        checkpointing=checkpointing,
                    )


def _model_parallel(shape: Shape, gpus: Gpus) -> Iterator[tuple[int, int]]:
    """Return the sizes of tensor and pipeline parallelism: heads and feed-forward rows must divide, no stage may be empty, and a tensor's group stays in a node."""
    if not isinstance(shape, DecoderShape):
        yield 1, 1
        return
    for tensor in _divisors(min(gpus.number, gpus.device.gpus_per_node)):
        if gpus.number % tensor or shape.num_kv_heads % tensor or shape.ffn_size % tensor:
            continue
        for pipeline in _divisors(gpus.number // tensor):
            layers = -(-shape.num_layers // pipeline)
            if layers * (pipeline - 1) < shape.num_layers:
                yield tensor, pipeline


def _refusal(shape: Shape, gpus: Gpus, length: int, smallest: dict[str, Candidate]) -> str:
    """Return why no layout fits, by the one that takes least, and what would be needed."""
    kinds = {name: name.count(" x ") for name in smallest}
    made = smallest[min(smallest, key=lambda name: (kinds[name], smallest[name].memory.states))]
    why = f"{made.layout.name}: {why_not(made.memory, gpus)}"
    if made.memory.states > USABLE * gpus.device.memory_bytes:
        return f"{why}. LoRA or QLoRA would train a few parameters of it: not offered by this trainer. More GPUs share the states"
    kept = made.memory.parts.get("activations", 0.0)
    if isinstance(shape, DecoderShape) and kept > 0.5 * (made.memory.total - made.memory.states):
        return f"{why}. One row of {length:,} tokens is too long: sequence parallelism would share it, not offered by this trainer. Shorter rows fit"
    return f"{why}. More GPUs share the states; LoRA or QLoRA would train fewer parameters, not offered by this trainer"


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
