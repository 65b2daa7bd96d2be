"""The engine's thread: answers reach their callers, cancels reach the engine, and a broken engine tells everyone."""

import asyncio
import threading
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from services.errors import DependencyAway, InvalidRequest, Overloaded
from services.llm.engine.config import EngineConfig
from services.llm.engine.engine import Engine
from services.llm.engine.outcome import Status
from services.llm.ranking.model import load_bundle
from services.llm.serving.engine_thread import EngineThread, Stepped
from tests.support.bundles import publish_bundle
from tests.support.wait import until

EVERYTHING = np.ones(30, dtype=bool)


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    """A tiny engine that holds four requests in its queue."""
    config = EngineConfig(num_blocks=64, max_waiting=4)
    return load_bundle(publish_bundle(tmp_path / "bundles", "v1"), config, torch.float32, "cpu").engine


@pytest.fixture
def thread(engine):
    """Its running thread."""
    thread = EngineThread(engine, 1, lambda stepped: None)
    yield thread
    thread.stop()
    thread.join(5.0)


def ask(engine: Engine, request_id: str, now_s: float) -> None:
    """Ask for three items."""
    engine.add_rank(request_id, [0, 1, 2], k=3, allowed=EVERYTHING, now_s=now_s)


def ask_for_long(engine: Engine, request_id: str, now_s: float) -> None:
    """Ask for text that takes many steps."""
    engine.add_text(request_id, [0], max_new_tokens=60, now_s=now_s)


async def test_every_caller_gets_its_own_answer(thread) -> None:
    """Callers at once are all answered, each after it arrived."""
    ended = await asyncio.gather(*(thread.run_request(ask) for _ in range(4)))

    assert all(len(end.outcome.item_indices) == 3 for end in ended)
    assert all(end.finished_s >= end.outcome.started_s >= end.outcome.arrival_s for end in ended)


async def test_an_engine_that_is_a_step_ahead_tells_when_each_step_began(tmp_path) -> None:
    """Callers are answered alike; a step began when the call that started it returned, and one that only started a step brought nothing."""
    config = EngineConfig(num_blocks=64, is_asynchronous=True)
    engine = load_bundle(publish_bundle(tmp_path / "bundles", "v1"), config, torch.float32, "cpu").engine
    steps: list[Stepped] = []
    thread = EngineThread(engine, 1, steps.append)

    ended = await asyncio.gather(*(thread.run_request(ask) for _ in range(4)), thread.run_request(ask_for_long))
    thread.stop()
    await asyncio.to_thread(thread.join, 5.0)

    assert [len(end.outcome.item_indices) for end in ended] == [3, 3, 3, 3, 0]
    assert len(ended[-1].outcome.token_ids) == 60
    brought = [(before, step) for before, step in pairwise(steps) if step.ended or step.new_tokens]
    assert not steps[0].ended
    assert not steps[0].new_tokens
    assert len(brought) >= 60
    assert all(step.began_s == before.finished_s for before, step in brought)
    assert not thread.is_alive


async def test_refusals_reach_the_caller(thread) -> None:
    """What the engine refuses is raised where it was asked."""

    def ask_for_nothing(engine: Engine, request_id: str, now_s: float) -> None:
        """Ask for no items."""
        engine.add_rank(request_id, [0], k=0, allowed=EVERYTHING, now_s=now_s)

    with pytest.raises(InvalidRequest):
        await thread.run_request(ask_for_nothing)
    ends = await asyncio.gather(*(thread.run_request(ask) for _ in range(300)), return_exceptions=True)

    assert {type(end) for end in ends if isinstance(end, Exception)} <= {Overloaded}


async def test_a_cancelled_caller_cancels_its_request(engine) -> None:
    """When a caller goes away its request ends as cancelled."""
    ends, has_stepped, cancelled = [], threading.Event(), threading.Event()

    def hold_the_first_step(stepped) -> None:
        """Keep the engine from going on before the caller is gone."""
        ends.extend(stepped.ended)
        has_stepped.set()
        cancelled.wait(5.0)

    thread = EngineThread(engine, 1, hold_the_first_step)
    caller = asyncio.create_task(thread.run_request(ask_for_long))
    await until(has_stepped.is_set)

    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    cancelled.set()
    thread.stop()
    thread.join(5.0)

    assert [end.outcome.status for end in ends] == [Status.CANCELLED]


async def test_stopping_lets_what_is_in_flight_finish(engine) -> None:
    """A stopped thread answers what it has, then ends and takes nothing more."""
    thread = EngineThread(engine, 1, lambda stepped: None)
    caller = asyncio.create_task(thread.run_request(ask_for_long))
    await asyncio.sleep(0)  # it asks in its first turn

    thread.stop()

    assert (await caller).outcome.status is Status.LENGTH
    thread.join(5.0)
    assert not thread.is_alive
    with pytest.raises(DependencyAway):
        await thread.run_request(ask)


async def test_a_broken_engine_tells_everyone_and_ends(engine) -> None:
    """When a step fails all callers hear that the engine is away, later ones too, and the reason is kept."""
    thread = EngineThread(engine, 1, lambda stepped: None)

    def ask_and_break(engine: Engine, request_id: str, now_s: float) -> None:
        """Break the engine after asking."""
        ask(engine, request_id, now_s)
        raise RuntimeError("no such kernel")

    ends = await asyncio.gather(
        *(thread.run_request(how) for how in (ask_for_long, ask_and_break, ask_for_long)), return_exceptions=True
    )

    assert [type(end) for end in ends] == [DependencyAway] * 3
    thread.join(5.0)
    assert str(thread.failure) == "no such kernel"
    with pytest.raises(DependencyAway):
        await thread.run_request(ask)


async def test_a_request_has_waited_since_it_was_asked(engine) -> None:
    """What a caller waits for the step that runs is part of its time in the queue."""
    going, go_on = threading.Event(), threading.Event()

    def hold(stepped) -> None:
        """Keep the engine in its first step."""
        going.set()
        go_on.wait(5.0)

    thread = EngineThread(engine, 1, hold)
    first = asyncio.create_task(thread.run_request(ask))
    await asyncio.to_thread(going.wait, 5.0)
    second = asyncio.create_task(thread.run_request(ask))
    await asyncio.sleep(0)
    asked_s = time.monotonic()
    go_on.set()

    end = await second

    assert end.outcome.arrival_s <= asked_s
    assert (await first).outcome.status is Status.DONE
    thread.stop()
    await asyncio.to_thread(thread.join, 5.0)
