"""What outliers cost the other requests: the share of light rankings that the LLM answers in time, in virtual time.

Gateways, replicas and callers are simulated; gate, predictors, breakers, policy and engine scheduler are those of the stack, and a step
has a cost. Light requests come at random from returning users, whose prompts the prefix cache holds after their first. A disturbance is
added: a step that stalls, a replica that hangs or is slow, a burst of long prompts. Counted: light requests that the LLM answered within
their budget. Every run with one seed is the same. No model is run and no clock is read.
"""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count

from services.contracts.access import Priority
from services.contracts.rank import EngineLoad
from services.contracts.recommend import Tier
from services.errors import Overloaded
from services.llm.engine.config import EngineConfig
from services.llm.engine.plan import StepPlan
from services.llm.engine.scheduler import Scheduler
from services.llm.engine.sequence import Sequence
from services.router.breaker import Breaker
from services.router.gate import LlmGate
from services.router.policy import LlmOutcome, plan
from services.router.predictor import LatencyPredictor
from services.router.replica import RankSize, Replica, Sent
from tests.support.gateway.facts import facts

BUDGET_S = 0.19
_WIRE_S = 0.0005
_STEP_S = 0.002
_TOKEN_S = 0.00002
_ROW_S = 0.00001
_DEPTH = 3
_BEAMS = 32
_LIGHT_ITEMS = 100
_NUM_USERS = 300
_NUM_GATEWAYS = 2
_NUM_REPLICAS = 3
_LIGHT_RPS, _SECONDS = 60.0, 15.0
_STALL_S, _SLOW_FACTOR, _BURST = 0.6, 5.0, 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What disturbs the light requests: how often a step stalls, or a burst of long prompts of new users comes; how many replicas hang, or are slow, from the beginning."""

    stall_every_s: float | None = None
    num_hung: int = 0
    num_slow: int = 0
    burst_every_s: float | None = None


SCENARIOS = {
    "no outlier": Scenario(),
    "one 0.6 s ranking every 5 s": Scenario(stall_every_s=5.0),
    "1 of 3 replicas hung": Scenario(num_hung=1),
    "1 of 3 replicas 5x slower": Scenario(num_slow=1),
    "a burst of 60 long prompts every 5 s": Scenario(burst_every_s=5.0),
}


@dataclass(eq=False, slots=True)
class _Request:
    user: int
    num_items: int
    is_light: bool
    stall_s: float = 0.0
    budget_s: float = BUDGET_S
    sent: Sent | None = None
    is_over: bool = False

    @property
    def size(self) -> RankSize:
        return RankSize(
            session=str(self.user),
            window_start=0,
            num_prompt_tokens=1 + self.num_items * _DEPTH,
            num_beam_rows=_BEAMS * (_DEPTH - 1),
        )


class _Events:
    """The virtual clock and what is to happen."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._order = count()
        self._heap: list[tuple[float, int, Callable[[], None]]] = []

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now_s + seconds, next(self._order), action))

    def run(self, until_s: float) -> None:
        while self._heap and self._heap[0][0] <= until_s:
            self.now_s, _, action = heapq.heappop(self._heap)
            action()


class _Engine:
    """One replica: the real scheduler, and a time for each step instead of a model."""

    def __init__(self, events: _Events, reply: "Callable[[str, str, EngineLoad], None]", name: str) -> None:
        self.name = name
        self.factor = 1.0
        self.is_hung = False
        self._events = events
        self._reply = reply
        self._scheduler = Scheduler(EngineConfig(num_blocks=8_192), "v1")
        self._order = count()
        self._is_stepping = False
        self._stalls: dict[str, float] = {}

    @property
    def load(self) -> EngineLoad:
        scheduler = self._scheduler
        return EngineLoad(num_running=scheduler.num_running, num_waiting=scheduler.num_waiting, kv_cache_usage=0.0)

    def add(self, request_id: str, request: _Request, deadline_s: float) -> bool:
        sequence = Sequence(
            request_id=request_id,
            order=next(self._order),
            tokens=[request.user * 10_000 + place for place in range(request.size.num_prompt_tokens)],
            priority=1,
            arrival_s=self._events.now_s,
            deadline_s=deadline_s,
            num_levels=_DEPTH,
            rows_by_level=(_BEAMS,) * (_DEPTH - 1),
        )
        try:
            self._scheduler.add(sequence)
        except Overloaded:
            return False
        if request.stall_s:
            self._stalls[request_id] = request.stall_s
        if not self._is_stepping:
            self._step()
        return True

    def _step(self) -> None:
        planned = self._scheduler.schedule(self._events.now_s)
        self._is_stepping = not planned.is_empty
        if planned.is_empty or self.is_hung:
            return
        took_s = _STEP_S + _TOKEN_S * planned.num_batched_tokens + _ROW_S * planned.num_beam_rows
        stall_s = max((self._stalls.pop(s.request_id, 0.0) for s in planned.sequences), default=0.0)
        self._scheduler.advance(planned)
        self._events.after(max(self.factor * took_s, stall_s), lambda: self._stepped(planned))

    def _stepped(self, planned: StepPlan) -> None:
        for sequence in planned.sequences:
            if sequence.is_fully_scheduled:
                self._reply(self.name, sequence.request_id, self.load)
        self._step()


