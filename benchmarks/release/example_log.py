"""An example log for reports, of an experiment with known truth.

    python -m benchmarks.release.example_log FOLDER

Writes `experiments.toml`, a week of `impressions` and `interactions` as the worker writes them, and `policy.parquet`.
Of 6,000 users half see the variant fresh, which draws 15 % fewer clicks. The first position is drawn from the four best
items, and recorded with its propensity; the policy shows the best item more often.
"""

import sys
from pathlib import Path

import numpy as np
import polars as pl

from services.contracts.experiments import parse_experiments, variant_field

_FILE = """[layers.ranking]
salt = "ranking-1"

[experiments.fresher]
layer = "ranking"
surfaces = ["home", "cart"]
share = 1.0
starts = 2026-11-01T00:00:00Z

[experiments.fresher.variants.control]

[experiments.fresher.variants.fresh]
rules = "home-fresh"
"""
_START_MS, _DAY_MS = 1_793_491_200_000, 86_400_000
_NUM_DAYS, _NUM_USERS, _NUM_A_DAY, _NUM_ITEMS, _NUM_SHOWN, _NUM_BEST = 7, 6_000, 8_000, 300, 5, 4
_POLICY = np.array([0.55, 0.15, 0.15, 0.15])
_FACTORS = {"fresher=control": 1.0, "fresher=fresh": 0.85}
_APPEAL = np.array([0.06, 0.03, 0.03, 0.02])


def write_example(folder: Path) -> None:
    """Write all files."""
    draw = np.random.default_rng(0)
    experiments = parse_experiments(_FILE)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "experiments.toml").write_text(_FILE)
    surfaces = np.where(draw.random(_NUM_USERS) < 0.3, "cart", "home")
    variants = [
        str(variant_field(experiments.assign(str(surface), f"u{user}", _START_MS)))
        for user, surface in enumerate(surfaces)
    ]
    policy = []
    for day in range(_NUM_DAYS):
        start = _START_MS + day * _DAY_MS
        user, shown_ms = draw.integers(0, _NUM_USERS, _NUM_A_DAY), start + draw.integers(0, _DAY_MS, _NUM_A_DAY)
        best = np.argsort(draw.random((_NUM_A_DAY, _NUM_ITEMS)), axis=1)[:, : _NUM_BEST + _NUM_SHOWN - 1]
        first = draw.integers(0, _NUM_BEST, _NUM_A_DAY)
        items = np.column_stack([best[np.arange(_NUM_A_DAY), first], best[:, _NUM_BEST:]])
        factor = np.array([_FACTORS[variants[number]] for number in user])
        clicked_position = np.where(draw.random(_NUM_A_DAY) < factor * _APPEAL[first], 0, -1)
        clicked_position = np.where(
            (clicked_position < 0) & (draw.random(_NUM_A_DAY) < factor * 0.07),
            draw.integers(1, _NUM_SHOWN, _NUM_A_DAY),
            clicked_position,
        )
        requests = [f"r{day}-{number}" for number in range(_NUM_A_DAY)]
        impressions = pl.DataFrame(
            {
                "request_id": requests,
                "user_id": [f"u{number}" for number in user],
                "shown_time_ms": shown_ms,
                "item_ids": [[f"i{item}" for item in row] for row in items],
                "propensity": [[1 / _NUM_BEST] + [1.0] * (_NUM_SHOWN - 1)] * _NUM_A_DAY,
                "tier": ["llm" if number % 3 == 0 else "student" for number in range(_NUM_A_DAY)],
                "bundle_version": ["20261101T000000Z-0a1b2c3d"] * _NUM_A_DAY,
                "surface": surfaces[user],
                "variant": [variants[number] for number in user],
                "elapsed_ms": draw.lognormal(2, 0.5, _NUM_A_DAY),
            }
        )
        clicked = np.flatnonzero(clicked_position >= 0)
        events = pl.DataFrame(
            {
                "event_id": [f"e{requests[number]}" for number in clicked],
                "user_id": [f"u{number}" for number in user[clicked]],
                "item_id": [f"i{item}" for item in items[clicked, clicked_position[clicked]]],
                "event_type": ["click"] * len(clicked),
                "event_time_ms": shown_ms[clicked] + draw.integers(1_000, 600_000, len(clicked)),
                "value": [1.0] * len(clicked),
                "request_id": [requests[number] if draw.random() < 0.8 else None for number in clicked],
            }
        )
        for name, table in (("impressions", impressions), ("interactions", events)):
            (folder / name).mkdir(exist_ok=True)
            table.write_parquet(folder / name / f"{day}.parquet")
        policy.append(pl.DataFrame({"request_id": requests, "probability": _POLICY[first]}))
    pl.concat(policy).write_parquet(folder / "policy.parquet")


if __name__ == "__main__":
    write_example(Path(sys.argv[1]))
