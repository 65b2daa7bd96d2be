"""Runs an engine until it has nothing left, and tells what the steps of each kind took and cost at least.

An asynchronous engine tells a step's cost one call after it started the step, and rankings are started several steps ahead of the
device: so a step lasts from the end of the one before to its own end, and on CUDA it is the device that tells when that was.
"""

import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Protocol

import torch

from services.llm.engine.cost.step_cost import StepCost, StepKind
from services.llm.engine.engine import Engine
from services.llm.engine.outcome import Outcome


class Clock(Protocol):
    """Stamps one after another, and the seconds between them once all are there."""

    def stamp(self) -> None:
        """Set one behind all that was started."""
        ...

    def intervals(self) -> list[float]:
        """Return the seconds from each stamp to the next."""
        ...


class HostClock:
    """For a device that has done what was started when the call returns."""

    def __init__(self) -> None:
        self._stamps: list[float] = []

    def stamp(self) -> None:
        """Read the clock."""
        self._stamps.append(time.perf_counter())

    def intervals(self) -> list[float]:
        """Return the seconds from each stamp to the next."""
        return [after - before for before, after in pairwise(self._stamps)]


class CudaClock:
    """For the current CUDA stream, which is behind the host."""

    def __init__(self) -> None:
        self._stamps: list[torch.cuda.Event] = []

    def stamp(self) -> None:
        """Have the device read its clock when it comes there."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._stamps.append(event)

    def intervals(self) -> list[float]:
        """Wait for the device, and give the seconds from each stamp to the next."""
        torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1_000 for before, after in pairwise(self._stamps)]


def drain(engine: Engine, clock: Clock) -> tuple[list[Outcome], dict[str, dict[str, float]]]:
    """Step until all is done. Gives the outcomes as they came, and what the steps of each kind took and cost."""
    outcomes: list[Outcome] = []
    ran: list[tuple[int, StepCost]] = []
    num_calls = 0
    clock.stamp()
    while engine.has_work:
        started = num_calls - engine.is_ahead
        outcomes += engine.step(0.0)
        clock.stamp()
        if engine.last_cost is not None:
            ran.append((started, engine.last_cost))
        num_calls += 1
    seconds = clock.intervals()
    return outcomes, _by_kind((cost, seconds[started]) for started, cost in ran)


@dataclass(slots=True)
class _Spent:
    """Sums over the steps of one kind."""

    steps: int = 0
    seconds: float = 0.0
    num_bytes: float = 0.0
    flops: float = 0.0


def _by_kind(ran: Iterable[tuple[StepCost, float]]) -> dict[str, dict[str, float]]:
    spent: dict[StepKind, _Spent] = defaultdict(_Spent)
    for cost, seconds in ran:
        kind = spent[cost.kind]
        kind.steps += 1
        kind.seconds += seconds
        kind.num_bytes += cost.num_bytes
        kind.flops += cost.flops
    return {kind.value: asdict(one) for kind, one in spent.items()}
