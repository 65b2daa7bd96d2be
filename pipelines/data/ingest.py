"""Stage 1: any source of events becomes two clean tables; unusable rows are set aside and counted.

    events.parquet      user_id, item_id, event_time (timestamp[us, UTC], strictly rising per user), event_type, value; by time
    items.parquet       item_id, title, categories (list of text), text
    rejected_*.parquet  the rows that were set aside, as text, with the reason
    ingest.json         counts, and a few samples of each reason

The live log that the stream worker writes is merged in: a user's ratings of last year and clicks of today are one history. This file does
not know what events mean or how they are split.
"""

import hashlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from models.files import file_sha256
from pipelines.data import schema, sources
from pipelines.data.examples import MIN_EVENTS_TO_EVALUATE
from pipelines.data.schema import Checked
from pipelines.runner.stage import content_key
from services.errors import StageFailed
from services.stream.log_files import current_files

_MIN_EVENTS = MIN_EVENTS_TO_EVALUATE + 1
_SAMPLES_PER_REASON = 5
_LIVE_COLUMNS = ["event_id", "user_id", "item_id", "event_type", "event_time_ms", "value"]


@dataclass(frozen=True, slots=True)
class Source:
    """Where events and items come from: two files of the user's own, or (both None) ml-100k; and files of the live log."""

    events: Path | None
    items: Path | None
    live_log: tuple[Path, ...]


def live_log_files(offline_log_dir: Path) -> tuple[Path, ...]:
    """List the stream worker's files of raw interactions, in name order, without those that were merged into larger ones."""
    return tuple(current_files((offline_log_dir / "interactions").rglob("*.parquet")))


def key(source: Source) -> str:
    """Return the content key of this source: the files' hashes, and the live events however they are cut into files."""
    own = [file_sha256(path) for path in (source.events, source.items) if path is not None and path.is_file()]
    live = hashlib.sha256(_live_events(source.live_log).write_csv().encode()).hexdigest() if source.live_log else ""
    return content_key({"own": own, "live": live}, [sources.WHEEL_SHA256], [sys.modules[__name__]])


def ingest(source: Source, cache_dir: Path, out: Path) -> None:
    """Read, check, merge and order the source into `out`. Raises DataError or EnvironmentFault."""
    raw_events, raw_items = _read(source, cache_dir)
    items = schema.check_items(raw_items, source.items.name if source.items else "items")
    recorded = schema.check_events(raw_events, items.good["item_id"], source.events.name if source.events else "events")
    live = _check_live(source.live_log, items.good["item_id"])
    events = schema.order_events(pl.concat([recorded.good, live.good]))
    rejected = {"events": recorded.rejected, "items": items.rejected, "live": live.rejected}
    summary = _summary(events, items.good, live.good.height, rejected)
    _require_enough(events, items.good, _rejections(summary["rejected"]))
    events.write_parquet(out / "events.parquet")
    items.good.write_parquet(out / "items.parquet")
    for name, rows in rejected.items():
        rows.write_parquet(out / f"rejected_{name}.parquet")
    (out / "ingest.json").write_text(json.dumps(summary, indent=1))


def set_aside(ingested: Path) -> list[str]:
    """Return a sentence for each reason for which rows were set aside: how many, the reason, and one of them."""
    return _rejections(json.loads((ingested / "ingest.json").read_text())["rejected"])


def _rejections(rejected: dict[str, dict[str, Any]]) -> list[str]:
    return [
        f"{name}: {found['num_rows']} set aside ({reason}), such as {_describe_row(found['samples'][0])}"
        for name, reasons in rejected.items()
        for reason, found in reasons.items()
    ]


def _describe_row(sample: dict[str, Any]) -> str:
    return ", ".join(f"{column}={value}" for column, value in sample.items() if column != "reason")


def _require_enough(events: pl.DataFrame, items: pl.DataFrame, set_aside: list[str]) -> None:
    """Refuse data too small to train and evaluate on, naming what was set aside. Raises StageFailed."""
    longest = max(events["user_id"].value_counts()["count"], default=0)
    if longest < _MIN_EVENTS:
        found = f"of {events.height} events that can be used, no user has more than {longest}"
        needed = f"{_MIN_EVENTS} of one user are needed: two to learn from, one to validate, one to test"
        raise StageFailed("ingest", "; ".join((found, needed, *set_aside)))
    if items.height < 2:
        found = f"{items.height} items that can be used leave nothing to choose from; give at least 2"
        raise StageFailed("ingest", "; ".join((found, *set_aside)))


def _read(source: Source, cache_dir: Path) -> tuple[pl.DataFrame, pl.DataFrame]:
    if source.events is not None and source.items is not None:
        return sources.read_table(source.events), sources.read_table(source.items)
    wheel = sources.fetch_wheel(cache_dir)
    return sources.movielens_events(wheel), sources.movielens_items(wheel)


def _check_live(files: tuple[Path, ...], known_items: pl.Series) -> Checked:
    """Check the live log; an event id that came twice counts once."""
    if not files:
        empty = pl.DataFrame(schema=dict.fromkeys(("user_id", "item_id", "event_time"), pl.String))
        return schema.check_events(empty, known_items)
    once = _live_events(files).drop("event_id")
    time = pl.from_epoch("event_time_ms", "ms").dt.replace_time_zone("UTC").alias("event_time")
    return schema.check_events(once.with_columns(time).drop("event_time_ms"), known_items)


def _live_events(files: tuple[Path, ...]) -> pl.DataFrame:
    raw = pl.concat([pl.read_parquet(path, columns=_LIVE_COLUMNS) for path in files])
    return raw.unique(["user_id", "event_id"], keep="first", maintain_order=True)


def _summary(
    events: pl.DataFrame, items: pl.DataFrame, num_live: int, rejected: dict[str, pl.DataFrame]
) -> dict[str, Any]:
    return {
        "num_events": events.height,
        "num_live_events": num_live,
        "num_users": events["user_id"].n_unique(),
        "num_items": items.height,
        "rejected": {name: _by_reason(rows) for name, rows in rejected.items()},
    }


def _by_reason(rows: pl.DataFrame) -> dict[str, Any]:
    found = {}
    for (reason,), group in rows.group_by("reason", maintain_order=True):
        found[str(reason)] = {"num_rows": group.height, "samples": group.head(_SAMPLES_PER_REASON).to_dicts()}
    return found
