"""Events and measurements that a fit reports while it runs: the interface between the loop and `reports/`."""

from collections.abc import Mapping
from typing import Any


class Watch:
    """Receives the events of one process's fit. This base class does nothing."""

    def note(self, event: str, *, is_warning: bool = True, **fields: Any) -> None:
        """Handle an occasional event."""

    def measured(self, step: int, values: Mapping[str, float]) -> None:
        """Record the measurements of step `step` by name. Steps after a return to a checkpoint are reported again."""


UNWATCHED = Watch()
