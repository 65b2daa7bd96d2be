"""The time of a training step on a layout: roofline, collectives, pipeline bubble, and an interval.

Pure arithmetic over constants fitted to published runs.
A micro-batch takes its products at the device's peak times an efficiency, attention over the causal half at a share of
that, and its traffic, which is what the layers keep for the backward pass times a number of passes, at the memory's
bandwidth. A step adds what it waits for collectives, the bubble and the optimizer. The constants, the runs that they
come from and the command that fits them again are in `fitted.json`. Kernel launches bound small models: an assumption,
stated below.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

from pipelines.planner.devices import DEVICES, Device, Gpus
from pipelines.planner.memory import (
    ADAM_BYTES,
    BF16,
    FP32,
    Numbers,
    kept_bytes_per_token,
    stage_parameters,
    stream_ways,
    vocab_ways,
)
from pipelines.planner.mesh import PLAIN, ParallelLayout, bubble_of_ideal
from pipelines.planner.shapes import DecoderShape, PlainShape, Shape

FITTED = Path(__file__).parent / "fitted.json"
LAUNCH_S, LAUNCHES_PER_LAYER = 5e-6, 120
"""Assumed: the host starts a kernel in 5 us, and a layer has some 120 kernels, forward and backward.

No step is faster than its launches.
"""
CALL_S = 15e-6
"""Assumed: the least time of a collective."""
_PLAIN_MODULES, _BUCKET_BYTES = 30, 25 * 2**20
"""Assumed: the number of parts of another model that FSDP gathers one after another. DDP's buckets are torch's."""
_ATTENTION_AGAIN = 9 / 7
"""Fused attention has two products forward and five backward, which recompute the scores (Dao et al. 2022).

With full checkpointing the two forward products run twice.
"""
_SCORE_BYTES = 12
"""Traffic of one score of the vocabulary: written, read and its gradient, in fp32."""
_OPTIMIZER_BYTES = 2 * (FP32 + ADAM_BYTES) + FP32 + 3 * FP32
"""Read and written for each parameter: weight and moments both ways, the gradient, and the average."""

Group = Literal["data", "parallel", "unseen"]
"""Groups of steps that share an interval.

They are: dense decoders with FSDP in bf16 on a chip with fitted runs; other layouts, dtypes and techniques; other chips
and models.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """Fitted values. `efficiency` is by chip, of the peak; `attention` is a share of that.

    `exposed`, `data`, `tensor` and `pipeline` are the shares of the time of a collective (FSDP's, DDP's, tensor
    parallelism's, between stages) that a step waits, at the data sheet's bandwidth; `async_tp` is a further factor
    where tensor parallelism overlaps. `intervals` hold the logarithms of measured by predicted throughput, by group,
    between which most runs lie.
    """

    efficiency: Mapping[str, float]
    attention: float
    passes: float
    exposed: float
    data: float = 1.0
    tensor: float = 1.0
    async_tp: float = 1.0
    pipeline: float = 1.0
    intervals: Mapping[Group, tuple[float, float]] = field(default_factory=dict)
    devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One kind of communication of a step: bytes sent per GPU, time at full bandwidth, and the wait of the step."""

    name: str
    link: str
    num_bytes: float
    seconds: float
    exposed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStepTime:
    """The seconds of one step. `total_s` is in `low_s` to `high_s` in most runs; `notes` name the interval's runs."""

    products_s: float
    attention_s: float
    traffic_s: float
    launch_s: float
    """Waiting for launches, beyond the work."""
    optimizer_s: float
    bubble_s: float
    collectives: tuple[Collective, ...]
    low_s: float
    high_s: float
    group: Group
    """The runs that the interval is of."""
    notes: tuple[str, ...]

    @property
    def exposed_s(self) -> float:
        return sum(collective.exposed_s for collective in self.collectives)

    @property
    def total_s(self) -> float:
        """The whole step."""
        work = self.products_s + self.attention_s + self.traffic_s
        return work + self.launch_s + self.optimizer_s + self.bubble_s + self.exposed_s


@cache
def fitted() -> Constants:
    """Return the constants of `fitted.json`."""
    raw = json.loads(FITTED.read_text())
    constants = raw["constants"]
    intervals = {group: tuple(ends) for group, ends in constants["intervals"].items()}
    return Constants(**constants | {"devices": tuple(constants["devices"]), "intervals": intervals})


