"""Requests of names in memory against requests of a gateway with one name: each in a process of its own, in turn.

While one process is measured the other is stopped (SIGSTOP), so that neither takes time from the other, and both meet
the same spells of a machine's noise.
"""

import asyncio
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import structlog

from benchmarks.many.gateway import RATE_RPS, LocalAnswer, MeasuredPlane, drawn, gateway, latency, outcome
from benchmarks.many.store import publish_many

_MIN_STAY_S = 10.0
_NUM_TURNS = 5
"""Turns of each gateway in a round."""
_WARM_UP_S = 0.5
"""Of each turn before its measurement."""


@dataclass(frozen=True, slots=True)
class _Turn:
    """The answers of a turn, the loads meanwhile, and the CPU seconds of the threads that load."""

    answers: list[LocalAnswer]
    loads: float
    loading_cpu_s: float


class _Gateway:
    """A gateway in another process, which is stopped between its turns."""

    def __init__(self, url: str, cache: Path, names: Sequence[str], room: int | None) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._connection, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(theirs, url, cache, names, room), daemon=True)
        self._process.start()

    def ask(self, names: Sequence[str]) -> _Turn:
        """Request these names at the fixed rate."""
        self._signal(signal.SIGCONT)
        self._connection.send(names)
        turn: _Turn = self._connection.recv()
        self._signal(signal.SIGSTOP)
        return turn

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        self._connection.send(None)
        self._process.join()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)


async def measure_rounds(
    url: str, folder: Path, num_names: int, room: int, num_requests: int, num_rounds: int
) -> AsyncIterator[dict[str, Any]]:
    """Yield the row."""
    names = [f"name-{number}" for number in range(num_names)]
    await asyncio.to_thread(folder.mkdir)
    await asyncio.to_thread(publish_many, url, names, folder)
    with (
        closing(_Gateway(url, folder / "one", names[:1], None)) as single,
        closing(_Gateway(url, folder / "warm", names, room)) as many,
    ):
        many.ask(drawn(names, num_requests, seed=num_rounds))
        rounds = []
        for seed in range(num_rounds):
            asked = np.array_split(drawn(names, num_requests, seed), _NUM_TURNS)
            rounds.append([(single.ask([names[0]] * (len(some) // 2)), many.ask(some.tolist())) for some in asked])
    rows = [_row(turns) for turns in rounds]
    yield {"row": "warm", **_row(list(chain.from_iterable(rounds))), "rounds": rows}


def _joined(turns: Sequence[_Turn]) -> _Turn:
    return _Turn(
        [answer for turn in turns for answer in turn.answers],
        sum(turn.loads for turn in turns),
        sum(turn.loading_cpu_s for turn in turns),
    )


def _row(turns: Sequence[tuple[_Turn, _Turn]]) -> dict[str, Any]:
    """Return the figures of the requests of one name, and of those of many whose name was in memory."""
    single, many = map(_joined, zip(*turns, strict=True))
    known = latency([answer for answer in many.answers if answer.was_loaded])
    one = latency(single.answers)
    return {
        **{f"one_{name}": value for name, value in one.items()},
        **{f"warm_{name}": value for name, value in known.items()},
        "p99_to_one": known["p99_ms"] / one["p99_ms"],
        "loads": many.loads,
        "loading_cores": many.loading_cpu_s * RATE_RPS / len(many.answers),
        **outcome(many.answers),
    }


def _serve(connection: Connection, url: str, cache: Path, names: Sequence[str], room: int | None) -> None:
    """Take the turns of the other process until it sends None."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    asyncio.run(_answer(connection, url, cache, names, room))


async def _answer(connection: Connection, url: str, cache: Path, names: Sequence[str], room: int | None) -> None:
    async with gateway(url, cache, names, room, _MIN_STAY_S) as measured:
        if room is not None:
            await measured.until_read()
        while (asked := await asyncio.to_thread(connection.recv)) is not None:
            connection.send(await _turn(measured, asked))


async def _turn(measured: MeasuredPlane, names: Sequence[str]) -> _Turn:
    await measured.ask_at(names[: int(_WARM_UP_S * RATE_RPS)], RATE_RPS)
    loads, cpu_s = measured.total("tailrace_model_loads_total"), _loading_cpu_s()
    answers = await measured.ask_at(names, RATE_RPS)
    return _Turn(answers, measured.total("tailrace_model_loads_total") - loads, _loading_cpu_s() - cpu_s)


def _loading_cpu_s() -> float:
    """Return the CPU seconds of this process's threads that read and load bundles."""
    loading = {thread.native_id for thread in threading.enumerate() if thread.name.startswith(("model-", "manifests"))}
    return float(
        sum(thread.user_time + thread.system_time for thread in psutil.Process().threads() if thread.id in loading)
    )