@dataclass
class Simulation:
    """One run of a scenario: of the light requests all are counted, and those that the LLM answered in time."""

    scenario: Scenario
    num_light: int = 0
    num_in_time: int = 0

    def __post_init__(self) -> None:
        """Build gateways and replicas."""
        self._random = random.Random(1)
        self._events = _Events()
        names = [f"replica-{index}" for index in range(_NUM_REPLICAS)]
        self._engines = {name: _Engine(self._events, self._replied, name) for name in names}
        for name in names[: self.scenario.num_hung]:
            self._engines[name].is_hung = True
        for name in names[: self.scenario.num_slow]:
            self._engines[name].factor = _SLOW_FACTOR
        self._gates = [LlmGate(_new_replica, 64) for _ in range(_NUM_GATEWAYS)]
        self._in_flight: dict[str, tuple[LlmGate, _Request]] = {}
        self._ids = count()
        self._new_users = count(_NUM_USERS)

    def run(self) -> None:
        """Run it."""
        self._next_light()
        if self.scenario.stall_every_s is not None:
            self._events.after(self.scenario.stall_every_s, self._stall)
        if self.scenario.burst_every_s is not None:
            self._events.after(self.scenario.burst_every_s, self._burst)
        self._events.run(_SECONDS)

    def _next_light(self) -> None:
        self._events.after(self._random.expovariate(_LIGHT_RPS), self._next_light)
        user = self._random.randrange(_NUM_USERS)
        self._arrived(_Request(user, _LIGHT_ITEMS, is_light=True))

    def _stall(self) -> None:
        assert self.scenario.stall_every_s is not None, "started with a period"
        self._events.after(self.scenario.stall_every_s, self._stall)
        user = self._random.randrange(_NUM_USERS)
        self._arrived(_Request(user, _LIGHT_ITEMS, is_light=False, stall_s=_STALL_S, budget_s=2 * _STALL_S))

    def _burst(self) -> None:
        assert self.scenario.burst_every_s is not None, "started with a period"
        self._events.after(self.scenario.burst_every_s, self._burst)
        for _ in range(_BURST):
            self._arrived(_Request(next(self._new_users), 15 * _LIGHT_ITEMS, is_light=False))

    def _arrived(self, request: _Request) -> None:
        gate, now_s = self._random.choice(self._gates), self._events.now_s
        self.num_light += request.is_light
        view = gate.view(tuple(self._engines), request.size, Priority.NORMAL, request.budget_s, now_s)
        known = facts(
            breaker_allows=view.breaker_allows,
            num_in_flight=view.num_in_flight,
            max_in_flight=view.max_in_flight,
            predicted_s=view.predicted_s,
            budget_s=request.budget_s,
        )
        if plan(known).tier is not Tier.LLM:
            return
        if view.trial is not None:
            self._send(gate, view.trial, replace(request, is_light=False, stall_s=0.0))
        self._send(gate, view.replicas[0], request)

    def _send(self, gate: LlmGate, name: str, request: _Request) -> None:
        now_s, engine, request_id = self._events.now_s, self._engines[name], str(next(self._ids))
        request.sent = gate.started(name, request.size, now_s)
        self._in_flight[request_id] = (gate, request)
        self._events.after(_WIRE_S, lambda: self._reached(engine, request_id, request, now_s + request.budget_s))
        self._events.after(request.budget_s, lambda: self._ended(request_id, LlmOutcome.LATE))

    def _reached(self, engine: _Engine, request_id: str, request: _Request, deadline_s: float) -> None:
        if not engine.add(request_id, request, deadline_s):
            self._events.after(_WIRE_S, lambda: self._ended(request_id, LlmOutcome.OVERLOADED))

    def _replied(self, name: str, request_id: str, load: EngineLoad) -> None:
        def arrive() -> None:
            if request_id in self._in_flight:
                self._in_flight[request_id][0].reported(name, load, self._events.now_s)
                self._ended(request_id, LlmOutcome.IN_TIME)

        self._events.after(_WIRE_S, arrive)

    def _ended(self, request_id: str, outcome: LlmOutcome) -> None:
        if request_id not in self._in_flight:
            return
        gate, request = self._in_flight.pop(request_id)
        assert request.sent is not None, "only requests that were sent are in flight"
        gate.ended(outcome, request.sent, self._events.now_s)
        self.num_in_time += request.is_light and outcome is LlmOutcome.IN_TIME


def _new_replica() -> Replica:
    """Return a replica's state with the settings' defaults."""
    return Replica(Breaker(5, 2.0), LatencyPredictor(0.05))
