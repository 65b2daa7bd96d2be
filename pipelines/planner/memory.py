"""The memory of one GPU in bytes, by component, for training by this trainer and for serving. Pure arithmetic.

A training keeps weights, gradients, Adam's two moments and the weights' average in fp32. One GPU and DDP compute in
bf16 by autocast, whose copies of the weights live from a layer's forward pass to its backward pass; FSDP2 gathers the
weights of a layer at a time in bf16 and adds gradients up in fp32. Activations are what the layers of `models/decoder`
keep for the backward pass, operation by operation. Tables of the vocabulary are not split by tensor parallelism. DDP's
buckets are the gradients themselves (`gradient_as_bucket_view`). A training in fp32, as on a CPU, makes no copies. The
result is an upper bound: all components at their largest at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pipelines.planner.mesh import ParallelLayout
from pipelines.planner.shapes import DecoderShape, PlainShape, Shape
from services.llm.engine.config import KvKind, WeightKind, weight_bytes

FP32, BF16 = 4, 2
ADAM_BYTES = 2 * FP32
FRAMEWORK_BYTES = 2e9
"""Assumed, not measured: the device's context, libraries' workspaces, collectives' buffers and the allocator's gaps."""
_CHUNK_ROWS, _CHUNK_SCORES = 512, 1 << 20
"""A chunk of `pipelines/training/target/softmax.py`: all logits never exist at the same time."""

Numbers = Literal["autocast", "bf16", "fp32"]
"""The layers' numbers: fp32 weights under autocast, bf16 weights gathered by FSDP2, or plain fp32."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one GPU by component, in the order of a step."""

    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def states(self) -> float:
        """Weights, gradients and Adam's moments, which do not depend on the batch size."""
        return sum(self.parts.get(name, 0.0) for name in ("weights", "gradients", "optimizer"))


def training_memory(
    shape: Shape, layout: ParallelLayout, length: int = 1, *, is_bf16: bool = True, fuses_norms: bool = True
) -> Memory:
    """Return the memory of the fullest GPU of a layout. `length` is a row's tokens.

    `is_bf16`: whether decoders compute in bf16; else in fp32. `fuses_norms`: whether the device normalises in one
    kernel, as CUDA does; a CPU keeps the normalised numbers too.
    """
    if isinstance(shape, PlainShape):
        return _plain_memory(shape, layout)
    numbers: Numbers = ("bf16" if layout.shard > 1 else "autocast") if is_bf16 else "fp32"
    stages = [_Stage(shape, layout, length, numbers, fuses_norms, is_last) for is_last in {layout.pipeline == 1, True}]
    return max((stage.memory() for stage in stages), key=lambda memory: memory.total)


