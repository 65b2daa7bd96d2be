"""The time of a training step on a layout: roofline, collectives, pipeline bubble, and an interval. Pure arithmetic over constants fitted to published runs.

A micro-batch takes its products at the device's peak times an efficiency, attention over the causal half at a share of that, and its traffic, which is what the layers
keep for the backward pass times a number of passes, at the memory's bandwidth. A step adds what it waits for collectives, the bubble and the optimizer. The constants, the
runs that they come from and the command that fits them again are in `fitted.json`. Kernel launches bound small models: an assumption, stated below.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pipelines.planner.devices import DEVICES, Device, Gpus
from pipelines.planner.memory import ADAM_BYTES, BF16, FP32, Numbers, kept_bytes_per_token, stage_parameters
from pipelines.planner.mesh import Layout, bubble_of_ideal
from pipelines.planner.shapes import DecoderShape, PlainShape, Shape

FITTED = Path(__file__).parent / "fitted.json"
LAUNCH_S, LAUNCHES_PER_LAYER = 5e-6, 120
"""Assumed: the host starts a kernel in 5 us, and a layer's forward and backward pass are some 120 kernels. No step is faster than that."""
CALL_S = 15e-6
"""Assumed: no collective takes less, whatever it moves."""
_PLAIN_MODULES, _BUCKET_BYTES = 30, 25 * 2**20
"""Assumed: how many parts of a model that is no decoder FSDP gathers one after another. DDP's buckets are torch's."""
_ATTENTION_AGAIN = 9 / 7
"""Fused attention has two products forward and five backward, since it computes the scores again (Dao et al. 2022); with full checkpointing the two come twice."""
_SCORE_BYTES = 12
"""Traffic of one score of the vocabulary: written, read and its gradient, in fp32."""
_OPTIMIZER_BYTES = 2 * (FP32 + ADAM_BYTES) + FP32 + 3 * FP32
"""Read and written for each parameter: weight and moments both ways, the gradient, and the average."""
_UNPUBLISHED_LAYOUT = 2.0
"""How much wider the interval is for layouts that no fitted run has: an assumption, held against Megatron's published rows by a test."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """What was fitted. `efficiency` is by chip, of the peak; `attention` is a share of that; `exposed` of a collective's time at the data sheet's bandwidth is waited for.

    `low` and `high` are the logarithms of measured by predicted MFU between which most runs lie; `unseen` widens them for a device that no run has.
    """

    efficiency: Mapping[str, float]
    attention: float
    passes: float
    exposed: float
    low: float = 0.0
    high: float = 0.0
    unseen: float = 1.0
    devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One kind of communication of a step: bytes that a GPU sends, the time at the data sheet's bandwidth, and how much of it the step waits."""

    name: str
    link: str
    num_bytes: float
    seconds: float
    exposed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """The seconds of one step. `total_s` lies between `low_s` and `high_s` in most runs; `notes` say what widened them."""

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
    notes: tuple[str, ...]

    @property
    def exposed_s(self) -> float:
        """Waiting for collectives."""
        return sum(one.exposed_s for one in self.collectives)

    @property
    def total_s(self) -> float:
        """The whole step."""
        work = self.products_s + self.attention_s + self.traffic_s
        return work + self.launch_s + self.optimizer_s + self.bubble_s + self.exposed_s


@cache
def fitted() -> Constants:
    """Return the constants of `fitted.json`."""
    raw = json.loads(FITTED.read_text())
    return Constants(**raw["constants"] | {"devices": tuple(raw["constants"]["devices"])})


