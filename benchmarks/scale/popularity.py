"""The axis `popularity`: `python -m benchmarks.scale.popularity SIZE` prints its row.

One partition whose windows hold SIZE distinct items; then 250 events a second for 12 minutes of event time, in which buckets begin and expire,
and a publication each second.
"""

import sys
import time

import numpy as np

from benchmarks.scale.row import print_fields, times
from services.features.schema import LogPosition
from services.stream.aggregate import LoggedEvent
from services.stream.popularity import ListedItems, PopularityCounter

_BEGIN_S = 1_800_000_000
_SECONDS, _EVENTS_PER_S, _NUM_ITEMS = 720, 250, 200


def main(num_items: int) -> None:
    """Fill the windows, then publish each second."""
    item_ids = [f"item-{number:07d}" for number in range(num_items)]
    counts, rng = PopularityCounter(ListedItems(item_ids)), np.random.default_rng(0)

    def add(offset: int, number: int, time_s: int) -> None:
        position = LogPosition("t", 0, offset)
        counts.add(LoggedEvent(f"u{offset}", item_ids[number], "e", time_s * 1_000_000, position))

    for offset, number in enumerate(rng.permutation(num_items).tolist()):
        add(offset, number, _BEGIN_S - number % 3_600)
    counts.top(_BEGIN_S * 1_000, _NUM_ITEMS)
    wall_s, loop_s, offset = [], [], num_items
    for second in range(_SECONDS):
        for number in (num_items * rng.power(0.3, _EVENTS_PER_S)).astype(int).tolist():
            add(offset, number, _BEGIN_S + second)
            offset += 1
        started_s, worked_s = time.perf_counter(), time.thread_time()
        counts.top((_BEGIN_S + second) * 1_000, _NUM_ITEMS)
        wall_s.append(time.perf_counter() - started_s)
        loop_s.append(time.thread_time() - worked_s)
    print_fields(**times(wall_s, loop_s))


if __name__ == "__main__":
    main(int(sys.argv[1]))
