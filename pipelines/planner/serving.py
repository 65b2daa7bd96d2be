"""Serving text or rankings by one decoder: memory, time of each phase, concurrency of a load, replicas against shards.

Pure arithmetic. A phase takes the longer of its bytes and its FLOPs (the roofline), at assumed fractions of the data
sheet, with an assumed host time per step: no published serving run was fitted, so times are given within a factor.
Shards are the engine's tensor-parallel ranks.
"""

import math
from dataclasses import dataclass

from models.errors import InvalidRequest
from pipelines.planner.devices import Device, Gpus
from pipelines.planner.layouts import USABLE
from pipelines.planner.memory import BF16, Memory, kv_bytes, serving_memory
from pipelines.planner.options import ServingLoad
from pipelines.planner.shapes import DecoderShape, Shape

FACTOR = 1.5
"""Times are within this factor either way: an assumption, as wide as published errors of planners (45 % in TTFT)."""
_COMPUTE_SHARE, _MEMORY_SHARE = 0.6, 0.8
_STEP_S = 1e-3
"""Host time to plan and start a step."""
_ALL_REDUCE_S = {"node": 15e-6, "network": 40e-6}
"""The minimal time of an all-reduce; a sharded layer has two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingStep:
    """One step of a kind: its bytes and FLOPs, and the seconds of either on one GPU's part."""

    name: str
    num_bytes: float
    flops: float
    memory_s: float
    compute_s: float
    overhead_s: float

    @property
    def seconds(self) -> float:
        return max(self.memory_s, self.compute_s) + self.overhead_s

    @property
    def bound(self) -> str:
        """The longest of the step's waits."""
        sides = {"memory": self.memory_s, "compute": self.compute_s, "overhead": self.overhead_s}
        return max(sides, key=lambda side: sides[side])


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """One way to use the GPUs: `replicas` groups of `shards`. Times are per group, rates in total.

    They are None if the model does not fit or the load is too high.
    """

    shards: int
    replicas: int
    memory: Memory
    concurrency: int
    """Maximal number of concurrent requests in a group."""
    best_tokens_per_s_per_gpu: float
    """Output tokens at full concurrency."""
    running: float | None
    """Requests decoded at a time under the load."""
    step_s: float | None
    ttft_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPlan:
    """The phases on one GPU, and every way to use the GPUs, fewest shards first. `verdict` compares them."""

    shape: DecoderShape
    gpus: Gpus
    load: ServingLoad
    phases: tuple[ServingStep, ...]
    ways: tuple[Sharding, ...]
    verdict: str


def plan_serving(shape: Shape, gpus: Gpus, load: ServingLoad) -> ServingPlan:
    """Return the plan of a deployment. Raises InvalidRequest for non-decoders, and for rates above capacity."""
    if not isinstance(shape, DecoderShape):
        raise InvalidRequest("--serve", "this engine serves decoders only", "give --train for another model")
    ways = tuple(_sharding(shape, gpus, load, shards) for shards in _shard_sizes(shape, gpus))
    fitting = [way for way in ways if way.concurrency]
    if fitting and all(way.running is None for way in fitting):
        number = min(_gpus_for(shape, gpus.device, load, way) for way in fitting)
        problem = f"{load.rate:g} requests/s exceed every layout of {gpus.number:,} x {gpus.device.name}"
        raise InvalidRequest("--rate", problem, f"give {number:,} x {gpus.device.name}, or a lower rate")
    rows = max(1, min(32, ways[0].concurrency))
    phases = [prefill(shape, gpus.device, load), decode(shape, gpus.device, load, rows)]
    if load.beams > 1:
        phases.append(beam_step(shape, gpus.device, load, rows=1))
    return ServingPlan(shape=shape, gpus=gpus, load=load, phases=tuple(phases), ways=ways, verdict=_verdict(gpus, ways))


def _gpus_for(shape: DecoderShape, device: Device, load: ServingLoad, way: Sharding) -> int:
    """Return the number of GPUs for the load in groups like this way's: each group at its maximal rate."""
    prefill_s = prefill(shape, device, load, way.shards).seconds
    low, high = 0.0, 1 / prefill_s
    for _ in range(60):
        middle = (low + high) / 2
        is_borne = _running(shape, device, load, way.shards, middle, prefill_s, way.concurrency) is not None
        low, high = (middle, high) if is_borne else (low, middle)
    if not low:
        return 2**63
    return way.shards * math.ceil(load.rate / low)


def prefill(shape: DecoderShape, device: Device, load: ServingLoad, shards: int = 1) -> ServingStep:
    """Return the prefill of one prompt: all weights once, the head for the last token, causal attention."""
    products = shape.num_layers * shape.active_weights * load.prompt + shape.table_parameters
    flops = 2 * products + 4 * load.prompt * shape.score_width * shape.attention_pairs(load.prompt)
    num_bytes = shape.bytes_read_by(load.prompt) + kv_bytes(shape, load.prompt, load.kv_kind)
    return _phase(shape, device, f"prefill of {load.prompt:,} tokens", num_bytes, flops, shards, load.prompt)


def decode(shape: DecoderShape, device: Device, load: ServingLoad, rows: float, shards: int = 1) -> ServingStep:
    """Return one step of `rows` requests, a token each, with contexts at half of the output."""
    context = load.prompt + load.output / 2
    num_bytes = shape.bytes_read_by(rows) + rows * kv_bytes(shape, context, load.kv_kind)
    flops = rows * (2 * shape.forward_weights + 4 * shape.cached_score_width * shape.cached_tokens(context))
    return _phase(shape, device, f"decode of {rows:,.0f} rows", num_bytes, flops, shards, rows)


