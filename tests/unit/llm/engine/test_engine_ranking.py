"""Rankings: equal to scoring every item densely, whatever the depth, the masks, the batch and the cache."""

import numpy as np
import pytest
import torch

from models.decoder.window import Window
from services.errors import CheckpointError, InvalidRequest, Overloaded
from services.llm.engine.outcome import Status


def prompts_of(items, count: int, seed: int = 5) -> list[list[int]]:
    """Build prompts of random lengths over the whole vocabulary."""
    rng = np.random.default_rng(seed)
    return [[0, *rng.integers(1, 1 + sum(items.level_sizes), rng.integers(1, 60)).tolist()] for _ in range(count)]


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("heads", "kv_heads"),
    [(4, 2), pytest.param(4, 4, marks=pytest.mark.grid), pytest.param(4, 1, marks=pytest.mark.grid)],
)
def test_wide_beams_equal_exhaustive_scoring(
    depth, heads, kv_heads, items_of, decoder_of, engine_of, exhaustively, drained
) -> None:
    """With beams as wide as the catalogue, items and order equal scoring every item, masked or not, ties by index."""
    items = items_of(depth)
    decoder = decoder_of(items, heads=heads, kv_heads=kv_heads)
    engine = engine_of(decoder, items)
    rng = np.random.default_rng(1)
    prompts = prompts_of(items, 6)
    masks = [rng.random(50) < share for share in (1.0, 0.8, 0.5, 0.2, 0.05, 0.02)]

    for index, (prompt, allowed) in enumerate(zip(prompts, masks, strict=True)):
        engine.add_rank(str(index), prompt, k=20, allowed=allowed, beam_width=50)
    outcomes = drained(engine)

    for index, (prompt, allowed) in enumerate(zip(prompts, masks, strict=True)):
        wanted, scores = exhaustively(decoder, items, prompt, allowed, 20)
        assert outcomes[str(index)].item_indices.tolist() == wanted
        np.testing.assert_allclose(outcomes[str(index)].scores, scores, atol=1e-4)


@pytest.mark.parametrize("depth", [1, 3, 4])
@pytest.mark.parametrize(
    "window",
    [
        Window(9, frozenset({1}), num_sinks=3),
        pytest.param(Window(4, frozenset({0, 1})), marks=pytest.mark.grid),
        pytest.param(Window(17, frozenset({0, 1}), num_sinks=6), marks=pytest.mark.grid),
    ],
)
def test_windows_and_sinks_hold_for_prompts_and_beams(
    depth, window, items_of, decoder_of, engine_of, exhaustively, drained
) -> None:
    """With sliding layers, items and scores equal spelling each item densely under the same window, cold and cached."""
    items = items_of(depth)
    decoder = decoder_of(items, window=window)
    engine = engine_of(decoder, items, max_chunk_tokens=13)
    allowed = np.ones(50, dtype=bool)
    prompt = prompts_of(items, 1)[0] * 3

    for length in (len(prompt) - 30, len(prompt) - 7, len(prompt)):
        engine.add_rank(str(length), prompt[:length], k=20, allowed=allowed, beam_width=50)
        outcome = drained(engine)[str(length)]

        wanted, scores = exhaustively(decoder, items, prompt[:length], allowed, 20)
        assert outcome.item_indices.tolist() == wanted
        np.testing.assert_allclose(outcome.scores, scores, atol=1e-4)
    assert outcome.num_cached_tokens > 0


