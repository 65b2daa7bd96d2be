"""Counts from a step's plan what the step must move and compute at least.

Counted are matrices (once a step, however many rows), embedding rows, keys and values read and written (a request's context
once, however many beams look at it) and the head's rows for the tokens in question. Left out are norms, biases and
activations, which are under a hundredth or stay in caches. Pure: no torch, no clock.
"""

from dataclasses import dataclass, field

from services.llm.engine.cost.model_size import NumberSizes, Shape
from services.llm.engine.cost.step_cost import StepCost, StepKind
from services.llm.engine.schedule.plan import Chunk, StepPlan
from services.llm.engine.schedule.sequence import Sequence


class CostModel:
    """Counts the steps of one decoder. `level_sizes` are the catalogue's code ranges, empty for text alone."""

    def __init__(self, shape: Shape, sizes: NumberSizes, level_sizes: tuple[int, ...] = ()) -> None:
        query, key = (shape.head_dim * heads for heads in (shape.num_attention_heads, shape.num_key_value_heads))
        layer = shape.hidden_size * (2 * query + 2 * key + 3 * shape.intermediate_size)
        self._matrix_numbers = shape.num_hidden_layers * layer
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
        """Count a plan that is about to run. A few operations for each request in it."""
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
            (self._matrix_numbers * sizes.matrix if tally.rows else 0.0)
            + (tally.rows + head_rows) * self._hidden_size * sizes.head
            + tally.kv_token_layers * sizes.kv_token_layer
            + tally.tail_tokens * self._tail_token_bytes
        )

    def _flops_of(self, tally: "_Tally") -> float:
        matrices = 2 * self._matrix_numbers * tally.rows
        head = 2 * self._hidden_size * tally.scores
        return float(matrices + head + self._flops_per_pair * tally.pair_layers)

    def _count_chunk(self, tally: "_Tally", chunk: Chunk) -> None:
        count, end = chunk.num_tokens, chunk.end
        tally.rows += count
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
            tally.scores += self._vocab_size

    def _count_beams(self, tally: "_Tally", sequence: Sequence) -> None:
        rows, context, spelled = sequence.num_beam_rows, sequence.num_computed, sequence.num_levels_done
        tally.rows += rows
        tally.kv_token_layers += self._seen_by_any(context, 1)
        tally.tail_tokens += rows * spelled
        seen = context + spelled
        tally.pair_layers += rows * (self._full_layers * seen + self._windowed_layers * min(seen, self._reach))
        tally.levels.add(spelled)
        tally.scores += rows * self._level_sizes[spelled]

    def _seen_by_any(self, end: int, num_rows: int) -> int:
        """Count cached positions that the last `num_rows` of `end` look at, summed over the layers."""
        return self._full_layers * end + self._windowed_layers * min(end, self._reach + num_rows - 1)


@dataclass(slots=True)
class _Tally:
    """Sums over a step's requests. A pair is one row looking at one position; `_layers` sums over the layers."""

    rows: int = 0
    kv_token_layers: int = 0
    tail_tokens: int = 0
    pair_layers: int = 0
    scores: int = 0
    scores_vocabulary: bool = False
    levels: set[int] = field(default_factory=set)


def _sum_to(start: int, end: int, reach: int | None = None) -> int:
    """Sum what rows start to end - 1 see: row i sees i + 1 positions, at most `reach`."""
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
