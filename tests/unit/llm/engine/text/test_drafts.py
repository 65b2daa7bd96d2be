"""Prompt-lookup drafts: their source, their number, and the distribution of texts that they verify."""

from collections import Counter

import numpy as np
import pytest
import torch

from models.decoder.window import Window
from services.llm.engine.plan import Chunk, StepPlan
from services.llm.engine.sampling_parameters import GREEDY, SampledToken, SamplingParams
from services.llm.engine.sequence import Sequence, TextWork
from services.llm.engine.text.drafts import MAX_ROWS, Drafter
from tests.support.engine.engine_scripts import EvenAndOdd
from tests.support.engine.engines import build_decoder, build_engine, build_items, drain
from tests.support.training.sequences import sequence_of

MOST = 4
BLOCK_TOKENS = 16
DECODER = build_decoder(build_items(depth=1))


def text(tokens: list[int], scope: bytes = b"", mask: EvenAndOdd | None = None, num_blocks: int = 4) -> Sequence:
    """Build a text whose last token is generated and not computed yet, in blocks of 16 tokens."""
    work = TextWork(sampling=GREEDY, stop_token_ids=frozenset(), mask=mask)
    sequence = sequence_of(tokens, list(range(num_blocks)), work=work, max_new_tokens=40, cache_scope=scope)
    sequence.num_prompt_tokens, sequence.num_computed_tokens = len(tokens) - 1, len(tokens) - 1
    sequence.generated = [SampledToken(tokens[-1])]
    return sequence


def drafts_of(drafter: Drafter, *texts: Sequence) -> list[tuple[int, ...]]:
    """Plan a step of these texts and return their drafts."""
    plan = drafter.with_drafts(StepPlan([Chunk(text, text.num_computed_tokens, 1) for text in texts]))
    assert [chunk.num_tokens for chunk in plan.chunks] == [1 + len(text.drafts) for text in texts]
    return [text.drafts for text in texts]


def drafter_of(most: int = MOST) -> Drafter:
    """Build a drafter without measured times."""
    return Drafter(most, BLOCK_TOKENS, max_num_batched_tokens=512)


def test_a_draft_continues_the_latest_longest_match() -> None:
    """Three equal tokens are a better match than one, and the latest occurrence is a better one than an earlier."""
    assert drafts_of(drafter_of(), text([1, 2, 3, 7, 8, 1, 2, 3, 9, 6, 3, 5, 1, 2, 3])) == [(9, 6, 3, 5)]
    assert drafts_of(drafter_of(), text([1, 2, 3, 7, 8, 4, 3])) == [(7, 8, 4, 3)]
    assert drafts_of(drafter_of(), text([1, 2, 3])) == [()]


def test_an_ended_text_serves_only_its_scope() -> None:
    """Drafts come from recent texts of the same cache scope, never from another scope's texts or from prompts."""
    drafter = drafter_of()
    before = text([1, 2, 3, 4], b"one")
    drafts_of(drafter, before)
    for token in (5, 6, 7):
        before.append_token(SampledToken(token))
    drafter.forget(before)

    assert drafts_of(drafter, text([9, 4, 5], b"one")) == [(6, 7)]
    assert drafts_of(drafter, text([9, 4, 5], b"two")) == [()]
    assert drafts_of(drafter, text([8, 2], b"one")) == [()]


def test_drafts_fit_the_blocks_and_the_token_limit() -> None:
    """Drafts fill free slots of held blocks, keep a slot for the token after them, and never pass `max_new_tokens`."""
    repeating = [1, 2] * 6
    nearly_full = text([3, *repeating], num_blocks=1)
    ending = text(repeating)
    ending.max_new_tokens = 3

    assert [len(drafts) for drafts in drafts_of(drafter_of(), nearly_full, ending)] == [2, 1]


