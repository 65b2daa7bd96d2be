"""Shared by points of the scale benchmark: the fields of a row, the catalogue of a size, and the output of a point."""

import json
import resource
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from models.catalogue import Catalogue

ITEM_FIELDS = ("student_ms", "student_mb", "recall")
FIELDS = ("axis", "size", "p99_ms", "loop_ms", "rss_mb", "freshness_p99_ms", "restart_s", *ITEM_FIELDS)


def catalogue_of(num_items: int) -> "Catalogue":
    """Return a catalogue of this many items, each with its own code."""
    from models.catalogue import Catalogue  # not at the top: other points would count its memory

    item_ids = tuple(f"item-{number:07d}" for number in range(num_items))
    return Catalogue(
        item_ids=item_ids,
        titles=item_ids,
        categories=((),) * num_items,
        codes=np.arange(num_items, dtype=np.int32)[:, None],
        level_sizes=(num_items,),
        popularity=np.ones(num_items),
    )


def times(wall_s: Sequence[float], loop_s: Sequence[float]) -> dict[str, float]:
    """Return the p99 of wall times and the median loop time, in milliseconds, and this process's peak memory."""
    rss_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1_024
    p99_ms, loop_ms = 1_000 * float(np.percentile(wall_s, 99)), 1_000 * float(np.median(loop_s))
    return {"p99_ms": p99_ms, "loop_ms": loop_ms, "rss_mb": rss_mb}


def print_fields(**measured: float) -> None:
    print(json.dumps({name: round(value, 3) for name, value in measured.items()}))
