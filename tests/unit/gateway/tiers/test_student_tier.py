"""The student tier. Run: pytest tests/unit/gateway/tiers/test_student_tier.py."""

import threading
from collections.abc import Sequence

import numpy as np
import pytest

from services.contracts.recommend import Reason, Tier
from services.gateway.tiers import student
from tests.support.gateway.fakes import FakeStudent
from tests.unit.gateway.world import World


@pytest.mark.parametrize("fails", [False, True])
async def test_a_large_catalogue_is_ranked_beside_the_loop(
    world: World, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """The answer is the one of the loop's own thread, a failure's too, but another thread made it."""
    threads = set()
    rank = FakeStudent.rank

    def noted(self: FakeStudent, history: Sequence[int], allowed: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Record whether the loop's own thread ranks."""
        threads.add(threading.current_thread() is threading.main_thread())
        if fails:
            raise RuntimeError
        return rank(self, history, allowed, k)

    monkeypatch.setattr(FakeStudent, "rank", noted)
    expected = await world.recommend("short", request_id="small", k=3)
    monkeypatch.setattr(student, "_MAX_ITEMS_ON_THE_LOOP", 0)

    answer = await world.recommend("short", request_id="large", k=3)

    assert threads == {True, False}
    assert (answer.tier, answer.reason, answer.items) == (expected.tier, expected.reason, expected.items)
    assert (answer.tier is Tier.STUDENT) is not fails
    assert (answer.reason is Reason.STUDENT_FAILED) is fails


async def test_a_request_does_not_wait_for_the_thread_beyond_its_deadline(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Popularity answers when the thread is not done within the budget."""
    answered = threading.Event()
    monkeypatch.setattr(FakeStudent, "rank", lambda *_: answered.wait(60))
    monkeypatch.setattr(student, "_MAX_ITEMS_ON_THE_LOOP", 0)

    answer = await world.recommend("short", request_id="late", k=3, deadline_ms=40)
    answered.set()

    assert (answer.tier, answer.reason) == (Tier.POPULAR, Reason.STUDENT_FAILED)


async def test_the_llm_s_answer_does_not_wait_for_the_thread(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The student is the LLM's fallback: where the LLM has all items, a thread that others keep busy delays nothing."""
    answered = threading.Event()
    monkeypatch.setattr(FakeStudent, "rank", lambda *_: answered.wait(60))
    monkeypatch.setattr(student, "_MAX_ITEMS_ON_THE_LOOP", 0)

    answer = await world.recommend("long", k=3, deadline_ms=5_000)
    answered.set()

    assert answer.tier is Tier.LLM
    assert answer.stages_ms["rank"] < 2_000
