"""One gateway's view of the LLM tier: which replica a request goes to, and how its requests there end.

A session has an order of replicas that does not change while the replicas do not (highest random weight, Thaler and
Ravishankar, 1998), so its prompts meet the prefix cache of the first. A replica that hangs or fails, or whose
prediction does not fit into the request's budget, is passed over for the next one. Where replicas hold some of many
models, only those that hold the name are in the order (placement.py).

Pure: time is an argument. What follows from the view is decided in policy.py.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from services.contracts.access import Priority, places_for
from services.contracts.engine_load import EngineLoad
from services.router.placement import Placement
from services.router.policy import LlmOutcome
from services.router.replica import RankSize, Replica, SentRequest

_ANY = ("",)
"""Name of the only replica until replica names are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmView:
    """The LLM tier as the policy sees it, for one request.

    `replicas` are in the order of attempts, the chosen replica first; `breaker_allows` says whether that replica may
    get a request. `trial` is a silent replica that gets a copy of the request; its answer is discarded. `max_in_flight`
    is the number of requests that this priority may have in flight over all replicas.
    """

    replicas: tuple[str, ...]
    trial: str | None = None
    breaker_allows: bool
    num_in_flight: int
    max_in_flight: int
    predicted_s: float


class LlmGate:
    """Tracks the LLM tier. `new_replica` makes the state of a replica that was not known before."""

    def __init__(
        self, new_replica: Callable[[], Replica], max_in_flight: int, placement: Placement | None = None
    ) -> None:
        """`placement` chooses among replicas that do not all hold the name; None: all do."""
        self._placement = placement
        self._new_replica = new_replica
        self._max_in_flight = max_in_flight
        self._num_in_flight = 0
        self._replicas: dict[str, Replica] = {}

    def view(self, names: Sequence[str], size: RankSize, priority: Priority, budget_s: float, now_s: float) -> LlmView:
        """Return the view at this time for a request of this size, with the replicas of these names.

        The last places are kept for higher priorities.
        """
        self._follow(names or _ANY)
        order = self._order(size.session, names or _ANY, now_s)
        standings = [_Standing.of(name, self._replicas[name], size, now_s) for name in order]
        chosen = _choose(standings, budget_s)
        return LlmView(
            trial=self._due_for_trial(order, size, budget_s, now_s) if chosen.answers else None,
            replicas=(
                chosen.name,
                *(standing.name for standing in standings if standing is not chosen and standing.answers),
            ),
            breaker_allows=chosen.allows,
            num_in_flight=self._num_in_flight,
            max_in_flight=places_for(priority, self._max_in_flight),
            predicted_s=chosen.predicted_s,
        )

    def is_open(self, now_s: float) -> bool:
        return bool(self._replicas) and all(replica.is_open(now_s) for replica in self._replicas.values())

    def started(self, name: str, size: RankSize, now_s: float, budget_s: float = math.inf) -> SentRequest:
        """Count a request that is sent to a replica, to be answered within `budget_s`; its result goes to `ended`."""
        self._num_in_flight += 1
        return self._replica(name).started(name, size, now_s, budget_s)

    def ended(self, outcome: LlmOutcome, sent: SentRequest, now_s: float, answered_by: str | None = None) -> None:
        """Record how a request ended. `answered_by` may differ from the replica that was chosen."""
        self._num_in_flight -= 1
        replica = self._replica(sent.replica)
        replica.left(sent)
        match outcome:
            case LlmOutcome.IN_TIME if answered_by in {None, sent.replica}:
                replica.answered(sent, now_s)
                if self._placement is not None:
                    self._placement.answered(sent.replica)
            case LlmOutcome.LOADING if self._placement is not None:
                replica.said_nothing(sent)
                self._placement.loading(sent.replica, now_s)
            case LlmOutcome.FAILED | LlmOutcome.UNAVAILABLE:
                replica.failed(sent, now_s)
            case LlmOutcome.LATE:
                replica.was_late(sent, now_s)
            case LlmOutcome.ABANDONED:
                replica.was_left(sent, now_s)
            case _:
                replica.said_nothing(sent)

    def reported(self, name: str, load: EngineLoad, now_s: float) -> None:
        self._replica(name).reported(load, now_s)

    def _order(self, session: str, names: Sequence[str], now_s: float) -> list[str]:
        if self._placement is None:
            return _order(session, names)
        self._placement.observe(self._num_in_flight, len(names), now_s)
        answering = {name for name in names if self._replicas[name].answers(now_s)}
        return self._placement.order(session, names, answering, now_s)

    def _due_for_trial(self, order: Sequence[str], size: RankSize, budget_s: float, now_s: float) -> str | None:
        """Return the first silent replica that may be tried and, if it answers again, is predicted to do so in time."""
        silent = (name for name in order if self._replicas[name].is_due_for_trial(now_s))
        return next((name for name in silent if self._replicas[name].predict_s(size, now_s) <= budget_s), None)

    def _replica(self, name: str) -> Replica:
        if name not in self._replicas:
            self._replicas[name] = self._new_replica()
        return self._replicas[name]

    def _follow(self, names: Sequence[str]) -> None:
        """Add new replicas; forget stopped ones that have no request in flight."""
        if self._replicas.keys() == set(names):
            return
        self._replicas = {
            name: replica for name, replica in self._replicas.items() if name in names or replica.num_in_flight
        }
        for name in names:
            self._replica(name)


class _Standing(NamedTuple):
    """A replica as one request finds it."""

    name: str
    predicted_s: float
    allows: bool
    answers: bool

    @classmethod
    def of(cls, name: str, replica: Replica, size: RankSize, now_s: float) -> "_Standing":
        return cls(name, replica.predict_s(size, now_s), replica.allows(now_s), replica.answers(now_s))


def _choose(standings: Sequence[_Standing], budget_s: float) -> _Standing:
    """Return the replica to try first.

    In order of preference: a replica that allows requests, answers, and is predicted to end in time; a silent replica
    that allows a trial and is predicted to end in time; a replica that allows requests; the first replica.
    """
    able = [standing for standing in standings if standing.allows]
    in_time = [standing for standing in able if standing.predicted_s <= budget_s]
    answering = [standing for standing in in_time if standing.answers]
    return next(standing for group in (answering, in_time, able, standings) for standing in group)


def _order(session: str, names: Sequence[str]) -> list[str]:
    """Return the replicas in the session's order."""
    if len(names) == 1:
        return list(names)
    return sorted(names, key=lambda name: hashlib.blake2b(f"{session}\0{name}".encode(), digest_size=8).digest())
