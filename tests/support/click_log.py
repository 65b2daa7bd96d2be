"""Impressions and clicks with a known join: a generator, and the expected join in plain Python, click by click."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.experiments.join import SKEW_MS, WINDOW_MS
from services.contracts.events import Impression, Interaction

_START_MS = 1_795_000_000_000
_SPAN_MS = 2 * 86_400_000
_NUM_SHOWN, _NUM_ITEMS = 10, 400
Truth = dict[tuple[str, int, str], tuple[int, float, int]]
"""By request, time and item: number of clicks, their value, the first click's time."""


@dataclass(frozen=True, slots=True)
class Log:
    """Impressions and subsequent clicks, with repeated deliveries."""

    impressions: Sequence[Impression]
    events: Sequence[Interaction]

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Write both as several Parquet files; return their folders."""
        places = folder / "impressions", folder / "interactions"
        logs: tuple[Sequence[Impression | Interaction], ...] = (self.impressions, self.events)
        for directory, rows in zip(places, logs, strict=True):
            directory.mkdir(parents=True)
            for number in range(3):
                pq.write_table(
                    pa.Table.from_pylist([msgspec.structs.asdict(row) for row in rows[number::3]]),
                    directory / f"{number}.parquet",
                )
        return places


def make_log(num_impressions: int, seed: int) -> Log:
    """Return a log of two days: visitors, repeats, reused request IDs, and late, early, doubled and foreign clicks."""
    draw = np.random.default_rng(seed)
    num_users = max(2, num_impressions // 20)
    times = np.sort(draw.integers(_START_MS, _START_MS + _SPAN_MS, num_impressions))
    impressions = []
    for number, time in enumerate(times.tolist()):
        user = None if draw.random() < 0.05 else f"u{draw.integers(num_users)}"
        request = f"r{number - 1}" if number and draw.random() < 0.01 else f"r{number}"
        items = tuple(f"i{item}" for item in draw.choice(_NUM_ITEMS, _NUM_SHOWN, replace=False))
        impressions.append(_impression(request, user, time, items))
    events: list[Interaction] = []
    for shown in impressions:
        events += _clicks_on(shown, draw, f"{len(events)}", num_users)
    repeated = [events[number] for number in draw.integers(0, max(1, len(events)), len(events) // 20)] if events else []
    again = [impressions[number] for number in draw.integers(0, num_impressions, num_impressions // 50)]
    return Log([*impressions, *again], [*events, *repeated])


def _impression(request: str, user: str | None, time: int, items: tuple[str, ...]) -> Impression:
    return Impression(
        request_id=request,
        user_id=user,
        shown_time_ms=time,
        item_ids=items,
        tier="student",
        reason="fits",
        bundle_version="v1",
        newest_event_time_ms=None,
        history_len=0,
        history_digest="",
        scores=tuple(float(-position) for position in range(len(items))),
    )


def _clicks_on(shown: Impression, draw: np.random.Generator, key: str, num_users: int) -> Iterator[Interaction]:
    for number in range(int(draw.poisson(0.4))):
        late = int(draw.integers(-SKEW_MS // 2, 2 * WINDOW_MS))
        item = shown.item_ids[int(draw.integers(_NUM_SHOWN))]
        request: str | None = shown.request_id if draw.random() < 0.6 else None
        user = shown.user_id or "visitor"
        match int(draw.integers(12)):
            case 0:
                request = "unknown"
            case 1:
                user = f"u{draw.integers(num_users)}"
            case 2:
                item = f"i{draw.integers(_NUM_ITEMS)}"
            case _:
                pass
        yield Interaction(
            event_id=f"e{key}-{number}",
            user_id=user,
            item_id=item,
            event_time_ms=shown.shown_time_ms + late,
            event_type="view" if draw.random() < 0.1 else "click",
            value=float(draw.integers(1, 5)),
            request_id=request,
        )


def truth_of(log: Log) -> Truth:
    """Return each impression's clicks, found by searching all impressions of the click's request or user."""
    by_request: dict[str, list[Impression]] = defaultdict(list)
    by_user: dict[str, list[Impression]] = defaultdict(list)
    for impression in log.impressions:
        by_request[impression.request_id].append(impression)
        if impression.user_id is not None:
            by_user[impression.user_id].append(impression)
    truth: Truth = {}
    used: set[str] = set()
    for click in log.events:
        if click.event_type != "click" or click.event_id in used:
            continue
        used.add(click.event_id)
        if click.request_id is None:
            latest, near = click.event_time_ms, by_user[click.user_id]
        else:
            latest, near = click.event_time_ms + SKEW_MS, by_request[click.request_id]
        right = [
            impression
            for impression in near
            if click.item_id in impression.item_ids and impression.shown_time_ms <= latest
        ]
        if not right:
            continue
        newest = max(right, key=lambda impression: (impression.shown_time_ms, impression.request_id))
        if newest.user_id in {None, click.user_id} and click.event_time_ms - newest.shown_time_ms <= WINDOW_MS:
            key = (newest.request_id, newest.shown_time_ms, click.item_id)
            number, value, first = truth.get(key, (0, 0.0, click.event_time_ms))
            truth[key] = number + 1, value + click.value, min(first, click.event_time_ms)
    return truth
