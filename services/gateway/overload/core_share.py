"""Learns which part of a core this process gets while it always has work. Pure: times are arguments.

Processor time divided by this share is how long requests take: next to busy processes, a burst that a free core would
work off in time is late. Half of a core is assumed for the first flood, since the gateways share the machine with the
edge, the stores and the LLM.
"""

_FIRST, _LEAST = 0.5, 0.1
_NEWEST_WEIGHT = 0.25


class CoreShare:
    """Owns the share. It changes only while the process has work, so the next flood finds what the last has shown."""

    def __init__(self) -> None:
        self.share = _FIRST
        self._busy_since: tuple[float, float] | None = None

    def looked(self, now_s: float, cpu_s: float, *, is_busy: bool) -> None:
        """Record a sample: the total CPU seconds of the process, and whether requests wait to begin."""
        if is_busy and self._busy_since is not None:
            began_s, before_s = self._busy_since
            share = min(1.0, max(_LEAST, (cpu_s - before_s) / (now_s - began_s)))
            self.share += _NEWEST_WEIGHT * (share - self.share)
        self._busy_since = (now_s, cpu_s) if is_busy else None
