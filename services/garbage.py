"""Garbage collection of a serving process: rarely while it starts; once it serves, full collections stay rare."""

import gc

_START_THRESHOLD = 50_000
_THRESHOLDS = (10_000, 10, 100)
"""Python's own are 700, 10, 10. A collection stops all requests: of the youngest objects for milliseconds, of all for
tens of milliseconds. At 100 requests/s 10,000 leaves one every ten seconds, 700 five a second: most objects are free
sooner."""


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
