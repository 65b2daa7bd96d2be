"""Bytes and FLOPs of a step equal counts by hand and a sum over rows."""

import pytest

from models.decoder.config import DecoderConfig
from models.decoder.window import Window
from services.llm.engine.cost.cost_model import CostModel, NumberSizes, StepKind, number_sizes
from services.llm.engine.plan import Chunk, StepPlan
from services.llm.engine.sampling_parameters import SampledToken
from services.llm.engine.sequence import Sequence
from tests.support.training.sequences import sequence_of

SHAPE = DecoderConfig(
    vocab_size=100,
    hidden_size=8,
    intermediate_size=16,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
    max_position_embeddings=64,
)
SIZES = NumberSizes(matrix=2, head=2, tail=2, kv_token_layer=16)
MATRIX_NUMBERS = 3 * (8 * 8 + 8 * 8 + 8 * 8 + 3 * 8 * 16)
"""Query and output 8x8 each, key and value 8x4 each, gate, up and down 8x16 each, in three layers."""


def text(num_tokens: int, *, num_new: int = 0) -> Sequence:
    """A text request with this many tokens, the last of which are generated."""
    return sequence_of(num_tokens, max_new_tokens=5, generated=[SampledToken(1)] * num_new)


def ranking(num_tokens: int, *, levels_done: int = 0, rows: tuple[int, ...] = (4, 6)) -> Sequence:
    """A ranking of three levels."""
    return sequence_of(num_tokens, num_levels=3, rows_by_level=rows, num_levels_done=levels_done)


def test_a_decode_step_by_hand() -> None:
    """One token at position 9: all matrices once, its embedding, the whole head, ten positions read and one written.

    Prefill beside it makes the step mixed.
    """
    sequence = text(10, num_new=2)
    sequence.num_computed_tokens = 9

    model, chunk = CostModel(SHAPE, SIZES), Chunk(sequence, 9, 1)
    cost = model.of(StepPlan(chunks=[chunk]))

    assert cost.kind is StepKind.DECODE
    assert model.of(StepPlan(chunks=[chunk, Chunk(text(4), 0, 4)])).kind is StepKind.MIXED
    assert cost.num_bytes == 2 * MATRIX_NUMBERS + (1 + 100) * 8 * 2 + 3 * (10 + 1) * 16
    assert cost.flops == 2 * MATRIX_NUMBERS + 2 * 8 * 100 + 3 * 10 * 4 * 8


def test_a_beam_step_by_hand() -> None:
    """Six beams at the third level: the context once for all, two places of each tail, only the level's rows of the head."""
    sequence = ranking(10, levels_done=2)
    sequence.num_computed_tokens = 10

    cost = CostModel(SHAPE, SIZES, (20, 30, 40)).of(StepPlan(beam_steps=[sequence]))

    assert cost.kind is StepKind.BEAM
    assert cost.num_bytes == 2 * MATRIX_NUMBERS + (6 + 40) * 8 * 2 + 3 * 10 * 16 + 6 * 2 * (2 * 3 * 4 * 2)
    assert cost.flops == 2 * MATRIX_NUMBERS * 6 + 2 * 8 * 40 * 6 + 6 * 3 * 12 * 4 * 8


def test_levels_in_one_step_cost_what_they_cost_one_by_one() -> None:
    """A recorded step of two levels reads matrices and context twice, as two steps do."""
    model, whole = CostModel(SHAPE, SIZES, (20, 30, 40)), ranking(10, levels_done=1)
    each = [ranking(10, levels_done=1), ranking(10, levels_done=2)]
    whole.levels_at_once = 3
    for sequence in (whole, *each):
        sequence.num_computed_tokens = 10

    cost, *costs = (model.of(StepPlan(beam_steps=[sequence])) for sequence in (whole, *each))

    assert cost.num_bytes == sum(one.num_bytes for one in costs)
    assert cost.flops == sum(one.flops for one in costs)


def test_a_chunk_in_the_middle_needs_no_head() -> None:
    """Prefill that does not reach the end of its prompt computes no logits."""
    sequence = text(30)

    cost = CostModel(SHAPE, SIZES).of(StepPlan(chunks=[Chunk(sequence, 8, 16)]))

    pairs = sum(position + 1 for position in range(8, 24))
    assert cost.kind is StepKind.PREFILL
    assert cost.num_bytes == 2 * MATRIX_NUMBERS + 16 * 8 * 2 + 3 * (24 + 16) * 16
    assert cost.flops == 2 * MATRIX_NUMBERS * 16 + 3 * pairs * 4 * 8


def test_a_ranking_prompt_scores_the_first_level() -> None:
    """Its last chunk reads the first level's rows of the head, not the vocabulary."""
    cost = CostModel(SHAPE, SIZES, (20, 30, 40)).of(StepPlan(chunks=[Chunk(ranking(5), 0, 5)]))

    assert cost.num_bytes == 2 * MATRIX_NUMBERS + (5 + 20) * 8 * 2 + 3 * (5 + 5) * 16


@pytest.mark.parametrize("start", [0, 3, 9, 20])
def test_a_window_bounds_what_is_seen(start: int) -> None:
    """Windowed layers see at most window and sinks, as summed row by row."""
    window = Window(size=6, layers=frozenset({0, 2}), num_sinks=2)
    shape = DecoderConfig(**{**{name: getattr(SHAPE, name) for name in SHAPE.__slots__}, "window": window})
    chunk = Chunk(text(50), start, 12)

    gap = (
        CostModel(SHAPE, SIZES).of(StepPlan(chunks=[chunk])).flops
        - CostModel(shape, SIZES).of(StepPlan(chunks=[chunk])).flops
    )

    unseen = sum(max(0, position + 1 - 8) for position in range(start, start + 12))
    assert gap == 2 * unseen * 4 * 8


def test_the_sizes_of_numbers() -> None:
    """One-byte keys and values have a scale of four bytes for each head; int8 halves the matrices alone, int8_all and int4 the table too, and 4 bits have a byte for each 32."""
    assert number_sizes(SHAPE, 2, "model").kv_token_layer == 2 * 4 * 2
    assert number_sizes(SHAPE, 2, "int8").kv_token_layer == 2 * (4 + 4)
    sizes = number_sizes(SHAPE, 2, "model", "int8")
    assert (sizes.matrix, sizes.head, sizes.tail) == (1, 2, 2)
    sizes = number_sizes(SHAPE, 2, "model", "int8_all")
    assert (sizes.matrix, sizes.head, sizes.tail) == (1, 1, 2)
    sizes = number_sizes(SHAPE, 2, "model", "int4")
    assert (sizes.matrix, sizes.head, sizes.tail) == (17 / 32, 1, 2)
