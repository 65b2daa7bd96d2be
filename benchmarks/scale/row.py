"""What points of the scale benchmark share: the catalogue of a size, and the row: axis, size and what was measured there."""

import json
import resource
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from models.catalogue import Catalogue

ITEM_FIELDS = ("student_ms", "student_mb", "recall")
FIELDS = ("axis", "size", "p99_ms", "loop_ms", "rss_mb", "freshness_p99_ms", "restart_s", *ITEM_FIELDS)


def catalogue_of(num_items: int) -> "Catalogue":
    """Return a catalogue of this many items, each with a code of its own."""
    from models.catalogue import Catalogue  # not at the top: a point that needs none would count its memory

    item_ids = tuple(f"item-{number:07d}" for number in range(num_items))
    return Catalogue(
        item_ids=item_ids,
        titles=item_ids,
        categories=((),) * num_items,
        codes=np.arange(num_items, dtype=np.int32)[:, None],
        level_sizes=(num_items,),
        popularity=np.ones(num_items),
    )


def print_row(axis: str, size: int, wall_s: Sequence[float], loop_s: Sequence[float]) -> None:
    """Print a row as JSON: the 99th percentile of the times, the median of the loop's, and this process's largest memory."""
    print_fields(axis, size, {**times(wall_s, loop_s), "rss_mb": rss_mb()})


def rss_mb() -> float:
    """Return this process's largest memory so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1_024


def times(wall_s: Sequence[float], loop_s: Sequence[float]) -> dict[str, float | None]:
    """Return the fields of both times, in milliseconds."""
    return {"p99_ms": 1_000 * float(np.percentile(wall_s, 99)), "loop_ms": 1_000 * float(np.median(loop_s))}


def print_fields(axis: str, size: int, measured: Mapping[str, float | None]) -> None:
    """Print a row as JSON; what was not measured is null."""
    rounded = {name: None if value is None else round(value, 3) for name, value in measured.items()}
    print(json.dumps({name: rounded.get(name) for name in FIELDS} | {"axis": axis, "size": size}))
