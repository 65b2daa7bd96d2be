"""The engine's thread: results reach callers, cancels reach the engine, and a failed engine fails every caller."""

import asyncio
import threading
import time
from itertools import pairwise

import numpy as np
import pytest

from services.errors import DependencyUnavailable, InvalidRequest
from services.llm.engine.engine import Engine
from services.llm.engine.outcome import NewToken, SequenceStatus
from services.llm.engine.sampling_parameters import SampledToken
from services.llm.serving.engine_thread import EngineThread, Stepped
from services.llm.serving.streams import EngineStream, FinishedRequest
from tests.support.engine.engines import build_decoder, build_engine, build_items
from tests.support.wait import until


@pytest.fixture
def engine(request) -> Engine:
    """A tiny engine with a queue of four requests; asynchronous if the test's parameter is true."""
    items = build_items(1)
    return build_engine(build_decoder(items), items, max_waiting=4, is_asynchronous=getattr(request, "param", False))


def add(engine: Engine, request_id: str, now_s: float) -> None:
    engine.add_rank(request_id, [0, 1, 2], k=3, now_s=now_s)


def add_long(engine: Engine, request_id: str, now_s: float) -> None:
    engine.add_text(request_id, [0], max_new_tokens=60, now_s=now_s)


@pytest.mark.parametrize("engine", [True], indirect=True)
async def test_every_caller_gets_its_own_answer_of_an_asynchronous_engine(engine) -> None:
    """Callers get their own results; a step begins when the call that started it returns."""
    steps: list[Stepped] = []
    thread = EngineThread(engine, 1, steps.append)

    ended = await asyncio.gather(*(thread.run_request(add) for _ in range(3)), thread.run_request(add_long))
    thread.stop()
    await asyncio.to_thread(thread.join, 60.0)

    assert [len(end.outcome.item_indices) for end in ended] == [3, 3, 3, 0]
    assert len(ended[-1].outcome.token_ids) == 60
    assert all(end.finished_s >= end.outcome.started_s >= end.outcome.arrival_s for end in ended)
    with_results = [(before, step) for before, step in pairwise(steps) if step.ended or step.new_tokens]
    assert not steps[0].ended
    assert not steps[0].new_tokens
    assert len(with_results) >= 60
    assert all(step.began_s == before.finished_s for before, step in with_results)
    assert not thread.is_alive


class Hold:
    """Holds the engine after its first step until released, and keeps the ended requests."""

    def __init__(self) -> None:
        self.has_stepped, self.may_go_on = threading.Event(), threading.Event()
        self.ended: list[FinishedRequest] = []

    def __call__(self, stepped: Stepped) -> None:
        self.ended.extend(stepped.ended)
        self.has_stepped.set()
        self.may_go_on.wait(60.0)


async def test_a_cancelled_caller_cancels_its_request(engine) -> None:
    """If a caller is cancelled, its request ends as cancelled."""
    thread = EngineThread(engine, 1, hold := Hold())
    caller = asyncio.create_task(thread.run_request(add_long))
    await until(hold.has_stepped.is_set)

    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    hold.may_go_on.set()
    thread.stop()
    thread.join(60.0)

    assert [end.outcome.status for end in hold.ended] == [SequenceStatus.CANCELLED]


async def test_stopping_finishes_requests_in_flight(engine) -> None:
    """A stopped thread finishes its requests and rejects new ones; an invalid request raises the engine's error."""
    thread = EngineThread(engine, 1, lambda stepped: None)
    caller = asyncio.create_task(thread.run_request(add_long))
    with pytest.raises(InvalidRequest):
        await thread.run_request(lambda engine, request_id, now_s: engine.add_rank(request_id, [0], k=0, now_s=now_s))

    thread.stop()

    assert (await caller).outcome.status is SequenceStatus.LENGTH
    thread.join(60.0)
    assert not thread.is_alive
    with pytest.raises(DependencyUnavailable):
        await thread.run_request(add)


class BrokenMask:
    """A grammar that fails when the engine asks for its tokens."""

    failure = None

    def allowed(self) -> np.ndarray:
        raise RuntimeError("no such grammar")

    def take(self, token_id: int) -> None: ...

    def fork(self) -> "BrokenMask":
        return self


def add_broken(engine: Engine, request_id: str, now_s: float) -> None:
    engine.add_text(request_id, [0], max_new_tokens=3, mask=BrokenMask(), now_s=now_s)


