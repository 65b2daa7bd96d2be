"""Merges the partitions' popularity windows to one ranking. Pure."""

from collections import defaultdict
from collections.abc import Iterable

from services.features.rows import WINDOW_MS, PopularRow

_HOUR_MS = 3_600_000


def merge_popularity(rows: Iterable[PopularRow], now_ms: int) -> list[tuple[str, float]]:
    """Give (item id, score), best first, ties by item id. The score sums the item's events per hour over all windows.

    What is popular within the hour so counts 168 times what was popular once within the week. A window that was last
    brought up to date longer ago than its own length says nothing of now and is left out.
    """
    scores: dict[str, float] = defaultdict(float)
    for row in rows:
        for name, window in row.windows.items():
            if now_ms - row.as_of_ms < WINDOW_MS[name]:
                weight = _HOUR_MS / WINDOW_MS[name]
                for item_id, count in zip(window.item_ids, window.counts, strict=True):
                    scores[item_id] += count * weight
    return sorted(scores.items(), key=lambda entry: (-entry[1], entry[0]))