def stage_parameters(shape: DecoderShape, layout: ParallelLayout) -> float:
    """Return the parameters of one GPU before sharding: a stage's layers, split by tensor parallelism, and tables."""
    layers = -(-shape.num_layers // layout.pipeline)
    outside = float(shape.outside_parameters)
    if layout.pipeline > 1 and not shape.is_tied:
        outside -= shape.table_parameters
    return layers * (shape.layer_weights / layout.tensor + shape.vector_numbers) + outside / vocab_ways(layout)


def kept_bytes_per_token(
    shape: DecoderShape, layout: ParallelLayout, numbers: Numbers, *, fuses_norms: bool = True
) -> float:
    """Return the bytes that one layer keeps of a token for its backward pass.

    In bytes per number of the residual stream (D): the input of both norms in fp32 (4 + 4), the inputs of the products
    in bf16, one for each product under autocast (3 + 2 of 2) and one for all of them otherwise (1 + 1 of 2); in fp32
    all of these take 4. Attention keeps queries, its result, keys and values in bf16, and a sum in fp32 per head;
    normalised queries and keys are also kept in fp32 before normalisation. The feed-forward layer keeps the inputs and
    outputs of its products and the gate.
    """
    norm = FP32 if fuses_norms else 2 * FP32
    number = _number_bytes(numbers)
    inputs = number * (5 if numbers == "autocast" else 2)
    attention = 2 * number * (shape.score_width + _kept_key_width(shape)) + FP32 * shape.num_heads
    if shape.has_qk_norm:
        attention += norm * (shape.query_width + shape.key_width) + FP32 * (shape.num_heads + shape.num_kv_heads)
    feed_forward = number * shape.active_ffn_size * (4 if shape.ffn_matrices == 3 else 2)
    stream = shape.hidden_size * (2 * norm + inputs) + 2 * FP32
    return stream / stream_ways(layout) + (attention + feed_forward) / layout.tensor


def stream_ways(layout: ParallelLayout) -> int:
    """Return over how many GPUs the residual stream is divided."""
    return layout.tensor if layout.execution.sequence_parallel else 1


def vocab_ways(layout: ParallelLayout) -> int:
    """Return over how many GPUs the tables of the vocabulary are divided."""
    return layout.tensor if layout.execution.vocab_parallel else 1


def _kept_key_width(shape: DecoderShape) -> float:
    """Return the numbers of all keys that attention keeps: latent attention unpacks one for each query head."""
    return shape.score_width if shape.latent else float(shape.key_width)


def _number_bytes(numbers: Numbers) -> int:
    return FP32 if numbers == "fp32" else BF16


def chunk_bytes(shape: DecoderShape) -> float:
    """Return the scores and probabilities of one chunk of the loss, in fp32, freed before the backward pass."""
    rows = max(1, min(_CHUNK_ROWS, _CHUNK_SCORES // shape.vocab_size))
    return 2 * FP32 * rows * shape.vocab_size


def kv_bytes_per_token(shape: DecoderShape, kind: KvKind = "model") -> float:
    """Return the bytes of one token's keys and values in all layers, as in the engine's pool.

    One-byte data types have an fp32 scale per head.
    """
    if kind == "model":
        return shape.num_layers * shape.cached_numbers * shape.storage.kv
    return float(shape.num_layers * (shape.cached_numbers + FP32 * shape.cached_heads))


def kv_bytes(shape: DecoderShape, length: float, kind: KvKind = "model") -> float:
    """Return the bytes of one context's keys and values: layers with a sliding window hold only its tokens."""
    return kv_bytes_per_token(shape, kind) * shape.cached_tokens(length) / shape.num_layers


def serving_memory(
    shape: DecoderShape,
    rows: int,
    length: int,
    *,
    shards: int = 1,
    weight_kind: WeightKind = "model",
    kv_kind: KvKind = "model",
) -> Memory:
    """Return the memory of one of `shards` GPUs that serve `rows` contexts of this length together.

    `weight_kind` packs the weights of a checkpoint that is not quantised.
    """
    weights = shape.weight_bytes
    if weight_kind != "model":
        matrix_bytes, table_bytes = weight_bytes(weight_kind, BF16)
        weights = shape.matrix_weights * matrix_bytes + table_bytes * (shape.num_parameters - shape.matrix_weights)
    kv = rows * kv_bytes(shape, length, kv_kind)
    return Memory({"weights": weights / shards, "KV cache": kv / shards, "framework": FRAMEWORK_BYTES})


def _plain_memory(shape: PlainShape, layout: ParallelLayout) -> Memory:
    parts = _states(shape.num_parameters / layout.shard)
    parts["working weights"] = BF16 * shape.num_parameters
    parts["activations"] = layout.micro_batch * shape.activation_bytes
    return Memory(parts | {"framework": FRAMEWORK_BYTES})


def _states(held: float) -> dict[str, float]:
    return {"weights": FP32 * held, "gradients": FP32 * held, "optimizer": ADAM_BYTES * held, "average": FP32 * held}


@dataclass(frozen=True, slots=True)
class _Stage:
    """One stage of a decoder's pipeline on one GPU."""

    shape: DecoderShape
    layout: ParallelLayout
    length: int
    numbers: Numbers
    fuses_norms: bool
    is_last: bool

    @property
    def num_layers(self) -> int:
        return -(-self.shape.num_layers // self.layout.pipeline)

    @property
    def tokens(self) -> int:
        return self.layout.micro_batch * self.length

    def memory(self) -> Memory:
        parts = _states(stage_parameters(self.shape, self.layout) / self.layout.shard)
        parts |= self._working_weights()
        parts["activations"] = self.tokens * self._activations_per_token()
        if self.is_last:
            shape, ways = self.shape, vocab_ways(self.layout)
            parts["loss"] = FP32 * (self.tokens * shape.hidden_size + shape.table_parameters / ways)
            parts["loss"] += chunk_bytes(shape) / ways
        return Memory(parts | {"framework": FRAMEWORK_BYTES})

    def _working_weights(self) -> dict[str, float]:
        """Return the copies of weights that a step multiplies, and the gradients on their way."""
        layout, number = self.layout, _number_bytes(self.numbers)
        layer, outside = self.shape.layer_weights / layout.tensor, float(self.shape.outside_parameters)
        if layout.shard > 1 and layout.execution.keep_gathered:  # those of a stage are whole during a step
            return dict.fromkeys(("working weights", "buffers"), number * stage_parameters(self.shape, layout))
        if layout.shard > 1:  # two layers (one prefetched), the rest, largest gradients in bf16 and fp32
            return {"working weights": number * (2 * layer + outside), "buffers": (number + FP32) * max(layer, outside)}
        return {"working weights": BF16 * self.num_layers * layer} if self.numbers == "autocast" else {}

    def _activations_per_token(self) -> float:
        """Return the activations of the stage's layers for all micro-batches in flight, and the last's final norm."""
        shape, layout = self.shape, self.layout
        virtual, residual = layout.execution.virtual_stages, BF16 if self.numbers == "bf16" else FP32
        whole = kept_bytes_per_token(shape, layout, self.numbers, fuses_norms=self.fuses_norms)
        waiting = 1.0 if self.is_last else float(min(layout.pipeline, layout.accumulation))
        if virtual > 1 and layout.pipeline > 1:  # an interleaved rank starts (P - 1) / V stages more
            waiting += (layout.pipeline - 1) / (layout.pipeline * virtual) * waiting
        final = shape.hidden_size * FP32 * (1 if self.fuses_norms else 2) if self.is_last else 0
        if layout.checkpointing == "none":
            return waiting * self.num_layers * whole + final
        kept = residual * shape.hidden_size / stream_ways(layout)
        if layout.checkpointing == "selective":
            kept += kept_by_products(shape, layout.tensor, _number_bytes(self.numbers))
        return waiting * self.num_layers * kept + max(whole, final)


def kept_by_products(shape: DecoderShape, tensor: int = 1, number_bytes: int = BF16) -> float:
    """Return the bytes per token of a layer's product and attention results, for selective checkpointing."""
    inner = 2 * shape.score_width + 2 * _kept_key_width(shape) + (shape.ffn_matrices - 1) * shape.active_ffn_size
    return number_bytes * (inner / tensor + 2 * shape.hidden_size) + FP32 * shape.num_heads / tensor