def test_a_draft_that_the_grammar_forbids_is_cut() -> None:
    """Drafts end before the first token that the mask does not allow."""
    odd_then_even = text([3, 3, 4, 6, 9, 3], mask=EvenAndOdd())
    mask = TextWork.of(odd_then_even).mask
    assert mask is not None
    mask.take(3)

    assert drafts_of(drafter_of(), odd_then_even) == [(4,)]
    assert len(odd_then_even.draft_masks) == 2


@pytest.mark.parametrize("is_pending", [False, True])
def test_a_step_with_a_prompt_or_an_unknown_token_has_no_drafts(is_pending: bool) -> None:
    """Only steps of known last tokens have drafts."""
    repeating, other = text([1, 2] * 6), text([1, 2] * 6)
    if is_pending:
        other.num_pending = 1
    else:
        other.num_computed_tokens -= 2

    assert drafts_of(drafter_of(), repeating, other) == [(), ()]


def test_large_batches_have_no_drafts() -> None:
    """Rows and drafts together stay within the limit; a larger batch runs without speculation."""
    few, many = ([text([1, 2] * 6) for _ in range(number)] for number in (8, MAX_ROWS))

    assert sum(map(len, drafts_of(drafter_of(), *few))) == MAX_ROWS - 8
    assert drafts_of(drafter_of(), *many) == [()] * MAX_ROWS


@pytest.mark.parametrize(("row_s", "expected"), [(0.0, MOST), (0.15, 2), (0.9, 0)])
def test_drafts_end_where_rows_cost_more_than_they_yield(row_s: float, expected: int) -> None:
    """With half of the drafts right, the number of drafts has the most expected tokens per second."""
    drafter = drafter_of()
    for num_rows in range(1, 6):
        drafter.record_step_time(num_rows, 1.0 + row_s * (num_rows - 1))

    assert drafts_of(drafter, text([1, 2] * 6)) == [(1, 2, 1, 2)[:expected]]


def test_a_step_in_time_is_passed_where_more_rows_pay_again() -> None:
    """If the second row is expensive and further rows are free, all drafts are taken."""
    drafter = drafter_of()
    for num_rows, seconds in ((1, 1.0), (2, 1.6), (3, 1.6), (4, 1.6), (5, 1.6)):
        drafter.record_step_time(num_rows, seconds)

    assert drafts_of(drafter, text([1, 2] * 6)) == [(1, 2, 1, 2)]


def test_wrong_drafts_end_and_are_tried_again() -> None:
    """Drafts that are never right end when they cost time; sometimes one is tried."""
    drafter = drafter_of()
    num_drafts = []
    for _ in range(1_000):
        repeating = text([1, 2] * 6)
        num_drafts.append(len(drafts_of(drafter, repeating)[0]))
        drafter.record_step_time(1 + num_drafts[-1], 1.0 + 0.4 * num_drafts[-1])
        drafter.verify(repeating, [SampledToken(50)] * 5)

    assert drafter.counts.num_accepted == 0
    assert 2 < sum(num_drafts) < 0.02 * len(num_drafts)


def test_an_unknown_time_is_measured_with_one_draft_more() -> None:
    """Numbers of rows that were not measured recently are tried in order, however probable more drafts are."""
    drafter = drafter_of()
    drafter.record_step_time(1, 1.0)

    for num_drafts in (1, 2, 3):
        assert [len(drafts) for drafts in drafts_of(drafter, text([1, 2] * 6))] == [num_drafts]
        drafter.record_step_time(1 + num_drafts, 1.0)
    for _ in range(300):
        drafter.record_step_time(1, 1.0)
    assert [len(drafts) for drafts in drafts_of(drafter, text([1, 2] * 6))] == [1]


def test_verification_keeps_the_draws_up_to_the_first_wrong_draft() -> None:
    """The draw that replaces a wrong draft is kept, and all draws if every draft is right."""
    drafter = drafter_of()
    for draws, num_kept in ([5, 6, 7], 3), ([5, 9, 7], 2), ([1, 6, 7], 1):
        sequence = text([1, 2])
        sequence.drafts = (5, 6)

        assert drafter.verify(sequence, [SampledToken(draw) for draw in draws]) == [
            SampledToken(draw) for draw in draws[:num_kept]
        ]
    assert (drafter.counts.num_drafted, drafter.counts.num_accepted) == (6, 3)


