"""Prefetched batches equal directly made batches, in order, and the thread ends with the block."""

import threading

import pytest

from pipelines.training.batches import Batch, MakeBatch
from pipelines.training.fit import prefetch
from pipelines.training.fit.prefetch import ready_batches
from tests.support.training.lines import numbered
from tests.support.wait import wait_for
from tests.unit.pipelines.conftest import CPU


@pytest.fixture
def in_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefetch batches on the CPU, as for a GPU."""
    monkeypatch.setattr(prefetch, "is_worth_it", lambda _device: True)


def noted(number: int, made: list[int]) -> MakeBatch:
    """Return a function that makes a batch and records it."""

    def make() -> Batch:
        made.append(number)
        return numbered(number)

    return make


def failing() -> Batch:
    raise ValueError("no such item") from KeyError("item 7")


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("batches")}


@pytest.mark.usefixtures("in_thread")
def test_batches_come_in_order_and_at_most_two_are_made_ahead() -> None:
    """While a batch is in use, only the next two are made, and all batches arrive."""
    made: list[int] = []
    with ready_batches([noted(number, made) for number in range(6)], CPU) as batches:
        taken = [next(batches).tokens.item()]
        wait_for(lambda: len(made) >= 3)
        assert len(threads()) == 1
        assert made == [0, 1, 2]
        taken += [batch.tokens.item() for batch in batches]

    assert taken == made == list(range(6))
    assert not threads()


def test_on_the_cpu_a_batch_is_made_when_it_is_taken() -> None:
    """On the CPU, batches are made directly, without a thread or prefetching."""
    made: list[int] = []
    with ready_batches([noted(number, made) for number in range(3)], CPU) as batches:
        next(batches)
        assert made == [0]
        assert not threads()


@pytest.mark.usefixtures("in_thread")
def test_what_making_a_batch_raises_is_raised_at_its_place_with_its_cause() -> None:
    """Earlier batches are delivered, then the original error is raised and the thread ends."""
    taken = []
    with (
        pytest.raises(ValueError, match="no such item") as raised,
        ready_batches([lambda: numbered(0), failing, lambda: numbered(2)], CPU) as batches,
    ):
        taken += [batch.tokens.item() for batch in (next(batches), next(batches))]

    assert isinstance(raised.value.__cause__, KeyError)
    assert not threads()


@pytest.mark.usefixtures("in_thread")
@pytest.mark.parametrize("num_taken", [0, 1])
def test_the_thread_ends_when_the_step_fails(num_taken: int) -> None:
    """If the block fails, its error is raised and no thread remains."""

    def fail() -> None:
        with ready_batches([lambda: numbered(0)] * 5, CPU) as batches:
            for _ in range(num_taken):
                next(batches)
            raise RuntimeError("the step")

    with pytest.raises(RuntimeError, match="the step"):
        fail()

    assert not threads()