@pytest.mark.parametrize("engine", [False, True], indirect=True)
async def test_a_request_that_makes_a_step_fail_fails_alone(engine) -> None:
    """Its caller gets DependencyUnavailable; requests of the same step, and later ones, get their answers."""
    alone = EngineThread(engine, 1, lambda stepped: None)
    expected = (await alone.run_request(add)).outcome.item_indices.tolist()
    alone.stop()
    alone.join(60.0)
    thread, may_go_on = EngineThread(engine, 1, lambda stepped: None), threading.Event()

    thread.call(lambda _: may_go_on.wait(60.0))
    callers = [asyncio.create_task(thread.run_request(request)) for request in (add, add_broken, add)]
    await asyncio.sleep(0)
    may_go_on.set()
    first, broken, last = await asyncio.gather(*callers, return_exceptions=True)
    later = await thread.run_request(add)
    thread.stop()
    thread.join(60.0)

    assert type(broken) is DependencyUnavailable
    assert [request.outcome.item_indices.tolist() for request in (first, last, later)] == [expected] * 3
    assert thread.failure is None
    engine.check_integrity()


async def test_a_failed_step_ends_texts_that_have_begun(engine) -> None:
    """Their callers have tokens already, and get DependencyUnavailable."""
    thread = EngineThread(engine, 1, hold := Hold())
    begun = asyncio.create_task(thread.run_request(add_long))
    await until(hold.has_stepped.is_set)
    broken = asyncio.create_task(thread.run_request(add_broken))
    await asyncio.sleep(0)
    hold.may_go_on.set()
    ends = await asyncio.gather(begun, broken, return_exceptions=True)
    thread.stop()
    thread.join(60.0)

    assert [type(end) for end in ends] == [DependencyUnavailable] * 2
    assert thread.failure is None


async def test_a_failed_engine_fails_every_caller(engine) -> None:
    """If several requests in a row fail when run one by one, all current and later callers get DependencyUnavailable.

    The cause is kept.
    """
    thread = EngineThread(engine, 1, lambda stepped: None)

    ends = await asyncio.gather(*(thread.run_request(add_broken) for _ in range(3)), return_exceptions=True)

    assert [type(end) for end in ends] == [DependencyUnavailable] * 3
    thread.join(60.0)
    assert str(thread.failure) == "no such grammar"
    with pytest.raises(DependencyUnavailable):
        await thread.run_request(add)


async def test_the_queue_time_includes_the_step_in_progress(engine) -> None:
    """A request arrives when the caller sends it, not when the engine's thread adds it."""
    thread = EngineThread(engine, 1, hold := Hold())
    first = asyncio.create_task(thread.run_request(add))
    await until(hold.has_stepped.is_set)
    second = asyncio.create_task(thread.run_request(add))
    await asyncio.sleep(0)
    sent_s = time.monotonic()
    hold.may_go_on.set()

    end = await second

    assert end.outcome.arrival_s <= sent_s
    assert (await first).outcome.status is SequenceStatus.DONE
    thread.stop()
    await asyncio.to_thread(thread.join, 60.0)


async def test_a_stream_has_its_results_in_order_and_an_error_after_them() -> None:
    """All results since the last call are returned together; an error is raised by every later call immediately."""
    stream = EngineStream(("0.0",))
    first, second, third = (NewToken("0.0", SampledToken(token_id), 0, 0.0) for token_id in (1, 2, 3))
    stream.put(first)
    stream.put(second)
    assert list(await stream.take()) == [first, second]

    stream.put(third)
    stream.put(DependencyUnavailable("the engine", 1.0))

    assert list(await stream.take()) == [third]
    for _ in range(2):
        with pytest.raises(DependencyUnavailable):
            await asyncio.wait_for(stream.take(), 60.0)


async def test_a_step_hangs_after_a_multiple_of_its_predicted_time(engine, monkeypatch) -> None:
    """A slow step that was predicted to be slow is healthy, even beyond `max_step_s`."""
    may_end = threading.Event()
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda now_s: (may_end.wait(10.0), step(now_s))[1])
    thread = EngineThread(engine, 1, lambda stepped: None)
    caller = asyncio.create_task(thread.run_request(add))
    await until(lambda: thread._step_called_s is not None)
    await asyncio.sleep(0.01)

    engine.expected_step_s = 60.0
    thread.check_health(0.001)
    engine.expected_step_s = 0.0
    with pytest.raises(RuntimeError, match="a step of the engine has been running"):
        thread.check_health(0.001)

    may_end.set()
    await caller
    thread.stop()
    await asyncio.to_thread(thread.join, 60.0)


async def test_the_thread_records_the_time_of_its_steps(engine) -> None:
    """Step times are recorded, so the engine can predict the next steps."""
    thread = EngineThread(engine, 1, lambda stepped: None)

    await thread.run_request(add_long)
    thread.stop()
    await asyncio.to_thread(thread.join, 60.0)

    assert engine.expected_step_s > 0