@pytest.mark.parametrize("depth", [2, 3, 4])
@pytest.mark.parametrize("beam_width", [1, 2, 5])
def test_narrow_beams_give_only_allowed_items_and_starve_never(
    depth, beam_width, items_of, decoder_of, engine_of, drained
) -> None:
    """However narrow the beam, every item given is allowed, none comes twice, and one comes for each beam at least."""
    items = items_of(depth)
    engine = engine_of(decoder_of(items), items)
    rng = np.random.default_rng(2)
    masks = [rng.random(50) < 0.15 for _ in range(8)]

    for index, (prompt, allowed) in enumerate(zip(prompts_of(items, 8), masks, strict=True)):
        engine.add_rank(str(index), prompt, k=10, allowed=allowed, beam_width=beam_width)
    outcomes = drained(engine)

    for index, allowed in enumerate(masks):
        found = outcomes[str(index)].item_indices
        assert allowed[found].all()
        assert len(set(found.tolist())) == len(found)
        assert min(beam_width, allowed.sum()) <= len(found) <= 10


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize(
    "knobs", [{"max_chunk_tokens": 3}, {"max_num_batched_tokens": 7}, {"max_running": 1}, {"tile_queries": 2}]
)
def test_chunks_and_batches_change_nothing(depth, knobs, items_of, decoder_of, engine_of, drained) -> None:
    """Prefill in chunks of any size, alone or batched, gives what one whole prefill alone gives."""
    items = items_of(depth)
    decoder = decoder_of(items)
    prompts = prompts_of(items, 9)
    allowed = np.ones(50, dtype=bool)

    engine = engine_of(decoder, items, **knobs)
    for index, prompt in enumerate(prompts):
        engine.add_rank(str(index), prompt, k=8, allowed=allowed)
    together = drained(engine)

    for index, prompt in enumerate(prompts):
        alone = engine_of(decoder, items)
        alone.add_rank("x", prompt, k=8, allowed=allowed)
        wanted = drained(alone)["x"]
        assert together[str(index)].item_indices.tolist() == wanted.item_indices.tolist()
        np.testing.assert_allclose(together[str(index)].scores, wanted.scores, atol=1e-4)


@pytest.mark.parametrize("depth", [1, 3])
def test_a_growing_history_prefills_only_what_is_new(
    depth, items_of, decoder_of, engine_of, exhaustively, drained
) -> None:
    """The next request of a user finds all full blocks of the last one cached, and answers as if there were no cache."""
    items = items_of(depth)
    decoder = decoder_of(items)
    engine = engine_of(decoder, items)
    allowed = np.ones(50, dtype=bool)
    prompt = [0, *np.random.default_rng(4).integers(1, 19, 40).tolist()]

    for length in (20, 21, 24, 24, 33):
        engine.add_rank(str(length), prompt[:length], k=5, allowed=allowed, beam_width=50)
        outcome = drained(engine)[str(length)]

        assert outcome.item_indices.tolist() == exhaustively(decoder, items, prompt[:length], allowed, 5)[0]
        assert outcome.num_cached_tokens == {20: 0, 21: 20, 24: 20, 33: 24}[length]


@pytest.mark.parametrize("depth", [1, 3])
def test_excluded_items_are_as_if_not_allowed(depth, items_of, decoder_of, engine_of, drained) -> None:
    """Leaving items out one by one gives what a mask without them gives, filters or none beside them."""
    items = items_of(depth)
    engine = engine_of(decoder_of(items), items)
    rng = np.random.default_rng(6)
    allowed, seen = rng.random(50) < 0.6, rng.integers(0, 50, 20)
    unseen = np.ones(50, dtype=bool)
    unseen[seen] = False

    asked = {"filtered": (allowed, seen), "mask": (allowed & unseen, ()), "all": (None, seen), "unseen": (unseen, ())}
    for name, (mask, excluded) in asked.items():
        engine.add_rank(name, [0, 1, 2], k=30, allowed=mask, excluded=excluded)
    found = {name: outcome.item_indices.tolist() for name, outcome in drained(engine).items()}

    assert found["filtered"] == found["mask"]
    assert found["all"] == found["unseen"]
    assert not set(found["all"]) & set(seen.tolist())