@pytest.mark.parametrize("window", [None, Window(6, frozenset({0, 1}), num_sinks=1)])
def test_accepted_drafts_are_cached_like_generated_tokens(window: Window | None) -> None:
    """A text that repeats its prompt takes fewer steps, and its next turn finds all full blocks in the cache."""
    decoder = build_decoder(build_items(1), window=window)
    plain, drafting = (build_engine(decoder, None, num_speculative_tokens=number) for number in (0, 3))
    for engine in (plain, drafting):
        engine.add_text("one", [5, 6], max_new_tokens=40)
    expected, other = drain(plain)["one"], drain(drafting)["one"]
    turn = [5, 6, *expected.token_ids, 7]
    for engine in (plain, drafting):
        engine.add_text("two", turn, max_new_tokens=1)

    assert expected.token_ids == other.token_ids
    assert other.num_steps < expected.num_steps
    assert drain(plain)["two"].num_cached_tokens == drain(drafting)["two"].num_cached_tokens


@pytest.mark.parametrize(("dtype", "kind"), [("float32", "model"), ("bfloat16", "model"), ("bfloat16", "int8_all")])
def test_the_compiled_kernels_compute_drafts_bit_by_bit_like_tokens(dtype: str, kind: str) -> None:
    """The logprobs of a text are equal with and without drafts, to the last bit."""
    logprobs = []
    for number in (0, 7):
        decoder = build_decoder(build_items(1)).to(getattr(torch, dtype))
        engine = build_engine(
            decoder, None, cpu_kernels="compiled", weight_kind=kind, num_speculative_tokens=number, block_tokens=16
        )
        for index in range(3):
            sampling = SamplingParams(temperature=4.0, seed=index, num_logprobs=2)
            engine.add_text(f"{index}", [5, 6, 7] * index + [5], max_new_tokens=40, sampling=sampling)
        outcomes = drain(engine)
        logprobs.append([outcomes[name].tokens for name in sorted(outcomes)])
        assert number == 0 or engine.draft_counts.num_accepted > 10

    assert logprobs[0] == logprobs[1]


def test_sampled_texts_follow_the_distribution_of_plain_sampling() -> None:
    """The fourth and fifth tokens of texts are distributed as without drafts: a chi-square test over other seeds."""
    counts = [_pairs(0), _pairs(3)]
    pairs = [pair for pair in counts[0] | counts[1] if counts[0][pair] + counts[1][pair] >= 12]
    table = np.array([[count[pair] for pair in pairs] for count in counts], dtype=float)
    table = np.column_stack([table, [count.total() for count in counts] - table.sum(axis=1)])
    expected = table.sum(axis=1, keepdims=True) * table.sum(axis=0) / table.sum()
    statistic, freedom = float(((table - expected) ** 2 / expected).sum()), table.shape[1] - 1

    assert freedom > 8
    assert statistic < freedom + 3.1 * (2 * freedom) ** 0.5  # one in a thousand, by the normal approximation


def _pairs(num_drafts: int) -> Counter[tuple[int, ...]]:
    """Count the fourth and fifth tokens of sampled texts, with seeds of their own for each number of drafts."""
    engine, counts = build_engine(DECODER, None, num_speculative_tokens=num_drafts), Counter[tuple[int, ...]]()
    for batch in range(60):
        for index in range(8):
            sampling = SamplingParams(temperature=8.0, top_k=6, seed=1_000_000 * num_drafts + 8 * batch + index)
            engine.add_text(f"{index}", [5, 6, 5, 6], max_new_tokens=6, sampling=sampling)
        counts.update(outcome.token_ids[3:5] for outcome in drain(engine).values())
    assert num_drafts == 0 or engine.draft_counts.num_accepted > 100
    return counts
