"""Predicts the latency of the LLM tier from its own results. Pure: time is an argument.

A straight line through (load, seconds), fitted by exponentially weighted moments, plus a multiple of the line's own mean
absolute error: conservative without a histogram, and it follows a machine that becomes faster or slower. A late answer is
cancelled, so all that is known is a lower bound of its latency. While nothing is observed the prediction decays, so that a tier that
was too slow gets a trial again; each failed trial doubles the half-life.

Does not know deadlines: the policy decides whether a prediction fits.
"""

import math
from dataclasses import dataclass

_ERROR_MARGIN = 3.0
_LATE_GROWTH = 1.5
_MAX_PATIENCE_S = 30.0


@dataclass
class _Moments:
    """Weighted means of load, seconds, and their products."""

    load: float
    seconds: float
    load_load: float
    load_seconds: float

    def blend(self, load: float, seconds: float, weight: float) -> None:
        self.load += weight * (load - self.load)
        self.seconds += weight * (seconds - self.seconds)
        self.load_load += weight * (load * load - self.load_load)
        self.load_seconds += weight * (load * seconds - self.load_seconds)

    def line(self, load: float) -> float:
        """The fitted seconds at this load; the slope is never negative, for more load is never faster."""
        variance = self.load_load - self.load**2
        slope = max(0.0, (self.load_seconds - self.load * self.seconds) / variance) if variance > 1e-9 else 0.0
        return max(0.0, self.seconds + slope * (load - self.load))


class LatencyPredictor:
    """Predicts seconds from a request's start to its result, as a function of how many others are in the tier.

    Args:
        first_s: The prediction before anything was observed.
        weight: How much one observation counts (0 to 1).
        patience_s: The decay's half-life while nothing is observed.
    """

    def __init__(self, first_s: float, weight: float = 0.1, patience_s: float = 1.0) -> None:
        self._first_s = first_s
        self._weight = weight
        self._first_patience_s = patience_s
        self._patience_s = patience_s
        self._moments: _Moments | None = None
        self._error_s = 0.0
        self._observed_at_s = float("-inf")

    def predict_s(self, load: float) -> float:
        """Return a conservative number of seconds for a request that starts with `load` others in the tier."""
        if self._moments is None:
            return self._first_s
        return self._moments.line(load) + _ERROR_MARGIN * self._error_s

    def trial_s(self, load: float, now_s: float) -> float:
        """Return the prediction, decayed since the last observation: for one single trial."""
        if self._moments is None:
            return self._first_s
        half_lives = max(0.0, now_s - self._observed_at_s) / self._patience_s
        return self.predict_s(load) * math.exp2(-half_lives)

    def finished(self, load: float, seconds: float, now_s: float) -> None:
        """Learn from a request that took `seconds` to its result."""
        self._patience_s = self._first_patience_s
        self._learn(load, seconds, now_s)

    def gave_up(self, load: float, waited_s: float, now_s: float) -> None:
        """Learn from a request that had no result after `waited_s`. A wait shorter than the prediction changes nothing."""
        if self._moments is not None and waited_s < self.trial_s(load, now_s):
            return
        self._patience_s = min(_MAX_PATIENCE_S, self._patience_s * 2)
        self._learn(load, max(_LATE_GROWTH * waited_s, self.predict_s(load)), now_s)

    def _learn(self, load: float, seconds: float, now_s: float) -> None:
        self._observed_at_s = now_s
        if self._moments is None:
            self._moments = _Moments(load, seconds, load * load, load * seconds)
            self._error_s = seconds / 4
            return
        error_s = abs(seconds - self._moments.line(load))
        self._error_s += self._weight * (error_s - self._error_s)
        self._moments.blend(load, seconds, self._weight)