def step_time(
    shape: Shape,
    layout: ParallelLayout,
    length: int,
    gpus: Gpus,
    *,
    dtype: str = "bf16",
    reduce_bytes: int = FP32,
    gathers: int = 2,
    constants: Constants | None = None,
) -> PlannedStepTime:
    """Return the time of a step. `length` is a row's tokens.

    `dtype`: of the layers' products; `reduce_bytes`: of a gradient on its way, fp32 in this trainer; `gathers` how
    often FSDP gathers the weights for a micro-batch: for both passes, or once where they stay. `constants` are the
    fitted ones unless given.
    """
    coefficients = constants or fitted()
    work = (
        _plain_work(shape, layout, gpus.device, dtype, coefficients)
        if isinstance(shape, PlainShape)
        else _decoder_work(shape, layout, length, gpus.device, dtype, coefficients)
    )
    collectives = _collectives(shape, layout, length, gpus, reduce_bytes, gathers, coefficients)
    micro = layout.accumulation
    products, attention, traffic, launch = (micro * seconds for seconds in work)
    held = _held_parameters(shape, layout)
    optimizer = _OPTIMIZER_BYTES * held / gpus.device.memory_bytes_per_s
    ideal = (
        products
        + attention
        + traffic
        + launch
        + sum(collective.exposed_s for collective in collectives if collective.name != _ONCE)
    )
    bubble = ideal * bubble_of_ideal(layout.pipeline, micro, layout.execution.virtual_stages)
    total = (
        ideal + bubble + optimizer + sum(collective.exposed_s for collective in collectives if collective.name == _ONCE)
    )
    at_peak = efficiency_of(gpus.device, coefficients) * (products + coefficients.attention * attention)
    group = group_of(shape, layout, gpus.device, coefficients, dtype=dtype)
    low, high = coefficients.intervals.get(group, (0.0, 0.0))
    return PlannedStepTime(
        products_s=products,
        attention_s=attention,
        traffic_s=traffic,
        launch_s=launch,
        optimizer_s=optimizer,
        bubble_s=bubble,
        collectives=collectives,
        low_s=max(total * math.exp(-high), at_peak),
        high_s=total * math.exp(-low),
        group=group,
        notes=_notes(group, gpus.device, coefficients),
    )


def mfu(shape: Shape, layout: ParallelLayout, length: int, gpus: Gpus, seconds: float) -> float:
    """Return the model FLOPs utilisation at this step time, as a fraction, without recomputed arithmetic."""
    flops = (
        3 * layout.batch * shape.flops_per_sample
        if isinstance(shape, PlainShape)
        else shape.training_flops(layout.batch * length, length)
    )
    return flops / (seconds * gpus.number * gpus.device.flops_per_s["bf16"])


def efficiency_of(device: Device, constants: Constants) -> float:
    """Return the fraction of the peak that large products reach: the chip's, or the nearest fitted chip's."""
    if device.chip in constants.efficiency:
        return constants.efficiency[device.chip]
    peaks = {device.chip: device.flops_per_s["bf16"] for device in DEVICES if device.chip in constants.efficiency}
    peak = device.flops_per_s["bf16"]
    return constants.efficiency[min(peaks, key=lambda chip: abs(math.log(peaks[chip] / peak)))]


