"""The student tier."""

import threading
from collections.abc import Sequence

import numpy as np
import pytest

from models.mixer import Added
from services.contracts.recommend import Reason, Tier
from services.gateway.tiers import student
from tests.support.gateway.fakes import FakeStudent
from tests.unit.gateway.world import World


@pytest.mark.parametrize("fails", [False, True])
async def test_a_large_catalogue_is_ranked_beside_the_loop(
    world: World, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """A large catalogue is ranked in another thread, with the same answer, also for a failure."""
    threads = set()
    rank = FakeStudent.rank

    def noted(
        self: FakeStudent, history: Sequence[int], allowed: np.ndarray, k: int, added: Added | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Record whether the main thread ranks."""
        threads.add(threading.current_thread() is threading.main_thread())
        if fails:
            raise RuntimeError
        return rank(self, history, allowed, k, added)

    monkeypatch.setattr(FakeStudent, "rank", noted)
    expected = await world.recommend("short", request_id="small", k=3)
    monkeypatch.setattr(student, "_MAX_ITEMS_ON_THE_LOOP", 0)

    answer = await world.recommend("short", request_id="large", k=3)

    assert threads == {True, False}
    assert (answer.tier, answer.reason, answer.items) == (expected.tier, expected.reason, expected.items)
    assert (answer.tier is Tier.STUDENT) is not fails
    assert (answer.reason is Reason.STUDENT_FAILED) is fails


@pytest.mark.parametrize(
    ("user_id", "deadline_ms", "tier", "reason"),
    [
        ("short", 40, Tier.POPULAR, Reason.STUDENT_FAILED),
        ("long", 5_000, Tier.LLM, Reason.LLM_IN_TIME),
    ],
)
async def test_a_request_does_not_wait_for_a_busy_thread(
    world: World, monkeypatch: pytest.MonkeyPatch, user_id: str, deadline_ms: int, tier: Tier, reason: Reason
) -> None:
    """Popularity answers if the thread exceeds the budget; if the LLM fills the list, the student delays nothing."""
    answered = threading.Event()
    monkeypatch.setattr(FakeStudent, "rank", lambda *_: answered.wait(60))
    monkeypatch.setattr(student, "_MAX_ITEMS_ON_THE_LOOP", 0)

    answer = await world.recommend(user_id, k=3, deadline_ms=deadline_ms)
    answered.set()

    assert (answer.tier, answer.reason) == (tier, reason)
    assert answer.stages_ms["rank"] < 2_000