@pytest.mark.parametrize("first", ["rank", "text"])
def test_rankings_and_texts_share_what_is_cached(first, items_of, decoder_of, engine_of, drained) -> None:
    """What a ranking computed of a prompt, a text finds, and the other way round."""
    items = items_of(3)
    engine = engine_of(decoder_of(items), items)
    prompt = list(range(19))
    ask = {
        "rank": lambda: engine.add_rank("rank", prompt, k=3),
        "text": lambda: engine.add_text("text", prompt, max_new_tokens=2),
    }

    ask.pop(first)()
    drained(engine)
    [(second, again)] = ask.items()
    again()

    assert drained(engine)[second].num_cached_tokens == 16


def test_a_window_that_holds_no_code_is_refused(items_of, decoder_of, engine_of) -> None:
    """A beam must see its own code so far and the history's last token."""
    items = items_of(3)

    with pytest.raises(CheckpointError, match="window of 2"):
        engine_of(decoder_of(items, window=Window(2, frozenset({0}))), items)


def test_another_version_shares_nothing(items_of, decoder_of, engine_of) -> None:
    """Block names carry the bundle version, so equal tokens under other weights never meet."""
    items = items_of(1)
    names = []

    for version in ("v1", "v2"):
        engine = engine_of(decoder_of(items), items, version=version)
        engine.add_rank("a", list(range(20)), k=1, allowed=np.ones(50, dtype=bool))
        names.append(set(engine._scheduler.find("a").block_hashes))

    assert names[0].isdisjoint(names[1])


def test_nothing_allowed_is_an_empty_answer(items_of, decoder_of, engine_of, drained) -> None:
    """A mask that leaves nothing gives an empty ranking, not an error."""
    items = items_of(2)
    engine = engine_of(decoder_of(items), items)

    engine.add_rank("a", [0, 1], k=5, allowed=np.zeros(50, dtype=bool))

    outcome = drained(engine)["a"]
    assert (outcome.status, outcome.item_indices.tolist()) == (Status.DONE, [])


def test_the_queue_is_bounded(items_of, decoder_of, engine_of, drained) -> None:
    """A full queue refuses with Overloaded at once, and what was taken is answered."""
    items = items_of(1)
    engine = engine_of(decoder_of(items), items, max_waiting=3)
    allowed = np.ones(50, dtype=bool)
    for index in range(3):
        engine.add_rank(str(index), [0, 1], k=5, allowed=allowed)

    with pytest.raises(Overloaded):
        engine.add_rank("late", [0, 1], k=5, allowed=allowed)

    assert set(drained(engine)) == {"0", "1", "2"}


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
def test_what_could_never_run_is_refused_by_field(change, field, items_of, decoder_of, engine_of) -> None:
    """A request that could never run is refused when it is added, naming the field."""
    items = items_of(1)
    engine = engine_of(decoder_of(items), items)
    ask = {"request_id": "a", "prompt_token_ids": [0], "k": 3, "allowed": np.ones(50, dtype=bool)}
    engine.add_rank(**{**ask, "request_id": "taken"})

    with pytest.raises(InvalidRequest) as refused:
        engine.add_rank(**{**ask, **change})

    assert refused.value.field == field


@pytest.mark.parametrize("depth", [1, 3])
def test_bf16_stays_close_to_fp32(depth, items_of, decoder_of, engine_of, drained) -> None:
    """Weights and cache in bf16 give the same items' scores to bf16's precision."""
    items = items_of(depth)
    prompt = prompts_of(items, 1)[0]
    scores = []

    for dtype in (torch.float32, torch.bfloat16):
        engine = engine_of(decoder_of(items).to(dtype), items)
        engine.add_rank("a", prompt, k=50, allowed=np.ones(50, dtype=bool), beam_width=50)
        outcome = drained(engine)["a"]
        scores.append(outcome.scores[np.argsort(outcome.item_indices)])

    np.testing.assert_allclose(scores[0], scores[1], atol=0.5, rtol=0.05)