def beam_step(shape: DecoderShape, device: Device, load: ServingLoad, rows: float) -> ServingStep:
    """Return one level of beam search of `rows` requests, whose beams read their common context once."""
    beams = rows * load.beams
    num_bytes = shape.bytes_read_by(beams) + rows * kv_bytes(shape, load.prompt, load.kv_kind)
    flops = beams * (2 * shape.forward_weights + 4 * shape.cached_score_width * shape.cached_tokens(load.prompt))
    return _phase(shape, device, f"beams, {beams:,.0f} at a time", num_bytes, flops, 1, beams)


def _phase(
    shape: DecoderShape, device: Device, name: str, num_bytes: float, flops: float, shards: int, rows: float
) -> ServingStep:
    overhead = _STEP_S
    if shards > 1:
        link_name = "node" if shards <= device.gpus_per_node else "network"
        link = device.node_link_bytes_per_s if link_name == "node" else device.network_bytes_per_s
        sent = all_reduce_bytes(rows, shape.hidden_size, shape.num_layers, shards)
        overhead += 2 * shape.num_layers * _ALL_REDUCE_S[link_name] + sent / link
    return ServingStep(
        name=name,
        num_bytes=num_bytes,
        flops=flops,
        memory_s=num_bytes / shards / (device.memory_bytes_per_s * _MEMORY_SHARE),
        compute_s=flops / shards / (device.flops_per_s["bf16"] * _COMPUTE_SHARE),
        overhead_s=overhead,
    )


def all_reduce_bytes(rows: float, hidden_size: int, num_layers: int, shards: int, number_bytes: float = BF16) -> float:
    """Return the bytes that each shard sends for these rows: two ring all-reduces a layer."""
    return 2 * num_layers * 2 * (shards - 1) / shards * rows * number_bytes * hidden_size


def _shard_sizes(shape: DecoderShape, gpus: Gpus) -> list[int]:
    most = min(gpus.number, gpus.device.gpus_per_node)
    return [size for size in range(1, most + 1) if gpus.number % size == 0 and shape.num_kv_heads % size == 0]


def _sharding(shape: DecoderShape, gpus: Gpus, load: ServingLoad, shards: int) -> Sharding:
    """Return one way to use the GPUs at a load.

    Concurrency follows from Little's law; prefills take their share of the time and queue for it (M/D/1).
    """
    device, replicas = gpus.device, gpus.number // shards
    length = load.prompt + load.output
    empty = serving_memory(shape, 0, length, shards=shards, kv_kind=load.kv_kind)
    row = kv_bytes(shape, length, load.kv_kind) / shards
    concurrency = max(0, int((USABLE * device.memory_bytes - empty.total) / row))
    memory = serving_memory(shape, max(concurrency, 1), length, shards=shards, kv_kind=load.kv_kind)
    prefill_s = prefill(shape, device, load, shards).seconds
    best = running = step_s = ttft_s = None
    if concurrency:
        full = decode(shape, device, load, concurrency, shards).seconds
        best = concurrency / (full + concurrency * prefill_s / load.output) / shards
        rate = load.rate / replicas
        running = _running(shape, device, load, shards, rate, prefill_s, concurrency)
    if running is not None:
        share = load.rate / replicas * prefill_s
        step_s = decode(shape, device, load, max(running, 1), shards).seconds / (1 - share)
        ttft_s = prefill_s * (1 + share / (2 * (1 - share))) + step_s
    return Sharding(
        shards=shards,
        replicas=replicas,
        memory=memory,
        concurrency=concurrency,
        best_tokens_per_s_per_gpu=best or 0.0,
        running=running,
        step_s=step_s,
        ttft_s=ttft_s,
    )


def _running(
    shape: DecoderShape, device: Device, load: ServingLoad, shards: int, rate: float, prefill_s: float, concurrency: int
) -> float | None:
    """Return how many requests a group decodes at a time at this rate: the least number that keeps up, or None."""
    share = rate * prefill_s
    if share >= 1:
        return None

    def arriving(rows: float) -> float:
        return rate * load.output * decode(shape, device, load, max(rows, 1.0), shards).seconds / (1 - share)

    low, high = 0.0, float(concurrency)
    if arriving(high) > high:
        return None
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if arriving(middle) <= middle else (middle, high)
    return high


def _verdict(gpus: Gpus, ways: tuple[Sharding, ...]) -> str:
    fitting = [way for way in ways if way.concurrency]
    if not fitting:
        needed = ways[-1].memory.total - ways[-1].memory.parts["framework"]
        room = USABLE * gpus.device.memory_bytes - ways[-1].memory.parts["framework"]
        number = math.ceil(needed * ways[-1].shards / room)
        return f"It does not fit on {ways[-1].shards} GPUs together; {number:,} would hold the weights and one request"
    first, last = fitting[0], fitting[-1]
    if first.shards > 1:
        return (
            f"The weights do not fit on one {gpus.device.name}: set TAILRACE_TEXT_TENSOR_PARALLEL_SIZE (or "
            f"TAILRACE_LLM_TENSOR_PARALLEL_SIZE) to {first.shards}"
        )
    if len(fitting) == 1:
        return "One replica a GPU"
    best = max(fitting, key=lambda way: way.best_tokens_per_s_per_gpu)
    if best is first:
        return (
            f"Replicas win: {first.replicas} of one GPU each give {first.best_tokens_per_s_per_gpu:,.0f} output "
            "tokens/s a GPU, "
            f"shards over {last.shards} {last.best_tokens_per_s_per_gpu:,.0f}: each layer of those waits for two "
            "all-reduces"
        )
    return (
        f"{best.shards} shards give {best.best_tokens_per_s_per_gpu:,.0f} output tokens/s a GPU and one GPU "
        f"{first.best_tokens_per_s_per_gpu:,.0f}, "
        "since they read the weights once for more requests at a time"
    )