def step_time(
    shape: Shape,
    layout: Layout,
    length: int,
    gpus: Gpus,
    *,
    dtype: str = "bf16",
    reduce_bytes: int = FP32,
    gathers: int = 2,
    constants: Constants | None = None,
) -> StepTime:
    """Return the time of a step. `length` is a row's tokens.

    `dtype` is that of the layers' products; `reduce_bytes` those of a gradient on its way, fp32 in this trainer; `gathers` how often FSDP gathers the weights for a
    micro-batch: for both passes, or once where they stay. `constants` are the fitted ones unless given.
    """
    found = constants or fitted()
    work = (
        _plain_work(shape, layout, gpus.device, dtype, found)
        if isinstance(shape, PlainShape)
        else _decoder_work(shape, layout, length, gpus.device, dtype, found)
    )
    collectives = _collectives(shape, layout, length, gpus, reduce_bytes, gathers, found)
    micro = layout.accumulation
    products, attention, traffic, launch = (micro * seconds for seconds in work)
    held = _held_parameters(shape, layout)
    optimizer = _OPTIMIZER_BYTES * held / gpus.device.memory_bytes_per_s
    ideal = products + attention + traffic + launch + sum(one.exposed_s for one in collectives if one.name != _ONCE)
    bubble = ideal * bubble_of_ideal(layout.pipeline, micro)
    total = ideal + bubble + optimizer + sum(one.exposed_s for one in collectives if one.name == _ONCE)
    at_peak = efficiency_of(gpus.device, found) * (products + found.attention * attention)
    wider, notes = _widening(shape, layout, gpus.device, found)
    return StepTime(
        products_s=products,
        attention_s=attention,
        traffic_s=traffic,
        launch_s=launch,
        optimizer_s=optimizer,
        bubble_s=bubble,
        collectives=collectives,
        low_s=max(total * math.exp(-wider * found.high), at_peak),
        high_s=total * math.exp(-wider * found.low),
        notes=notes,
    )


def mfu(shape: Shape, layout: Layout, length: int, gpus: Gpus, seconds: float) -> float:
    """Return the model FLOPs utilisation of steps that take so long, as a share: the model's own arithmetic, without what is computed again."""
    flops = (
        3 * layout.batch * shape.flops_per_sample
        if isinstance(shape, PlainShape)
        else shape.training_flops(layout.batch * length, length)
    )
    return flops / (seconds * gpus.number * gpus.device.flops_per_s["bf16"])


def efficiency_of(device: Device, constants: Constants) -> float:
    """Return the share of the peak that large products reach: the chip's own, or of the fitted chip with the nearest peak."""
    if device.chip in constants.efficiency:
        return constants.efficiency[device.chip]
    peaks = {one.chip: one.flops_per_s["bf16"] for one in DEVICES if one.chip in constants.efficiency}
    peak = device.flops_per_s["bf16"]
    return constants.efficiency[min(peaks, key=lambda chip: abs(math.log(peaks[chip] / peak)))]


