"""Checks that stop a publication: too few rows, too many unusable rows, and drift of new events."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from pipelines.data.checks import describe, problems, psi
from pipelines.data.options import CheckOptions

DAY_US = 86_400_000_000
NOW_US = 10 * DAY_US


def write_tables(
    folder: Path, new_items: np.ndarray, new_values: np.ndarray, num_unknown: int = 0, **more: object
) -> Path:
    """Write 4,000 old events spread over 40 items with values 1 to 5, and the new events a day later."""
    old_items, old_values = np.arange(4_000) % 40, np.arange(4_000) % 5 + 1
    items, values = np.concatenate([old_items, new_items]), np.concatenate([old_values, new_values])
    times = np.concatenate([np.arange(4_000), DAY_US + np.arange(len(new_items))])
    folder.mkdir()
    pl.DataFrame(
        {
            "item_id": [f"i{item}" for item in items],
            "event_type": ["rating"] * len(items),
            "value": values.astype(np.float64),
            "event_time": pl.from_epoch(pl.Series(times), "us").dt.replace_time_zone("UTC"),
        }
    ).write_parquet(folder / "events.parquet")
    rejected = {"item_id not in items": {"num_rows": num_unknown, "samples": []}} if num_unknown else {}
    summary = {
        "num_events": len(items),
        "num_users": 100,
        "num_items": 40,
        "num_recorded_rows": len(items) + num_unknown,
        "num_live_rows": 0,
        "rejected": {"events": rejected, "live": {}},
    }
    (folder / "ingest.json").write_text(json.dumps(summary | more))
    return folder


def found_in(folder: Path, before: dict[str, Any] | None, options: CheckOptions | None = None) -> list[str]:
    return problems(describe(folder, before, NOW_US), before, options or CheckOptions())


@pytest.fixture
def before(tmp_path: Path) -> dict[str, Any]:
    """The description of the live bundle's data: only the old events."""
    nothing = np.empty(0, dtype=np.int64)
    return describe(write_tables(tmp_path / "before", nothing, nothing), None, NOW_US)


def test_new_events_like_the_old_ones_pass(tmp_path: Path, before: dict[str, Any]) -> None:
    """Similar events, a first run, drift in too few events, and events of new items all pass."""
    rng = np.random.default_rng(1)
    alike = write_tables(tmp_path / "alike", rng.integers(0, 40, 2_000), rng.integers(1, 6, 2_000))
    few = write_tables(tmp_path / "few", np.zeros(900, dtype=np.int64), np.ones(900))
    half_new = np.concatenate([rng.integers(0, 40, 1_500), rng.integers(40, 80, 1_500)])
    of_new_items = write_tables(tmp_path / "new", half_new, rng.integers(1, 6, 3_000))

    assert found_in(alike, None) == found_in(alike, before) == []
    assert found_in(few, before) == found_in(of_new_items, before) == []
    assert describe(alike, before, NOW_US)["num_new_events"] == 2_000
    assert set(describe(alike, before, NOW_US)["drift"]) == {"items", "event types", "values of rating"}


def test_drift_names_what_changed(tmp_path: Path, before: dict[str, Any]) -> None:
    """Drift in items and in values is reported separately, unless the bound is lifted."""
    rng = np.random.default_rng(2)
    one_item = write_tables(tmp_path / "item", np.zeros(2_000, dtype=np.int64), rng.integers(1, 6, 2_000))
    one_value = write_tables(tmp_path / "value", rng.integers(0, 40, 2_000), np.ones(2_000))

    (item,), (value,) = found_in(one_item, before), found_in(one_value, before)

    assert item.startswith("new events differ from the old ones in items: PSI ")
    assert value.startswith("new events differ from the old ones in values of rating: PSI ")
    assert found_in(one_item, before, CheckOptions(max_drift=float("inf"))) == []


def test_a_half_loaded_table_and_unknown_items_are_stopped(tmp_path: Path, before: dict[str, Any]) -> None:
    """Under 80 % of the live bundle's events, or over 20 % of unusable rows, stop the publication."""
    nothing = np.empty(0, dtype=np.int64)
    now = write_tables(tmp_path / "now", nothing, nothing, num_unknown=1_500, num_unread_values=2_200)

    problems = found_in(now, before | {"num_events": 10_000, "num_users": 101})

    assert problems == [
        "27.3% of the recorded events cannot be used (item_id not in items), over 20% (--max-unusable-share)",
        "40.0% of the recorded values cannot be used (no number), over 20% (--max-unusable-share)",
        "4000 events are 40% of the live bundle's 10000, under 80% (--min-volume-share)",
    ]


def test_an_event_in_the_future_hides_no_later_ones(tmp_path: Path) -> None:
    """The newest recorded event lies in the past, so later events count as new."""
    single = np.zeros(1, dtype=np.int64)
    folder = write_tables(tmp_path / "now", single, single)

    assert describe(folder, None, NOW_US)["newest_event_us"] == DAY_US
    assert describe(folder, None, DAY_US - 1)["newest_event_us"] == 3_999


def test_psi_of_a_known_example() -> None:
    """For fractions .5, .5 against .8, .2 the PSI is .3 * ln(.8 / .5) + .3 * ln(.5 / .2)."""
    expected = 0.3 * np.log(0.8 / 0.5) + 0.3 * np.log(0.5 / 0.2)

    assert psi(np.array([50.0, 50.0]), np.array([80.0, 20.0])) == pytest.approx(expected)
    assert psi(np.array([3.0, 5.0]), np.array([30.0, 50.0])) == 0
