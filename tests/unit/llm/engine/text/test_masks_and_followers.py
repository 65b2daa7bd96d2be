"""Masks restrict the drawn tokens, and requests with one prompt compute it once."""

import numpy as np
import pytest

from services.llm.engine.outcome import Status
from services.llm.engine.text.parameters import SamplingParams
from tests.unit.llm.engine.conftest import build_decoder, build_engine, build_items, drain

DECODER = build_decoder(build_items(depth=1))
PROMPT = list(range(1, 22))


class Alternating:
    """A mask that allows even and odd tokens in turn, and records the tokens."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def allowed(self) -> np.ndarray:
        """Return the bits of one half of the tokens."""
        pattern = 0x55555555 if len(self.taken) % 2 == 0 else 0xAAAAAAAA
        return np.array([pattern] * 2, dtype=np.uint32).view(np.int32)

    def take(self, token_id: int) -> None:
        """Record a token."""
        self.taken.append(token_id)


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_only_allowed_tokens_are_drawn(temperature: float) -> None:
    """Every token is allowed by the mask at its place and reported to it once; other requests are not restricted."""
    engine, mask = build_engine(DECODER, None), Alternating()
    sampling = SamplingParams(temperature=temperature, seed=3, num_logprobs=1)

    engine.add_text("free", PROMPT, max_new_tokens=20, sampling=sampling)
    engine.add_text("held", PROMPT, max_new_tokens=20, sampling=sampling, mask=mask)
    outcomes = drain(engine)
    alone = build_engine(DECODER, None)
    alone.add_text("free", PROMPT, max_new_tokens=20, sampling=sampling)

    assert [token_id % 2 for token_id in outcomes["held"].token_ids] == [0, 1] * 10
    assert mask.taken == list(outcomes["held"].token_ids)
    assert outcomes["free"].token_ids == drain(alone)["free"].token_ids


def test_followers_wait_for_their_leaders_prompt() -> None:
    """Followers of a request with the same prompt find it cached, and have the same greedy tokens."""
    engine = build_engine(DECODER, None, max_chunk_tokens=8)
    engine.add_text("0", PROMPT, max_new_tokens=5)
    for index in (1, 2):
        engine.add_text(str(index), PROMPT, max_new_tokens=5, after="0")

    outcomes = drain(engine)

    assert [outcomes[str(index)].num_cached_tokens for index in range(3)] == [0, 20, 20]
    assert len({outcome.token_ids for outcome in outcomes.values()}) == 1


def test_a_leader_that_ends_early_does_not_block_its_followers() -> None:
    """When it is cancelled before its prompt is computed, its followers run alone."""
    engine = build_engine(DECODER, None)
    engine.add_text("0", PROMPT, max_new_tokens=5)
    engine.add_text("1", PROMPT, max_new_tokens=5, after="0")

    engine.cancel("0")
    outcomes = drain(engine)

    assert outcomes["0"].status is Status.CANCELLED
    assert outcomes["1"].status is Status.LENGTH


def test_a_text_that_is_finished_from_outside_is_done() -> None:
    """A caller can end its request as done, with the tokens so far."""
    engine = build_engine(DECODER, None)
    engine.add_text("0", PROMPT, max_new_tokens=50)
    while not engine.new_tokens:
        engine.step(0.0)

    engine.cancel("0", Status.DONE)
    outcomes = engine.step(0.0)

    assert [outcome.status for outcome in outcomes] == [Status.DONE]
    assert len(outcomes[0].token_ids) >= 1
    assert engine.load().kv_cache_usage == 0
