"""Predicts the latency of one LLM replica from its own results. Pure: time is an argument.

The prediction is a plane through (load, work, seconds), fitted by exponentially weighted moments, plus three times the
third quartile of the recent errors. One outlier moves neither: a result counts in the fit as at most twice its
prediction, and the third quartile ignores the largest quarter of the errors. Slow results whose waits overlap have one
cause and count once. A late answer is cancelled, so only a lower bound of its latency is known. Ridge regression
shrinks a slope to 0 while all served requests have the same load and work, since such requests cannot refute it.
Without observations the prediction decays to 0 in a second, so that a replica that was too slow gets another trial,
however slow it was. If the trial succeeds, the decayed prediction replaces the old one, but is at least twice the
trial's time. Each failed trial doubles the time of the decay, up to four seconds: a failed trial costs one answer by
the student at its deadline.

Does not know deadlines: the policy decides whether a prediction fits.
"""

import math
from collections import deque
from dataclasses import dataclass

_LEAST_SPREAD = 0.1
"""As a share of the mean: what differs less says little of a slope, and pulls it to 0 the more, the less it differs."""
_ERROR_MARGIN = 3.0
_ERROR_QUANTILE = 0.75
_NUM_ERRORS = 12
_MAX_OUTLIER = 2.0
_LATE_GROWTH = 1.5
_PATIENCE_S, _MAX_PATIENCE_S = 1.0, 4.0
"""Time without observations until the prediction is 0; failures double it."""


@dataclass
class _Moments:
    """Weighted means of load, work and seconds, and of their products."""

    load: float
    work: float
    seconds: float
    load_load: float
    load_work: float
    work_work: float
    load_seconds: float
    work_seconds: float

    @classmethod
    def of(cls, load: float, work: float, seconds: float) -> "_Moments":
        return cls(load, work, seconds, load * load, load * work, work * work, load * seconds, work * seconds)

    def blend(self, other: "_Moments", weight: float) -> None:
        for name in self.__dataclass_fields__:
            mean = getattr(self, name)
            setattr(self, name, mean + weight * (getattr(other, name) - mean))

    def speed_up(self, factor: float) -> None:
        """Multiply all seconds by `factor`."""
        self.seconds *= factor
        self.load_seconds *= factor
        self.work_seconds *= factor

    def plane(self, load: float, work: float) -> float:
        """The fitted seconds at this load and work; no slope is negative, for more of either is never faster."""
        per_load, per_work = self._slopes()
        return max(0.0, self.seconds + per_load * (load - self.load) + per_work * (work - self.work))

    def _slopes(self) -> tuple[float, float]:
        load_var = self.load_load - self.load**2 + _LEAST_SPREAD**2 * max(1.0, self.load**2)
        work_var = self.work_work - self.work**2 + _LEAST_SPREAD**2 * max(1.0, self.work**2)
        both = self.load_work - self.load * self.work
        by_load = self.load_seconds - self.load * self.seconds
        by_work = self.work_seconds - self.work * self.seconds
        determinant = load_var * work_var - both**2
        per_load = (by_load * work_var - by_work * both) / determinant
        per_work = (by_work * load_var - by_load * both) / determinant
        if per_load < 0:
            return 0.0, max(0.0, by_work / work_var)
        if per_work < 0:
            return max(0.0, by_load / load_var), 0.0
        return per_load, per_work


class LatencyPredictor:
    """Predicts seconds from a request's start to its result, by the replica's other requests and the request's work.

    Args:
        first_s: The prediction before anything was observed.
        weight: How much one observation counts (0 to 1).
    """

    def __init__(self, first_s: float, weight: float = 0.1) -> None:
        self._first_s = first_s
        self._weight = weight
        self._patience_s = _PATIENCE_S
        self._moments: _Moments | None = None
        self._errors_s: deque[float] = deque(maxlen=_NUM_ERRORS)
        self._margin_s = 0.0
        self._observed_at_s = float("-inf")
        self._outlier_at_s = float("-inf")

    def predict_s(self, load: float, work: float = 0.0) -> float:
        """Return a conservative number of seconds for a request of this work that starts at this `load`."""
        if self._moments is None:
            return self._first_s
        return self._moments.plane(load, work) + self._margin_s

    def trial_s(self, load: float, now_s: float, work: float = 0.0) -> float:
        """Return the prediction, decayed since the last observation: for one single trial."""
        if self._moments is None:
            return self._first_s
        return self.predict_s(load, work) * self.decay(now_s)

    def decay(self, now_s: float) -> float:
        """Return the factor of a trial's prediction, 1 after an observation and 0 after the patience."""
        return 1 - min(1.0, max(0.0, now_s - self._observed_at_s) / self._patience_s)

    def finished(self, load: float, seconds: float, now_s: float, work: float = 0.0, decay: float = 1.0) -> None:
        """Learn from a request that took `seconds` to its result; `decay` is less than 1 for a trial."""
        self._patience_s = _PATIENCE_S
        if self._moments is not None and (factor := self._kept_decay(load, work, seconds, decay)) < 1:
            self._lower(self._moments, factor)
            self._observed_at_s = now_s
        else:
            self._learn(load, work, seconds, now_s, now_s - seconds)

    def gave_up(self, load: float, waited_s: float, now_s: float, work: float = 0.0) -> None:
        """Learn from a request that had no result after `waited_s`.

        A wait shorter than the prediction changes nothing.
        """
        if self._moments is not None and waited_s < self.trial_s(load, now_s, work):
            return
        self._patience_s = min(_MAX_PATIENCE_S, self._patience_s * 2)
        fitted_s = 0.0 if self._moments is None else self._moments.plane(load, work)
        self._learn(load, work, max(_LATE_GROWTH * waited_s, fitted_s), now_s, now_s - waited_s)

    def _kept_decay(self, load: float, work: float, seconds: float, decay: float) -> float:
        predicted_s = self.predict_s(load, work)
        return max(decay, _MAX_OUTLIER * seconds / predicted_s) if predicted_s else 1.0

    def _lower(self, moments: _Moments, factor: float) -> None:
        moments.speed_up(factor)
        self._margin_s *= factor
        self._errors_s = deque((error_s * factor for error_s in self._errors_s), maxlen=_NUM_ERRORS)

    def _learn(self, load: float, work: float, seconds: float, now_s: float, started_s: float) -> None:
        self._observed_at_s = now_s
        if self._moments is None:
            self._moments = _Moments.of(load, work, seconds)
            self._errors_s.append(seconds / 12)
            self._margin_s = seconds / 4
            return
        fitted_s = self._moments.plane(load, work)
        highest_s = _MAX_OUTLIER * (fitted_s + self._margin_s)
        if seconds > highest_s:
            if started_s < self._outlier_at_s:
                return
            self._outlier_at_s = now_s
        self._errors_s.append(abs(seconds - fitted_s))
        self._margin_s = _ERROR_MARGIN * _quantile(self._errors_s)
        self._moments.blend(_Moments.of(load, work, min(seconds, highest_s)), self._weight)


def _quantile(errors_s: deque[float]) -> float:
    return sorted(errors_s)[math.ceil(_ERROR_QUANTILE * len(errors_s)) - 1]
