"""Bytes and FLOPs of a step equal hand calculations and a sum over rows."""

import dataclasses
from typing import Any

import pytest

from models.decoder.window import Window
from services.llm.engine.cost.cost_model import CostModel, NumberSizes, StepKind, number_sizes
from services.llm.engine.plan import Chunk, StepPlan
from services.llm.engine.sampling_parameters import SampledToken
from services.llm.engine.sequence import Sequence
from tests.support.engine.attention_shapes import attention_shape
from tests.support.training.sequences import sequence_of

SHAPE = attention_shape(2, 1, 4, layers=3, vocab_size=100, hidden_size=8, intermediate_size=16)
SIZES = NumberSizes(matrix=2, head=2, tail=2, kv_token_layer=16)
MATRIX_NUMBERS = 3 * (8 * 8 + 8 * 8 + 8 * 8 + 3 * 8 * 16)
"""Query and output 8x8 each, key and value 8x4 each, gate, up and down 8x16 each, in three layers."""
AFTER_VALUES = 8 * 8 + 3 * 8 * 16
"""The last layer's output, gate, up and down, which rows that are not read skip."""


def text(num_tokens: int, **fields: Any) -> Sequence:
    return sequence_of(num_tokens, max_new_tokens=5, **fields)


def ranking(num_tokens: int, **fields: Any) -> Sequence:
    """Build a ranking of three levels, with four beams at the second and six at the third level."""
    return sequence_of(num_tokens, num_levels=3, rows_by_level=(4, 6), **fields)


WRITING = Chunk(text(10, generated=[SampledToken(1)] * 2, num_computed_tokens=9), 9, 1)
SELECTING = ranking(10, num_levels_done=2, num_computed_tokens=10)


@pytest.mark.parametrize(
    ("plan", "kind", "num_bytes", "flops"),
    [
        (  # all matrices once, one embedding, the whole head, ten positions read and one written
            StepPlan(chunks=[WRITING]),
            StepKind.DECODE,
            2 * MATRIX_NUMBERS + (1 + 100) * 8 * 2 + 3 * (10 + 1) * 16,
            2 * MATRIX_NUMBERS + 2 * 8 * 100 + 3 * 10 * 4 * 8,
        ),
        (  # with a prompt of four tokens in the same step
            StepPlan(chunks=[WRITING, Chunk(text(4), 0, 4)]),
            StepKind.MIXED,
            2 * MATRIX_NUMBERS + (5 + 100) * 8 * 2 + 3 * (11 + 8) * 16,
            2 * (MATRIX_NUMBERS * 5 - AFTER_VALUES * 3) + 2 * 8 * 200 + 3 * (10 + 10) * 4 * 8,
        ),
        (  # a chunk in the middle of its prompt needs no head
            StepPlan(chunks=[Chunk(text(30), 8, 16)]),
            StepKind.PREFILL,
            2 * MATRIX_NUMBERS + 16 * 8 * 2 + 3 * (24 + 16) * 16,
            2 * (MATRIX_NUMBERS - AFTER_VALUES) * 16 + 3 * sum(range(9, 25)) * 4 * 8,
        ),
        (  # a ranking's prompt reads the first level's rows of the head, not the whole vocabulary
            StepPlan(chunks=[Chunk(ranking(5), 0, 5)]),
            StepKind.PREFILL,
            2 * MATRIX_NUMBERS + (5 + 20) * 8 * 2 + 3 * (5 + 5) * 16,
            2 * (MATRIX_NUMBERS * 5 - AFTER_VALUES * 4) + 2 * 8 * 20 + 3 * sum(range(1, 6)) * 4 * 8,
        ),
        (  # six beams at the third level: context once for all, two tail positions each, the level's head rows
            StepPlan(beam_steps=[SELECTING]),
            StepKind.BEAM,
            2 * MATRIX_NUMBERS + (6 + 40) * 8 * 2 + 3 * 10 * 16 + 6 * 2 * (2 * 3 * 4 * 2),
            2 * MATRIX_NUMBERS * 6 + 2 * 8 * 40 * 6 + 6 * 3 * 12 * 4 * 8,
        ),
    ],
    ids=["decode", "mixed", "a chunk in the middle", "a ranking's prompt", "beams"],
)
def test_a_step_by_hand(plan, kind, num_bytes, flops) -> None:
    """The cost counts the bytes read and written, and the FLOPs."""
    cost = CostModel(SHAPE, SIZES, (20, 30, 40)).of(plan)

    assert (cost.kind, cost.num_bytes, cost.flops) == (kind, num_bytes, flops)


def test_levels_in_one_step_cost_what_they_cost_one_by_one() -> None:
    """A recorded step of two levels reads matrices and context twice, like two steps."""
    model, at = CostModel(SHAPE, SIZES, (20, 30, 40)), {"num_computed_tokens": 10}
    whole = ranking(10, num_levels_done=1, levels_at_once=3, **at)
    levels = [ranking(10, num_levels_done=1, **at), ranking(10, num_levels_done=2, **at)]
    cost, *costs = (model.of(StepPlan(beam_steps=[sequence])) for sequence in (whole, *levels))

    assert cost.num_bytes == sum(level_cost.num_bytes for level_cost in costs)
    assert cost.flops == sum(level_cost.flops for level_cost in costs)


@pytest.mark.parametrize("start", [0, 3, 9, 20])
def test_a_window_bounds_what_is_seen(start: int) -> None:
    """Windowed layers attend to at most window and sinks, checked row by row."""
    window = Window(size=6, layers=frozenset({0, 2}), num_sinks=2)
    shape, plan = dataclasses.replace(SHAPE, window=window), StepPlan(chunks=[Chunk(text(50), start, 12)])

    gap = CostModel(SHAPE, SIZES).of(plan).flops - CostModel(shape, SIZES).of(plan).flops

    unseen = sum(max(0, position + 1 - 8) for position in range(start, start + 12))
    assert gap == 2 * unseen * 4 * 8


def test_the_sizes_of_numbers() -> None:
    """Byte sizes follow from the kinds of weights and KV cache, including scales."""
    assert number_sizes(SHAPE, 2, "model").kv_token_layer == 2 * 4 * 2
    assert number_sizes(SHAPE, 2, "int8").kv_token_layer == 2 * (4 + 4)
    sizes = number_sizes(SHAPE, 2, "model", "int8")
    assert (sizes.matrix, sizes.head, sizes.tail) == (1, 2, 2)
    sizes = number_sizes(SHAPE, 2, "model", "int8_all")
    assert (sizes.matrix, sizes.head, sizes.tail) == (1, 1, 2)
    sizes = number_sizes(SHAPE, 2, "model", "int4")
    assert (sizes.matrix, sizes.head, sizes.tail) == (17 / 32, 1, 2)