def group_link(gpus: Gpus, size: int, span: int) -> tuple[str, float]:
    """Return the link of a group of `size` GPUs that lies over `span` neighbours, and its bandwidth in bytes a second for each.

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
    shape: DecoderShape, layout: Layout, length: int, device: Device, dtype: str, constants: Constants
) -> tuple[float, float, float, float]:
    """Return the seconds of one micro-batch on the busiest stage: products, attention, traffic, and waiting for launches."""
    tokens, layers = layout.micro_batch * length, -(-shape.num_layers // layout.pipeline)
    again = 4 / 3 if layout.checkpointing == "full" else 1.0
    traffic_again = 1.0 if layout.checkpointing == "none" else 4 / 3
    efficiency = efficiency_of(device, constants)
    bf16 = device.flops_per_s["bf16"] * efficiency
    layer_rate = device.flops_per_s[dtype] * efficiency
    products = 6 * tokens * layers * shape.active_weights / layout.tensor * again / layer_rate
    products += 6 * tokens * shape.table_parameters / bf16
    pairs = shape.attention_pairs(length) * layers / shape.num_layers
    attention = 12 * tokens * shape.score_width * pairs / layout.tensor / (bf16 * constants.attention)
    attention *= _ATTENTION_AGAIN if layout.checkpointing == "full" else 1.0
    numbers: Numbers = "bf16" if layout.shard > 1 else "autocast"
    kept = layers * kept_bytes_per_token(shape, numbers, layout.tensor)
    traffic = tokens * (constants.passes * kept * traffic_again + _SCORE_BYTES * shape.vocab_size)
    traffic_s = traffic / device.memory_bytes_per_s
    launches = layers * LAUNCHES_PER_LAYER * LAUNCH_S * again
    return products, attention, traffic_s, max(0.0, launches - products - attention - traffic_s)


def _plain_work(
    shape: PlainShape, layout: Layout, device: Device, dtype: str, constants: Constants
) -> tuple[float, float, float, float]:
    rate = device.flops_per_s[dtype] * efficiency_of(device, constants)
    traffic = layout.micro_batch * shape.activation_bytes * constants.passes / device.memory_bytes_per_s
    return 3 * layout.micro_batch * shape.flops_per_sample / rate, 0.0, traffic, 0.0


def _held_parameters(shape: Shape, layout: Layout) -> float:
    whole = shape.num_parameters if isinstance(shape, PlainShape) else stage_parameters(shape, layout)
    return whole / layout.shard


def _collectives(
    shape: Shape, layout: Layout, length: int, gpus: Gpus, reduce_bytes: int, gathers: int, constants: Constants
) -> tuple[Collective, ...]:
    """Return what one GPU sends in a step, by rings: (n - 1) / n of a gathered or scattered tensor, twice that of one that all reduce."""
    spans, found = layout.spans(), []
    whole = _held_parameters(shape, layout) * layout.shard
    micro, layers = layout.accumulation, _PLAIN_MODULES
    if isinstance(shape, DecoderShape):
        layers = -(-shape.num_layers // layout.pipeline)

    def add(name: str, dimension: str, size: int, num_bytes: float, calls: float, exposed: float) -> None:
        link, bandwidth = group_link(gpus, size, spans[dimension])
        seconds = num_bytes / bandwidth + calls * CALL_S
        found.append(
            Collective(name=name, link=link, num_bytes=num_bytes, seconds=seconds, exposed_s=exposed * seconds)
        )

    if layout.shard > 1:
        part, calls = (layout.shard - 1) / layout.shard * micro * whole, micro * layers
        gathered = gathers * BF16 * part
        add("all-gather of weights (FSDP)", "shard", layout.shard, gathered, gathers * calls, constants.exposed)
        add("reduce-scatter of gradients (FSDP)", "shard", layout.shard, reduce_bytes * part, calls, constants.exposed)
    if layout.data > 1:
        reduced = reduce_bytes * whole / layout.shard
        part = 2 * (layout.data - 1) / layout.data * reduced
        add(_ONCE, "data", layout.data, part, math.ceil(reduced / _BUCKET_BYTES), constants.exposed)
    if isinstance(shape, PlainShape):
        return tuple(found)
    row_bytes = BF16 * layout.micro_batch * length * shape.hidden_size * micro
    if layout.tensor > 1:
        times = layers * (6 if layout.checkpointing == "full" else 4)
        part = 2 * (layout.tensor - 1) / layout.tensor * times
        add("all-reduce of activations (TP)", "tensor", layout.tensor, part * row_bytes, times * micro, 1.0)
    if layout.pipeline > 1:
        add("activations between stages (PP)", "pipeline", layout.pipeline, 2 * row_bytes, 2 * micro, 1.0)
    return tuple(found)


def _widening(shape: Shape, layout: Layout, device: Device, constants: Constants) -> tuple[float, tuple[str, ...]]:
    wider, notes = 1.0, []
    if device.name not in constants.devices:
        wider *= constants.unseen
        notes.append(
            f"no fitted run is on {device.name}: its efficiency is that of the nearest chip, and the interval is {constants.unseen:.1f} times as wide"
        )
    if isinstance(shape, PlainShape) or layout.shard < layout.num_gpus or layout.num_gpus == 1:
        wider *= _UNPUBLISHED_LAYOUT
        notes.append(
            f"the fitted runs are of decoders with FSDP alone: for other layouts and models the interval is {_UNPUBLISHED_LAYOUT:.0f} times as wide"
        )
    return wider, tuple(notes)
