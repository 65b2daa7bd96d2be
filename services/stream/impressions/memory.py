"""A user's bounded memory of impressions: the effect of an impression on it. Pure."""

from collections.abc import Sequence

from services.features.schema import UserShown
from services.stream.decode import LoggedImpression

MAX_SHOWN_ITEMS = 200
"""The most recently shown items. A full row has about 6 KB."""


def remember(
    row: UserShown | None, impressions: Sequence[LoggedImpression], max_items: int = MAX_SHOWN_ITEMS
) -> UserShown | None:
    """Return one user's row after impressions in log order; the same object if all were already applied.

    An item counts once per impression. The top items of an impression are remembered longest.
    """
    for logged in impressions:
        if row is not None and row.position.covers(logged.position):
            continue
        shown = {} if row is None else dict(zip(row.item_ids, zip(row.counts, row.times_s, strict=True), strict=True))
        time_s = logged.impression.shown_time_ms // 1_000
        for item_id in reversed(dict.fromkeys(logged.impression.item_ids)):
            num_before, before_s = shown.pop(item_id, (0, 0))
            shown[item_id] = (num_before + 1, max(before_s, time_s))
        kept = list(shown.items())[-max_items:]
        row = UserShown(
            user_id=str(logged.impression.user_id),
            item_ids=tuple(item_id for item_id, _ in kept),
            counts=tuple(count for _, (count, _) in kept),
            times_s=tuple(last_s for _, (_, last_s) in kept),
            position=logged.position,
        )
    return row
