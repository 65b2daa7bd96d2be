"""A joined table as `tailrace experiment join` writes it, of an experiment with known truth."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import polars as pl

_FIRST = datetime(2026, 11, 1, tzinfo=UTC)
_NUM_SHOWN, _NUM_ITEMS = 3, 50


def write_table(
    folder: Path,
    *,
    click_factor: float = 1.0,
    share: float = 0.5,
    num_days: int = 4,
    num_users: int = 1_500,
    num_lists: int = 3_000,
    seed: int = 0,
) -> Path:
    """Write one file per day, with `num_lists` each, of the variants control and fresh; return the folder.

    A tenth of the control's lists has a click. Users return, have one variant, and one of two surfaces.
    """
    draw = np.random.default_rng(seed)
    is_fresh, is_cart = draw.random(num_users) < share, draw.random(num_users) < 0.3
    folder.mkdir(parents=True)
    for day in range(num_days):
        user = draw.integers(0, num_users, num_lists)
        fresh = is_fresh[user]
        clicked = draw.random(num_lists) < 0.1 * np.where(fresh, click_factor, 1.0)
        shown_ms = int((_FIRST + timedelta(days=day)).timestamp() * 1_000) + draw.integers(0, 86_400_000, num_lists)
        latency = draw.lognormal(3, 0.5, num_lists)
        clicked_positions = draw.integers(0, _NUM_SHOWN, num_lists)
        items = np.argsort(draw.random((num_lists, _NUM_ITEMS)), axis=1)[:, :_NUM_SHOWN]
        rows = [
            {
                "request_id": f"r{day}-{number}",
                "user_id": f"u{user[number]}",
                "shown_time_ms": int(shown_ms[number]),
                "surface": "cart" if is_cart[user[number]] else "home",
                "variant": f"other=a,fresher={'fresh' if fresh[number] else 'control'}",
                "tier": "student" if number % 3 else "llm",
                "elapsed_ms": float(latency[number]),
                "session": None,
                "position": position + 1,
                "item_id": f"i{items[number, position]}",
                "propensity": None,
                "clicks": int(clicked[number] and clicked_positions[number] == position),
                "value": 2.0 * (clicked[number] and clicked_positions[number] == position),
            }
            for number in range(num_lists)
            for position in range(_NUM_SHOWN)
        ]
        pl.DataFrame(rows, schema_overrides={"propensity": pl.Float64, "session": pl.String}).write_parquet(
            folder / f"{_FIRST + timedelta(days=day):%Y-%m-%d}.parquet"
        )
    return folder
