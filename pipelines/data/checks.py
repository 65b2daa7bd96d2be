"""Checks of the data against the live bundle's data: volume, unusable rows, and drift of new events.

    describe(ingested, since) ──▶ facts, kept in the bundle's manifest under `data` and printed
    problems(now, before, options) ──▶ facts beyond their bound

The clean tables are written in any case. A fact beyond its bound stops the publication, because something upstream of
this pipeline has probably changed. Drift is the population stability index (PSI) of the fractions of new and old
events: sum((new - old) * ln(new / old)). By a usual rule of thumb, a PSI below 0.1 means no change and above 0.25 a
large change (Siddiqi, Credit Risk Scorecards, 2006).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from pipelines.data.options import CheckOptions

_NUM_BINS = 10
_MIN_ROWS = 1_000
"""With fewer rows, neither a fraction nor the index is meaningful."""
_MIN_SHARE = 1e-4
"""The fraction assumed for an empty bin, so that the index stays finite."""


def describe(ingested: Path, before: Mapping[str, Any] | None, now_us: int) -> dict[str, Any]:
    """Return the facts of these tables (JSON values). Events later than the newest of `before` are new.

    `before` holds the live bundle's facts. Its newest event is the newest up to its time: an event in the future would
    otherwise leave no event new.
    """
    summary = json.loads((ingested / "ingest.json").read_text())
    events = pl.read_parquet(ingested / "events.parquet")
    times_us = events["event_time"].dt.epoch("us")
    since_us = before.get("newest_event_us") if before else None
    return {
        "num_events": summary["num_events"],
        "num_users": summary["num_users"],
        "num_items": summary["num_items"],
        "oldest_event_us": times_us.min(),
        "newest_event_us": times_us.filter(times_us <= now_us).max(),
        "notes": [f"{note['kind']}: {note['what']}" for note in summary.get("notes", ())],
        "unusable_shares": _unusable_shares(summary),
        **_drift_since(events, since_us),
    }


def problems(now: Mapping[str, Any], before: Mapping[str, Any] | None, options: CheckOptions) -> list[str]:
    """Return the facts beyond their bounds, each with the option that changes the bound."""
    sentences = [
        (
            f"{share:.1%} of the {table} cannot be used ({reason}), over {options.max_unusable_share:.0%} "
            "(--max-unusable-share)"
        )
        for table, by_reason in now["unusable_shares"].items()
        for reason, share in by_reason.items()
        if share > options.max_unusable_share
    ]
    for name in ("events", "users", "items") if before else ():
        num, num_before = now[f"num_{name}"], (before or {}).get(f"num_{name}", 0)
        if num < options.min_volume_share * num_before:
            sentences.append(
                f"{num} {name} are {num / num_before:.0%} of the live bundle's {num_before}, under "
                f"{options.min_volume_share:.0%} (--min-volume-share)"
            )
    sentences += [
        f"new events differ from the old ones in {what}: PSI {value:.2f}, over {options.max_drift:g} (--max-drift)"
        for what, value in now["drift"].items()
        if value > options.max_drift
    ]
    return sentences


def psi(new: np.ndarray, old: np.ndarray) -> float:
    """Return the population stability index of two lists of counts, bin by bin."""
    shares = [np.maximum(counts / max(1, counts.sum()), _MIN_SHARE) for counts in (new, old)]
    return float(((shares[0] - shares[1]) * np.log(shares[0] / shares[1])).sum())


def _unusable_shares(summary: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return the fraction of unusable rows by event table and reason, for tables that are large enough."""
    num_rows = {"events": summary["num_recorded_rows"], "live": summary["num_live_rows"]}
    shares = {
        name: {
            reason: rejection["num_rows"] / num_rows[table] for reason, rejection in summary["rejected"][table].items()
        }
        for table, name in (("events", "recorded events"), ("live", "live events"))
        if num_rows[table] >= _MIN_ROWS
    }
    if num_rows["events"] >= _MIN_ROWS and (num_unread := summary.get("num_unread_values", 0)):
        shares["recorded values"] = {"no number": num_unread / num_rows["events"]}
    return shares


def _drift_since(events: pl.DataFrame, since_us: int | None) -> dict[str, Any]:
    """Return the number of events later than this time, and their PSI by quantity; empty if too few are new or old.

    Items are compared by how often they were used before, types and values among the types that existed before: a new
    item or type is not drift of the old ones.
    """
    micros = pl.col("event_time").dt.epoch("us")
    is_new = micros > since_us if since_us is not None else pl.lit(value=False)
    new, old = events.filter(is_new), events.filter(~is_new)
    drift = {}
    if min(new.height, old.height) >= _MIN_ROWS:
        shelves = _shelves(old["item_id"])
        drift["items"] = _psi_of(
            new["item_id"].replace_strict(shelves, default=None), old["item_id"].replace_strict(shelves)
        )
        types = old["event_type"].unique()
        drift["event types"] = _psi_of(
            new["event_type"].filter(new["event_type"].is_in(types.implode())), old["event_type"]
        )
        for name in sorted(types):
            news, olds = (part.filter(pl.col("event_type") == name)["value"] for part in (new, old))
            if min(len(news), len(olds)) >= _MIN_ROWS:
                drift[f"values of {name}"] = _psi_of(_binned(news, olds), _binned(olds, olds))
    return {"num_new_events": new.height, "drift": drift}


def _psi_of(new: pl.Series, old: pl.Series) -> float:
    """Return the PSI of two columns of categories; 0 with too few new rows."""
    new = new.drop_nulls()
    if len(new) < _MIN_ROWS:
        return 0.0
    counts = [dict(zip(*np.unique(column.to_numpy(), return_counts=True), strict=True)) for column in (new, old)]
    names = sorted({*counts[0], *counts[1]})
    return psi(*(np.array([by_category.get(name, 0) for name in names], dtype=np.float64) for by_category in counts))


def _shelves(item_ids: pl.Series) -> dict[str, int]:
    """Return each item's bin: the most used items with a tenth of all events form the first bin, and so on."""
    used = item_ids.value_counts(sort=True)
    before = used["count"].cum_sum() - used["count"]
    return dict(zip(used[item_ids.name], (before * _NUM_BINS // len(item_ids)).to_list(), strict=True))


def _binned(values: pl.Series, by: pl.Series) -> pl.Series:
    """Return each value's bin between the deciles of the other column."""
    edges = np.unique(np.quantile(by.to_numpy(), np.arange(1, _NUM_BINS) / _NUM_BINS))
    return pl.Series(np.searchsorted(edges, values.to_numpy(), side="left"))