def group_link(gpus: Gpus, size: int, span: int) -> tuple[str, float]:
    """Return the link of a group of `size` GPUs over `span` neighbours, and its bandwidth in bytes per second per GPU.

    A ring over nodes enters and leaves each by as many network cards as it has members there.
    """
    device = gpus.device
    if span == 2 and device.pair_link is not None:
        return device.pair_link
    if span <= device.gpus_per_node:
        return device.node_link, device.node_link_bytes_per_s
    members = max(1, device.gpus_per_node * size // span)
    return "network", min(device.node_link_bytes_per_s, members * device.network_bytes_per_s)


_ONCE = "all-reduce of gradients (DDP)"


def _decoder_work(
    shape: DecoderShape,
    layout: ParallelLayout,
    length: int,
    device: Device,
    dtype: str,
    constants: Constants,
) -> tuple[float, float, float, float]:
    """Return the seconds of a micro-batch on the busiest stage: products, attention, traffic, and launches."""
    tokens, layers = layout.micro_batch * length, -(-shape.num_layers // layout.pipeline)
    again = 4 / 3 if layout.checkpointing == "full" else 1.0
    traffic_again = 1.0 if layout.checkpointing == "none" else 4 / 3
    efficiency = efficiency_of(device, constants)
    bf16 = device.flops_per_s["bf16"] * efficiency
    layer_rate = device.flops_per_s[dtype] * efficiency
    products = 6 * tokens * layers * shape.active_weights / layout.tensor * again / layer_rate
    ways = vocab_ways(layout)
    products += 6 * tokens * shape.table_parameters / ways / bf16
    pairs = shape.attention_pairs(length) * layers / shape.num_layers
    attention = 12 * tokens * shape.score_width * pairs / layout.tensor / (bf16 * constants.attention)
    attention *= _ATTENTION_AGAIN if layout.checkpointing == "full" else 1.0
    numbers: Numbers = "bf16" if layout.shard > 1 else "autocast"
    kept = layers * kept_bytes_per_token(shape, layout, numbers)
    traffic = tokens * (constants.passes * kept * traffic_again + _SCORE_BYTES * shape.vocab_size / ways)
    traffic_s = traffic / device.memory_bytes_per_s
    launches = layers * LAUNCHES_PER_LAYER * LAUNCH_S * again
    return products, attention, traffic_s, max(0.0, launches - products - attention - traffic_s)


def _plain_work(
    shape: PlainShape, layout: ParallelLayout, device: Device, dtype: str, constants: Constants
) -> tuple[float, float, float, float]:
    rate = device.flops_per_s[dtype] * efficiency_of(device, constants)
    traffic = layout.micro_batch * shape.activation_bytes * constants.passes / device.memory_bytes_per_s
    return 3 * layout.micro_batch * shape.flops_per_sample / rate, 0.0, traffic, 0.0


def _held_parameters(shape: Shape, layout: ParallelLayout) -> float:
    if isinstance(shape, PlainShape):
        return shape.num_parameters / layout.shard
    return stage_parameters(shape, layout) / layout.shard


def _collectives(
    shape: Shape,
    layout: ParallelLayout,
    length: int,
    gpus: Gpus,
    reduce_bytes: int,
    gathers: int,
    constants: Constants,
) -> tuple[Collective, ...]:
    """Return the bytes that one GPU sends in a step, by rings.

    A ring sends (n - 1) / n of a tensor to gather or scatter it, and twice as much to all-reduce it.
    """
    spans, execution, collectives = layout.spans(), layout.execution, []
    whole = _held_parameters(shape, layout) * layout.shard
    micro, layers = layout.accumulation, _PLAIN_MODULES
    if isinstance(shape, DecoderShape):
        layers = -(-shape.num_layers // layout.pipeline)

    def add(name: str, dimension: str, size: int, num_bytes: float, calls: float, exposed: float) -> None:
        link, bandwidth = group_link(gpus, size, spans[dimension])
        seconds = num_bytes / bandwidth + calls * CALL_S
        collectives.append(
            Collective(name=name, link=link, num_bytes=num_bytes, seconds=seconds, exposed_s=exposed * seconds)
        )

    if layout.shard > 1:
        times = 1 if execution.keep_gathered else micro
        part, calls = (layout.shard - 1) / layout.shard * times * whole, times * layers
        gathered = gathers * BF16 * part
        add("all-gather of weights (FSDP)", "shard", layout.shard, gathered, gathers * calls, constants.exposed)
        add("reduce-scatter of gradients (FSDP)", "shard", layout.shard, reduce_bytes * part, calls, constants.exposed)
    if layout.data > 1:
        reduced = reduce_bytes * whole / layout.shard
        part = 2 * (layout.data - 1) / layout.data * reduced
        add(_ONCE, "data", layout.data, part, math.ceil(reduced / _BUCKET_BYTES), constants.data)
    if isinstance(shape, PlainShape):
        return tuple(collectives)
    row_bytes = BF16 * layout.micro_batch * length * shape.hidden_size * micro
    if layout.tensor > 1:
        times = layers * (6 if layout.checkpointing == "full" else 4)
        part = 2 * (layout.tensor - 1) / layout.tensor * times
        kind = "reduce-scatter and all-gather" if execution.sequence_parallel else "all-reduce"
        exposed = constants.tensor * (constants.async_tp if execution.async_tp else 1.0)
        name = f"{kind} of activations (TP)"
        add(name, "tensor", layout.tensor, part * row_bytes, times * micro, exposed)
    if layout.pipeline > 1:
        passes = 2 * execution.virtual_stages
        sent = row_bytes / stream_ways(layout)
        add(
            "activations between stages (PP)",
            "pipeline",
            layout.pipeline,
            passes * sent,
            passes * micro,
            constants.pipeline,
        )
    return tuple(collectives)


def group_of(
    shape: Shape,
    layout: ParallelLayout,
    device: Device,
    constants: Constants,
    *,
    dtype: str = "bf16",
) -> Group:
    """Return the group of runs whose interval applies to a step."""
    if device.chip not in constants.efficiency or isinstance(shape, PlainShape) or shape.experts is not None:
        return "unseen"
    is_fsdp = 1 < layout.num_gpus == layout.shard
    return "data" if is_fsdp and dtype == "bf16" and layout.execution == PLAIN else "parallel"


def _notes(group: Group, device: Device, constants: Constants) -> tuple[str, ...]:
    low, high = (100 * math.expm1(value) for value in constants.intervals.get(group, (0.0, 0.0)))
    is_known = device.chip in constants.efficiency
    missing = "of such a model" if is_known else f"on {device.name}, whose efficiency is that of the nearest chip"
    words = {
        "data": f"the interval is that of FSDP runs on {', '.join(constants.devices)}",
        "parallel": "the interval is that of published runs with other layouts, dtypes and techniques",
        "unseen": f"no fitted run is {missing}; the interval is that of chips and models that a fit has not seen",
    }
    return (f"{words[group]}: {low:.0f} to {high:+.0f} % of throughput",)
