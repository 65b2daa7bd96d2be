"""Garbage collection of a serving process: rarely while it starts; once it serves, full collections stay rare."""

import gc

_START_THRESHOLD = 50_000
_THRESHOLDS = (700, 10, 100)
"""Python's own but for the last, 10: a full collection of a gateway with many names stops its requests for tens of
milliseconds, and their loads caused one every five seconds."""


def collect_rarely() -> None:
    """Collect less often from now on: imports make objects that stay, and Python would look at all of them repeatedly.

    Collections take an eighth of a gateway's import time, and a fifth in a replica with torch.
    """
    gc.set_threshold(_START_THRESHOLD)


def freeze_start() -> None:
    """Exclude all present objects from collections: they live as long as the process, and would only cause pauses."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
