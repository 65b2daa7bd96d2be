"""A circuit breaker: after failures in a row a dependency gets no requests for a while, then one request as a trial.

    closed --failures in a row--> open --open_s passed--> half open --one success--> closed
                                   ^------- failure -------'

Pure: time is an argument. Each LLM replica has two, the text writer, the feature store and the Kafka producers one
each. Which outcomes count as failures is up to the owner: of the LLM, late and refused requests do not, since the
predictor and the in-flight bound handle them.
"""

from enum import StrEnum


class BreakerState(StrEnum):
    """The three states."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """Counts failures in a row, and decides whether one more request may go.

    Args:
        max_failures: How many failures in a row open it.
        open_s: How long it stays open before one trial.
        max_open_s: If given, each failed trial doubles the time until the next one, up to this.
    """

    def __init__(self, max_failures: int, open_s: float, max_open_s: float | None = None) -> None:
        self._max_failures = max_failures
        self._first_open_s = open_s
        self._open_s = open_s
        self._max_open_s = open_s if max_open_s is None else max_open_s
        self._num_failures = 0
        self._opened_at_s: float | None = None
        self._num_started = 0
        self._trial: int | None = None

    def state(self, now_s: float) -> BreakerState:
        """Return the state at this time."""
        if self._opened_at_s is None:
            return BreakerState.CLOSED
        waited = now_s - self._opened_at_s >= self._open_s
        return BreakerState.HALF_OPEN if waited else BreakerState.OPEN

    def allows(self, now_s: float) -> bool:
        """Whether a request may go now: always when closed, one at a time when half open."""
        state = self.state(now_s)
        return state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and self._trial is None)

    def started(self, now_s: float) -> int:
        """Count a request that starts; in the half-open state it is the trial. Return its number, for `abandoned`."""
        self._num_started += 1
        if self.state(now_s) is BreakerState.HALF_OPEN:
            self._trial = self._num_started
        return self._num_started

    def succeeded(self) -> None:
        """Close the breaker after any successful request."""
        self._num_failures = 0
        self._opened_at_s = None
        self._open_s = self._first_open_s
        self._trial = None

    def failed(self, now_s: float, number: int | None = None) -> None:
        """Count a failed request towards opening; a breaker that is not closed opens again for the whole time.

        If `number` is given, a request that started before the breaker opened is not counted.
        """
        if number is not None and self._opened_at_s is not None:
            if number != self._trial:
                return
            self._open_s = min(self._max_open_s, 2 * self._open_s)
        self._num_failures += 1
        if self._num_failures >= self._max_failures or self._opened_at_s is not None:
            self._opened_at_s = now_s
        self._trial = None

    def abandoned(self, number: int) -> None:
        """Request `number` ended without evidence of health or failure: if it was the trial, another may start."""
        if number == self._trial:
            self._trial = None
