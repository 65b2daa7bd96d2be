"""Decides whether a store that failed is worth asking: pure, time is an argument.

After a few failures in a row only one attempt per pause is let through, so that requests do not each wait out their timeout
and reads do not pile up; the first success opens the gate again.
"""


class AwayGate:
    """Closed after `num_failures` failures in a row; then lets one attempt through every `pause_s`."""

    def __init__(self, num_failures: int, pause_s: float) -> None:
        self._limit = num_failures
        self._pause_s = pause_s
        self._num_failed = 0
        self._next_try_s = 0.0

    def may_try(self, now_s: float) -> bool:
        """Say whether to ask the store now; when the gate is closed a yes uses up this pause's attempt."""
        if self._num_failed < self._limit:
            return True
        if now_s < self._next_try_s:
            return False
        self._next_try_s = now_s + self._pause_s
        return True

    def failed(self, now_s: float) -> None:
        """Count one failure."""
        self._num_failed += 1
        self._next_try_s = now_s + self._pause_s

    def succeeded(self) -> None:
        """Open the gate."""
        self._num_failed = 0
