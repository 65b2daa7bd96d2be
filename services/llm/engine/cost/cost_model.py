"""The roofline cost of a step: the least bytes it must move and FLOPs it must compute, counted from its plan.

The roofline model (Williams, Waterman and Patterson 2009): a step takes at least its bytes over the memory bandwidth
and its FLOPs over the compute rate. Counted are matrices (read once per step, however many rows; after the last layer's
keys and values only rows that are read are multiplied), embedding rows, keys and values read and written (a request's
context once, however many beams attend to it) and the scored rows of the head. Not counted are norms, biases and
activations, which are under a hundredth of the total or in caches. Pure: no torch, no clock.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from models.decoder.config import DecoderConfig
from models.decoder.layer import MATRICES, num_matrix_weights
from services.llm.engine.config import KvKind, WeightKind, weight_bytes
from services.llm.engine.plan import Chunk, StepPlan
from services.llm.engine.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberSizes:
    """Storage sizes of a decoder.

    Bytes per number in the layers' matrices, the head and embedding, and a beam's tail; bytes per token's keys and
    values in a layer.
    """

    matrix: float
    head: float
    tail: float
    kv_token_layer: float


def number_sizes(
    shape: DecoderConfig, number_bytes: int, kv_kind: KvKind, weight_kind: WeightKind = "model"
) -> NumberSizes:
    """Return the sizes of a decoder whose dtype has `number_bytes`. A one-byte KV cache has an fp32 scale per head.

    Weight scales, one per row, are not counted; the multipliers of 4-bit weights are, a byte per 32 weights.
    """
    matrix, head = weight_bytes(weight_kind, number_bytes)
    head_bytes = shape.head_dim * number_bytes if kv_kind == "model" else shape.head_dim + 4
    return NumberSizes(
        matrix=matrix,
        head=head,
        tail=number_bytes,
        kv_token_layer=2 * shape.num_key_value_heads * head_bytes,
    )


class StepKind(StrEnum):
    """The kind of rows in a step."""

    PREFILL = "prefill"
    DECODE = "decode"
    BEAM = "beam"
    MIXED = "mixed"


@dataclass(frozen=True, slots=True)
class StepCost:
    """The least bytes and FLOPs of a step; a multiplication and its addition are two FLOPs."""

    kind: StepKind
    num_bytes: float
    flops: float


class CostModel:
    """Counts the cost of one decoder's steps.

    `level_sizes` are the catalogue's code ranges, empty for a text-only engine.
    """

    def __init__(self, shape: DecoderConfig, sizes: NumberSizes, level_sizes: tuple[int, ...] = ()) -> None:
        query, key = (shape.head_dim * heads for heads in (shape.num_attention_heads, shape.num_key_value_heads))
        self._matrix_numbers = num_matrix_weights(shape)
        after_values = (row for name, rows in MATRICES.items() if name != "qkv" for row in rows)
        self._numbers_after_values = sum(row.rows(shape) * row.columns(shape) for row in after_values)
        self._hidden_size = shape.hidden_size
        self._vocab_size = shape.vocab_size
        self._level_sizes = level_sizes
        self._sizes = sizes
        self._tail_token_bytes = 2 * shape.num_hidden_layers * key * sizes.tail
        self._flops_per_pair = 4 * query
        windowed = len(shape.window.layers) if shape.window is not None else 0
        self._full_layers = shape.num_hidden_layers - windowed
        self._windowed_layers = windowed
        self._reach = shape.window.num_sinks + shape.window.size if shape.window is not None else 0

    def of(self, plan: StepPlan) -> StepCost:
        """Return the cost of a plan that is about to run, in a few operations per request."""
        tally = _Tally()
        for chunk in plan.chunks:
            self._count_chunk(tally, chunk)
        for sequence in plan.beam_steps:
            self._count_beams(tally, sequence)
        return StepCost(_kind_of(plan), self._bytes_of(tally), self._flops_of(tally))

    def _bytes_of(self, tally: "_Tally") -> float:
        sizes = self._sizes
        head_rows = self._vocab_size if tally.scores_vocabulary else 0
        head_rows += sum(self._level_sizes[level] for level in tally.levels)
        return (
            self._matrix_numbers * sizes.matrix * tally.passes
            + (tally.rows + head_rows) * self._hidden_size * sizes.head
            + tally.kv_token_layers * sizes.kv_token_layer
            + tally.tail_tokens * self._tail_token_bytes
        )

    def _flops_of(self, tally: "_Tally") -> float:
        unread = tally.rows - tally.outputs
        matrices = 2 * (self._matrix_numbers * tally.rows - self._numbers_after_values * unread)
        head = 2 * self._hidden_size * tally.scores
        return float(matrices + head + self._flops_per_pair * tally.pair_layers)

    def _count_chunk(self, tally: "_Tally", chunk: Chunk) -> None:
        count, end = chunk.num_tokens, chunk.end
        tally.rows += count
        tally.outputs += chunk.num_outputs
        tally.passes = max(tally.passes, 1)
        tally.kv_token_layers += self._seen_by_any(end, count) + count * (self._full_layers + self._windowed_layers)
        tally.pair_layers += self._full_layers * _sum_to(chunk.start, end)
        if self._windowed_layers:
            tally.pair_layers += self._windowed_layers * _sum_to(chunk.start, end, self._reach)
        if not chunk.is_last:
            return
        if chunk.sequence.num_levels:
            tally.levels.add(0)
            tally.scores += self._level_sizes[0]
        else:
            tally.scores_vocabulary = True
            tally.scores += self._vocab_size * (1 + len(chunk.sequence.drafts))

    def _count_beams(self, tally: "_Tally", sequence: Sequence) -> None:
        context, rows_by_level = sequence.num_computed_tokens, sequence.next_beam_rows
        tally.passes = max(tally.passes, len(rows_by_level))
        for decoded, rows in enumerate(rows_by_level, start=sequence.num_levels_done):
            tally.rows += rows
            tally.outputs += rows
            tally.kv_token_layers += self._seen_by_any(context, 1)
            tally.tail_tokens += rows * decoded
            seen = context + decoded
            tally.pair_layers += rows * (self._full_layers * seen + self._windowed_layers * min(seen, self._reach))
            tally.levels.add(decoded)
            tally.scores += rows * self._level_sizes[decoded]

    def _seen_by_any(self, end: int, num_rows: int) -> int:
        """Count the cached positions that the last `num_rows` of `end` attend to, summed over the layers."""
        return self._full_layers * end + self._windowed_layers * min(end, self._reach + num_rows - 1)


@dataclass(slots=True)
class _Tally:
    """Sums over a step's requests. `outputs` are the rows whose hidden states are read.

    A pair is a row attending to a position; `_layers` sums over the layers. A pass reads all matrices; a step has one
    pass, or one for each level that it selects in sequence.
    """

    rows: int = 0
    outputs: int = 0
    passes: int = 0
    kv_token_layers: int = 0
    tail_tokens: int = 0
    pair_layers: int = 0
    scores: int = 0
    scores_vocabulary: bool = False
    levels: set[int] = field(default_factory=set)


def _sum_to(start: int, end: int, reach: int | None = None) -> int:
    """Sum the positions that rows start to end - 1 attend to: row i attends to i + 1 positions, at most `reach`."""
    if reach is None or end <= reach:
        return (end * (end + 1) - start * (start + 1)) // 2
    if start >= reach:
        return (end - start) * reach
    return _sum_to(start, reach) + (end - reach) * reach


def _kind_of(plan: StepPlan) -> StepKind:
    kinds = {StepKind.DECODE if chunk.sequence.is_decoding else StepKind.PREFILL for chunk in plan.chunks}
    if plan.beam_steps:
        kinds.add(StepKind.BEAM)
    return kinds.pop() if len(kinds) == 1 else StepKind.MIXED
