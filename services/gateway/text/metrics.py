"""Metrics and log line of every text: requests by outcome, time to first token and between tokens, token counts.

Times are measured at the door and include queueing and transport within the cluster.
"""

import time
from collections.abc import Callable

import structlog

from services.contracts.text import TextDone, TextEvent, TextPiece
from services.errors import ErrorKind
from services.observability.metrics import TextMetrics

log = structlog.get_logger()

COMPLETIONS, CHAT, RATIONALE = "completions", "chat", "rationale"
"""The routes that request text: two of the OpenAI door, and the rationale of a recommendation."""
OK, CANCELLED = "ok", "cancelled"


class TextReport:
    """Counts and logs texts. One per process."""

    def __init__(self, metrics: TextMetrics, clock: Callable[[], float] = time.monotonic) -> None:
        self.metrics = metrics
        self.clock = clock
        for route in (COMPLETIONS, CHAT):
            for code in (OK, CANCELLED, *ErrorKind):
                metrics.requests.labels(route, code)

    def ended(self, route: str, code: str, request_id: str, message: str = "") -> None:
        """Count and log the end of a request of this route: `ok`, `cancelled`, or an error code."""
        self.metrics.requests.labels(route, code).inc()
        log.info("text_ended", route=route, code=code, request_id=request_id, message=message)

    def watch(self, route: str, *, in_pieces: bool) -> "TextMeter":
        """Start measuring one text. A text that is not streamed has no first token and no gaps."""
        return TextMeter(self.metrics, route, self.clock, in_pieces=in_pieces)


class TextMeter:
    """Measures one text by its events."""

    def __init__(self, metrics: TextMetrics, route: str, clock: Callable[[], float], *, in_pieces: bool) -> None:
        self._in_pieces = in_pieces
        self._metrics = metrics
        self._route = route
        self._clock = clock
        self._began_s = clock()
        self._last_s: dict[int, float] = {}

    def saw(self, event: TextEvent) -> None:
        """Count an event that passes now."""
        match event:
            case TextPiece(num_tokens=num_tokens) if num_tokens > 0:
                self._metrics.tokens.labels("completion").inc(num_tokens)
                if self._in_pieces:
                    self._timed(event)
            case TextDone():
                tokens = self._metrics.tokens
                tokens.labels("prompt").inc(event.num_prompt_tokens)
                tokens.labels("cached").inc(event.num_cached_tokens)
            case _:
                pass

    def _timed(self, piece: TextPiece) -> None:
        now_s, metrics = self._clock(), self._metrics
        if not self._last_s:
            metrics.first_token_seconds.labels(self._route).observe(now_s - self._began_s)
        if (last_s := self._last_s.get(piece.index)) is not None:
            metrics.token_gap_seconds.labels(self._route).observe((now_s - last_s) / piece.num_tokens)
        self._last_s[piece.index] = now_s
