"""Synthetic event and item files: items by Zipf's law, lognormal numbers of events per user, no repeated items."""

from pathlib import Path

import numpy as np
import polars as pl

EVENTS, ITEMS = "events.parquet", "items.parquet"
_MEDIAN_EVENTS, _SIGMA, _MOST_EVENTS = 20, 1.1, 500
_DRAWN = 3
"""Events drawn per kept event: a repeated item of a user is discarded."""
_FIRST_TIME_S, _DAYS = 1_700_000_000, 90
_NUM_WORDS, _WORDS_PER_TITLE, _NUM_CATEGORIES = 5_000, 4, 50


def write_tables(folder: Path, num_events: int, num_items: int) -> None:
    """Write both tables with a fixed seed. Exits if there are too few items for the events."""
    rng = np.random.default_rng(0)
    _events(rng, num_events, num_items).write_parquet(folder / EVENTS)
    _items(rng, num_items).write_parquet(folder / ITEMS)


def _events(rng: np.random.Generator, num_events: int, num_items: int) -> pl.DataFrame:
    num_drawn = _DRAWN * num_events
    counts = rng.lognormal(np.log(_MEDIAN_EVENTS), _SIGMA, num_drawn // 10).clip(1, _MOST_EVENTS).astype(np.int64)
    users = np.repeat(np.arange(len(counts)), counts)[:num_drawn]
    reached = np.cumsum(1 / np.arange(1, num_items + 1))
    ranks = np.searchsorted(reached, rng.random(len(users)) * reached[-1])
    drawn = pl.DataFrame({"user": users, "item": rng.permutation(num_items)[ranks]})
    pairs = drawn.unique(maintain_order=True).head(num_events)
    if len(pairs) < num_events:
        raise SystemExit(f"error: {num_items} items give {len(pairs)} different events instead of {num_events}")
    return pairs.select(
        user_id=pl.format("user-{}", "user"),
        item_id=pl.format("item-{}", "item"),
        event_time=pl.Series(_FIRST_TIME_S + rng.integers(0, _DAYS * 86_400, num_events)),
        event_type=pl.lit("click"),
        value=pl.lit(1.0),
    )


def _items(rng: np.random.Generator, num_items: int) -> pl.DataFrame:
    words = np.array([f"word{number}" for number in range(_NUM_WORDS)])
    titles = words[rng.integers(0, _NUM_WORDS, (num_items, _WORDS_PER_TITLE))]
    return pl.DataFrame(
        {
            "item_id": [f"item-{number}" for number in range(num_items)],
            "title": [" ".join(title) for title in titles],
            "categories": [f"kind{number}" for number in rng.integers(0, _NUM_CATEGORIES, num_items)],
        }
    )
