"""One gateway's view of an LLM replica: requests in flight, predicted latency, two breakers, sessions in its cache.

Errors open the breaker `failures`. A hung replica returns no error, so two more signs count. If a request is overdue
and no request was answered since it was due, the next requests are predicted to take four times its wait. If a request
was late and no request was answered since it started, the breaker `silence` opens, and the prediction is four times
that wait. Callers with longer deadlines still reach the replica. A trial is allowed after a twentieth of a second, and
after twice the previous pause when a trial fails. If another replica can answer, the trial is a copy of a request that
goes there.

Pure: time is an argument.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass

from services.contracts.engine_load import EngineLoad
from services.router.breaker import Breaker, BreakerState
from services.router.predictor import LatencyPredictor

_LOAD_REPORT_LIFE_S = 1.0
_VAIN_FACTOR = 4.0
_SILENCE_OPEN_S = 0.05
_SILENCE_MAX_OPEN_S = 4.0
_OVERDUE_FACTOR = 1.5
_OVERDUE_LEAST_S = 0.02
_MAX_PROMPTS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSize:
    """How much a ranking computes, in tokens, before any prefix cache.

    Requests of one `session` have prompts that begin alike while `window_start`, the history's first item in the
    prompt, stays.
    """

    session: str
    window_start: int
    num_prompt_tokens: int
    num_beam_rows: int


@dataclass(frozen=True, slots=True)
class SentRequest:
    """A sent request: its replica, size, load and work at its start, its prediction, its number at each breaker.

    `decay` is less than 1 for a request that was allowed only since its prediction had decayed.
    """

    replica: str
    size: RankSize
    load: int
    work: int
    started_s: float
    due_s: float
    failure_number: int
    silence_number: int
    decay: float = 1.0


class Replica:
    """Tracks one replica."""

    def __init__(self, failures: Breaker, predictor: LatencyPredictor) -> None:
        self.failures = failures
        self.silence = Breaker(1, _SILENCE_OPEN_S, _SILENCE_MAX_OPEN_S)
        self.predictor = predictor
        self._in_flight: dict[int, SentRequest] = {}
        self._answered_at_s = float("-inf")
        self._silent_s = 0.0
        self._reported: EngineLoad | None = None
        self._reported_at_s = float("-inf")
        self._prompts: OrderedDict[str, tuple[int, int]] = OrderedDict()

    @property
    def num_in_flight(self) -> int:
        """This gateway's requests there."""
        return len(self._in_flight)

    def allows(self, now_s: float) -> bool:
        """Whether it may get a request now, after errors."""
        return self.failures.allows(now_s)

    def answers(self, now_s: float) -> bool:
        """Whether it has given neither errors nor silence of late."""
        is_closed = self.silence.state(now_s) is BreakerState.CLOSED
        return is_closed and self.failures.allows(now_s) and not self._waited_in_vain_s(now_s)

    def is_due_for_trial(self, now_s: float) -> bool:
        """Whether it was silent, and one request may go now to see whether it answers again."""
        is_half_open = self.silence.state(now_s) is BreakerState.HALF_OPEN
        return is_half_open and self.silence.allows(now_s) and self.failures.allows(now_s)

    def is_open(self, now_s: float) -> bool:
        return BreakerState.OPEN in {self.failures.state(now_s), self.silence.state(now_s)}

    def predict_s(self, size: RankSize, now_s: float) -> float:
        """Return the prediction for a request that starts now; for a lone request it decays, so that it can recover."""
        load, work = self._load(now_s), self._work(size)
        is_lone = not self._in_flight
        learned_s = self.predictor.trial_s(load, now_s, work) if is_lone else self.predictor.predict_s(load, work)
        return max(learned_s, _VAIN_FACTOR * self._waited_in_vain_s(now_s))

    def started(self, name: str, size: RankSize, now_s: float, budget_s: float = math.inf) -> SentRequest:
        """Count a request that is sent, to be answered within `budget_s`."""
        load, work = self._load(now_s), self._work(size)
        predicted_s = self.predictor.predict_s(load, work)
        due_s = now_s + max(_OVERDUE_LEAST_S, _OVERDUE_FACTOR * predicted_s)
        numbers = self.failures.started(now_s), self.silence.started(now_s)
        decay = self.predictor.decay(now_s) if predicted_s > budget_s else 1.0
        sent = SentRequest(name, size, load, work, now_s, due_s, *numbers, decay)
        self._in_flight[sent.failure_number] = sent
        return sent

    def left(self, sent: SentRequest) -> None:
        """Record that a request is no longer in flight, however it ended."""
        self._in_flight.pop(sent.failure_number, None)

    def answered(self, sent: SentRequest, now_s: float) -> None:
        """Record an answer: it lives, took this long, and now holds this prompt."""
        self.failures.succeeded()
        self.silence.succeeded()
        self._silent_s = 0.0
        self._answered_at_s = now_s
        self.predictor.finished(sent.load, now_s - sent.started_s, now_s, sent.work, sent.decay)
        self._prompts[sent.size.session] = (sent.size.window_start, sent.size.num_prompt_tokens)
        self._prompts.move_to_end(sent.size.session)
        if len(self._prompts) > _MAX_PROMPTS:
            self._prompts.popitem(last=False)

    def failed(self, sent: SentRequest, now_s: float) -> None:
        """Record an error."""
        self.failures.failed(now_s)
        self.silence.abandoned(sent.silence_number)

    def was_late(self, sent: SentRequest, now_s: float) -> None:
        """Record a request that got no result within its deadline."""
        self.was_left(sent, now_s)
        self.predictor.gave_up(sent.load, now_s - sent.started_s, now_s, sent.work)

    def was_left(self, sent: SentRequest, now_s: float) -> None:
        """Record a cancelled request.

        It counts as silence if it was overdue and the replica answered nothing meanwhile.
        """
        self.failures.abandoned(sent.failure_number)
        if now_s >= sent.due_s and self._answered_at_s < sent.started_s:
            self._silent_s = max(self._silent_s, now_s - sent.started_s)
            self.silence.failed(now_s, sent.silence_number)
        else:
            self.silence.abandoned(sent.silence_number)

    def said_nothing(self, sent: SentRequest) -> None:
        """Record an end that is evidence of neither health nor failure."""
        self.failures.abandoned(sent.failure_number)
        self.silence.abandoned(sent.silence_number)

    def reported(self, load: EngineLoad, now_s: float) -> None:
        """Record the engine's load, which counts other gateways' requests too; valid for a second."""
        self._reported, self._reported_at_s = load, now_s

    def _waited_in_vain_s(self, now_s: float) -> float:
        """The longest wait of requests without any answer, or before the next trial; 0 while the replica answers."""
        silent_s = 0.0 if self.silence.allows(now_s) else self._silent_s
        if not self._in_flight:
            return silent_s
        overdue = (sent for sent in self._in_flight.values() if self._answered_at_s < sent.due_s < now_s)
        return max((now_s - sent.started_s for sent in overdue), default=0.0) or silent_s

    def _load(self, now_s: float) -> int:
        if self._reported is None or now_s - self._reported_at_s > _LOAD_REPORT_LIFE_S:
            return len(self._in_flight)
        return max(len(self._in_flight), self._reported.num_running + self._reported.num_waiting)

    def _work(self, size: RankSize) -> int:
        """Tokens to compute, excluding the prefix that the replica's cache probably holds."""
        window_start, num_held = self._prompts.get(size.session, (size.window_start, 0))
        held = min(num_held, size.num_prompt_tokens - 1) if window_start == size.window_start else 0
        return size.num_prompt_tokens - held + size.num_beam_rows
