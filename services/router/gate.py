"""One gateway's view of the LLM tier: its own requests in flight, the predicted latency, the breaker.

Owns breaker, predictor and count, and updates them with each request's outcome. Pure: time is an argument. What follows from the
view is decided in policy.py.
"""

from dataclasses import dataclass

from services.contracts.access import Priority, places_for
from services.contracts.rank import EngineLoad
from services.router.breaker import Breaker, BreakerState
from services.router.policy import LlmOutcome
from services.router.predictor import LatencyPredictor

_LOAD_REPORT_LIFE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmView:
    """The LLM tier as the policy sees it, for one priority.

    `max_in_flight` counts the places that this priority may fill. `trial_s` is the decayed prediction, for a lone request.
    """

    breaker_allows: bool
    num_in_flight: int
    max_in_flight: int
    predicted_s: float
    trial_s: float


@dataclass(frozen=True, slots=True)
class Sent:
    """A request that was sent to the LLM: the load at its start, and its number at the breaker."""

    load: int
    number: int


class LlmGate:
    """Tracks the LLM tier."""

    def __init__(self, breaker: Breaker, predictor: LatencyPredictor, max_in_flight: int) -> None:
        self._breaker = breaker
        self._predictor = predictor
        self._max_in_flight = max_in_flight
        self._num_in_flight = 0
        self._reported: EngineLoad | None = None
        self._reported_at_s = float("-inf")

    def view(self, now_s: float, priority: Priority) -> LlmView:
        """Return the view at this time for this priority: the last places are kept for higher priorities."""
        load = self._load(now_s)
        return LlmView(
            breaker_allows=self._breaker.allows(now_s),
            num_in_flight=self._num_in_flight,
            max_in_flight=places_for(priority, self._max_in_flight),
            predicted_s=self._predictor.predict_s(load),
            trial_s=self._predictor.trial_s(load, now_s),
        )

    def is_open(self, now_s: float) -> bool:
        """Whether the breaker is open at this time."""
        return self._breaker.state(now_s) is BreakerState.OPEN

    def started(self, now_s: float) -> Sent:
        """Count a request that is sent; its result goes to `ended`."""
        sent = Sent(self._load(now_s), self._breaker.started(now_s))
        self._num_in_flight += 1
        return sent

    def ended(self, outcome: LlmOutcome, sent: Sent, elapsed_s: float, now_s: float) -> None:
        """Record how a request ended after `elapsed_s`."""
        self._num_in_flight -= 1
        match outcome:
            case LlmOutcome.IN_TIME:
                self._breaker.succeeded()
                self._predictor.finished(sent.load, elapsed_s, now_s)
            case LlmOutcome.FAILED | LlmOutcome.AWAY:
                self._breaker.failed(now_s)
            case LlmOutcome.LATE:
                self._breaker.abandoned(sent.number)
                self._predictor.gave_up(sent.load, elapsed_s, now_s)
            case LlmOutcome.OVERLOADED | LlmOutcome.REFUSED | LlmOutcome.MISMATCH | LlmOutcome.ABANDONED:
                self._breaker.abandoned(sent.number)

    def reported(self, load: EngineLoad, now_s: float) -> None:
        """Record an engine's load, which counts other gateways' requests too; valid for a second."""
        self._reported = load
        self._reported_at_s = now_s

    def _load(self, now_s: float) -> int:
        if self._reported is None or now_s - self._reported_at_s > _LOAD_REPORT_LIFE_S:
            return self._num_in_flight
        return max(self._num_in_flight, self._reported.num_running + self._reported.num_waiting)
