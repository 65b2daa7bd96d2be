"""Rankings equal dense scores of every item for any depth, mask, batch and cache state."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from models.decoder.window import Window
from services.errors import CheckpointError, InvalidRequest
from services.llm.engine.outcome import SequenceStatus
from tests.support.engine.engines import build_decoder, build_engine, build_items, drain, exhaustive_ranking


def prompts_of(items, count: int, seed: int = 5) -> list[list[int]]:
    """Build prompts of random lengths over the whole vocabulary."""
    rng = np.random.default_rng(seed)
    return [[0, *rng.integers(1, 1 + sum(items.level_sizes), rng.integers(1, 60)).tolist()] for _ in range(count)]


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("heads", "kv_heads"),
    [(4, 2), pytest.param(4, 4, marks=pytest.mark.grid), pytest.param(4, 1, marks=pytest.mark.grid)],
)
def test_wide_beams_equal_exhaustive_scoring(depth, heads, kv_heads) -> None:
    """With beams as wide as the catalogue, items and order equal exhaustive scoring, masked or not, ties by index."""
    items = build_items(depth)
    decoder = build_decoder(items, heads=heads, kv_heads=kv_heads)
    engine = build_engine(decoder, items)
    rng = np.random.default_rng(1)
    prompts = prompts_of(items, 6)
    masks = [rng.random(50) < share for share in (1.0, 0.8, 0.5, 0.2, 0.05, 0.02)]

    for index, (prompt, allowed) in enumerate(zip(prompts, masks, strict=True)):
        engine.add_rank(str(index), prompt, k=20, allowed=allowed, beam_width=50)
    outcomes = drain(engine)

    for index, (prompt, allowed) in enumerate(zip(prompts, masks, strict=True)):
        wanted, scores = exhaustive_ranking(decoder, items, prompt, allowed, 20)
        assert outcomes[str(index)].item_indices.tolist() == wanted
        np.testing.assert_allclose(outcomes[str(index)].scores, scores, atol=1e-4)


@pytest.mark.parametrize("depth", [1, 3])
def test_scores_over_the_vocabulary_equal_dense_log_probabilities(depth) -> None:
    """Codes with one continuation cost probability too; items of one code follow one another by their tie ranks."""
    items = build_items(depth)
    decoder = build_decoder(items)
    ranks = np.random.default_rng(4).permutation(50)
    items = replace(items, scores="vocabulary", tie_ranks=ranks)
    (prompt,) = prompts_of(items, 1)
    engine = build_engine(decoder, items)
    engine.add_rank("one", prompt, k=50, beam_width=50)
    outcome = drain(engine)["one"]

    _, scores = exhaustive_ranking(decoder, items, prompt, np.ones(50, dtype=bool), 50)
    np.testing.assert_allclose(outcome.scores, scores, atol=1e-4)
    assert sorted(outcome.item_indices.tolist()) == list(range(50))
    for first, second in pairwise(outcome.item_indices.tolist()):
        if (items.codes[first] == items.codes[second]).all():
            assert ranks[first] < ranks[second]


@pytest.mark.parametrize("depth", [1, 3, 4])
@pytest.mark.parametrize(
    "window",
    [
        None,
        Window(9, frozenset({1}), num_sinks=3),
        pytest.param(Window(4, frozenset({0, 1})), marks=pytest.mark.grid),
        pytest.param(Window(17, frozenset({0, 1}), num_sinks=6), marks=pytest.mark.grid),
    ],
)
def test_a_growing_history_prefills_only_what_is_new(depth, window) -> None:
    """A longer history finds all full blocks of the previous request cached, and gets the dense items and scores.

    This also holds with sliding windows and sinks.
    """
    items = build_items(depth)
    decoder = build_decoder(items, window=window)
    engine = build_engine(decoder, items, max_chunk_tokens=13)
    allowed = np.ones(50, dtype=bool)
    prompt = prompts_of(items, 1)[0] * 3
    longest, cached = len(prompt), 0

    for length in (longest - 30, longest - 29, longest - 7, longest - 7, longest):
        engine.add_rank(str(length), prompt[:length], k=20, allowed=allowed, beam_width=50)
        outcome = drain(engine)[str(length)]

        wanted, scores = exhaustive_ranking(decoder, items, prompt[:length], allowed, 20)
        assert outcome.item_indices.tolist() == wanted
        np.testing.assert_allclose(outcome.scores, scores, atol=1e-4)
        assert outcome.num_cached_tokens == min(cached, (length - 1) // 4 * 4)
        cached = length // 4 * 4


def test_a_tenant_finds_only_its_own_prefixes() -> None:
    """The number of cached tokens does not reveal that another tenant's user has the same history."""
    items = build_items(2)
    engine = build_engine(build_decoder(items), items)
    prompt = prompts_of(items, 1)[0] * 3
    num_cached = []
    for number, tenant in enumerate(("", "acme", "bolt", "", "acme", "bolt")):
        engine.add_rank(str(number), prompt, k=20, tenant=tenant)
        num_cached.append(drain(engine)[str(number)].num_cached_tokens)

    assert num_cached == [0] * 3 + [(len(prompt) - 1) // 4 * 4] * 3


def test_a_window_shorter_than_a_code_is_refused() -> None:
    """A window must cover an item's code and the history's last token."""
    items = build_items(3)

    with pytest.raises(CheckpointError, match="window of 2"):
        build_engine(build_decoder(items, window=Window(2, frozenset({0}))), items)


def test_nothing_allowed_is_an_empty_answer() -> None:
    """A mask without items gives an empty ranking, not an error."""
    items = build_items(2)
    engine = build_engine(build_decoder(items), items)

    engine.add_rank("a", [0, 1], k=5, allowed=np.zeros(50, dtype=bool))

    outcome = drain(engine)["a"]
    assert (outcome.status, outcome.item_indices.tolist()) == (SequenceStatus.DONE, [])


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"prompt_token_ids": []}, "prompt"),
        ({"prompt_token_ids": [0] * 300}, "prompt"),
        ({"prompt_token_ids": [0, 61]}, "prompt"),
        ({"k": 0}, "k"),
        ({"allowed": np.ones(49, dtype=bool)}, "allowed"),
        ({"allowed": np.ones(50)}, "allowed"),
        ({"excluded": [3, 50]}, "excluded"),
        ({"excluded": [-1]}, "excluded"),
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": -3}, "beam_width"),
        ({"request_id": "taken"}, "request_id"),
        ({"request_id": "taken", "allowed": np.zeros(50, dtype=bool)}, "request_id"),
    ],
)
def test_an_impossible_request_is_refused_by_field(change, field) -> None:
    """The request fails when it is added, and the error names the field."""
    items = build_items(1)
    engine = build_engine(build_decoder(items), items)
    request = {"request_id": "a", "prompt_token_ids": [0], "k": 3, "allowed": np.ones(50, dtype=bool)}
    engine.add_rank(**{**request, "request_id": "taken"})

    with pytest.raises(InvalidRequest) as refused:
        engine.add_rank(**{**request, **change})

    assert refused.value.field == field


def test_bf16_stays_close_to_fp32() -> None:
    """Weights and cache in bf16 give the same scores to bf16's precision."""
    items = build_items(3)
    scores = []

    for dtype in (torch.float32, torch.bfloat16):
        engine = build_engine(build_decoder(items).to(dtype), items)
        engine.add_rank("a", prompts_of(items, 1)[0], k=50, beam_width=50)
        outcome = drain(engine)["a"]
        scores.append(outcome.scores[np.argsort(outcome.item_indices)])

    np.testing.assert_allclose(scores[0], scores[1], atol=0.5, rtol=0.05)
