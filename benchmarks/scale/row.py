"""One row of the scale benchmark: an axis, a size, and what was measured there."""

import json
import resource
from collections.abc import Sequence

import numpy as np

FIELDS = ("axis", "size", "p99_ms", "loop_ms", "rss_mb", "freshness_p99_ms", "restart_s")


def print_row(axis: str, size: int, wall_s: Sequence[float], loop_s: Sequence[float]) -> None:
    """Print a row as JSON: the 99th percentile of the times, the median of the loop's, and this process's largest memory."""
    measured = {
        "axis": axis,
        "size": size,
        "p99_ms": round(1_000 * float(np.percentile(wall_s, 99)), 3),
        "loop_ms": round(1_000 * float(np.median(loop_s)), 3),
        "rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1_024, 1),
    }
    print(json.dumps({name: measured.get(name) for name in FIELDS}))
