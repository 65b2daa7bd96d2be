"""Text decode: cached turns, followers, errors, windows. The served text's tests compare with transformers."""

import copy

import numpy as np
import pytest

from models.decoder.window import Window
from services.errors import InvalidRequest
from services.llm.engine.outcome import SequenceStatus
from services.llm.engine.sampling_parameters import SamplingParams
from tests.support.engine.engines import build_decoder, build_engine, build_items, drain

DECODER = build_decoder(build_items(depth=1))
"""A decoder with a vocabulary of 61 tokens."""


class FailingMask:
    """Allows every token of the vocabulary, and fails at the third token."""

    def __init__(self) -> None:
        self.failure: str | None = None
        self.num_taken = 0

    def allowed(self) -> np.ndarray:
        return np.full(2, -1, dtype=np.int32)

    def take(self, _: int) -> None:
        """Count a token."""
        self.num_taken += 1
        self.failure = "too many items" if self.num_taken == 3 else None

    def fork(self) -> "FailingMask":
        return copy.copy(self)


@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_a_failing_grammar_ends_its_text_at_once(is_asynchronous: bool) -> None:
    """The text ends without the failing token, and the concurrent text is not affected."""
    engine = build_engine(DECODER, None, is_asynchronous=is_asynchronous)
    engine.add_text("guided", [1, 2], max_new_tokens=20, mask=FailingMask())
    engine.add_text("plain", [1, 2], max_new_tokens=6)

    outcomes = drain(engine)

    assert (outcomes["guided"].status, len(outcomes["guided"].tokens)) == (SequenceStatus.FAILED, 2)
    assert (outcomes["plain"].status, len(outcomes["plain"].tokens)) == (SequenceStatus.LENGTH, 6)


def test_a_conversation_goes_on_from_its_cache() -> None:
    """Generated tokens are cached like prompts, so the next turn prefills only its own tokens."""
    engine = build_engine(DECODER, None)
    engine.add_text("one", list(range(2, 12)), max_new_tokens=11)
    turn = [*range(2, 12), *drain(engine)["one"].token_ids]

    engine.add_text("two", [*turn, 7], max_new_tokens=1)

    assert drain(engine)["two"].num_cached_tokens == 20


def test_a_leader_that_ends_early_does_not_block_its_followers() -> None:
    """If the leader is cancelled before its prompt is computed, its followers run without it."""
    engine = build_engine(DECODER, None)
    engine.add_text("0", list(range(1, 22)), max_new_tokens=5)
    engine.add_text("1", list(range(1, 22)), max_new_tokens=5, after="0")

    engine.cancel("0")
    outcomes = drain(engine)

    assert (outcomes["0"].status, outcomes["1"].status) == (SequenceStatus.CANCELLED, SequenceStatus.LENGTH)


@pytest.mark.parametrize(
    ("num_prompt", "fields", "refusal"),
    [
        (41, {}, "prompt: 41 tokens long; send 1 to 39"),
        (40, {}, "prompt: 40 tokens long; send 1 to 39"),
        (39, {"max_new_tokens": 2}, "max_new_tokens: 2 after a prompt of 39; send at most 1"),
        (3, {"max_new_tokens": 500}, "max_new_tokens: 500 after a prompt of 3; send at most 37"),
        (1, {"max_new_tokens": 0}, "max_new_tokens: "),
        (1, {"sampling": SamplingParams(logit_bias={61: 1.0})}, "logit_bias"),
    ],
)
def test_an_impossible_request_is_refused_by_field(num_prompt, fields, refusal) -> None:
    """The error names the prompt if no token fits, else the invalid field; the proposed values are accepted."""
    engine = build_engine(DECODER, None, num_blocks=10)

    with pytest.raises(InvalidRequest) as refused:
        engine.add_text("a", [5] * num_prompt, **{"max_new_tokens": 1, **fields})

    assert str(refused.value).startswith(refusal)
    engine.add_text("a", [5] * 39, max_new_tokens=1)
    engine.add_text("b", [5] * 3, max_new_tokens=37)


def test_a_text_longer_than_the_pool_needs_a_window_in_every_layer() -> None:
    """Blocks behind the window are freed only if all layers have a window; otherwise a long text is rejected."""
    windowed, full = (
        build_engine(
            build_decoder(build_items(1), window=Window(8, frozenset(layers))), None, num_blocks=6, max_chunk_tokens=8
        )
        for layers in ({0, 1}, {0})
    )

    windowed.add_text("long", [1, 2, 3], max_new_tokens=200)

    assert (windowed.max_tokens, full.max_tokens) == (256, 24)
    with pytest.raises(InvalidRequest, match="max_new_tokens: 200 after a prompt of 3; send at most 21"):
        full.add_text("long", [1, 2, 3], max_new_tokens=200)
