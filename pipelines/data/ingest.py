"""Stage 1: turn any source of events into two clean tables; set unusable rows aside, drop exact duplicates, count both.

    arrivals.parquet    all events in order of arrival, as histories hold them (pipelines.data.arrivals)
    events.parquet      events of known items that histories hold: user_id, item_id, event_time, event_type, value,
                        role, weight, count; by time. The time is that of the user's row after the event (timestamp[us,
                        UTC]): it rises strictly per user, also when events came late
    dislikes.parquet    users' dislikes of known items: user_id, item_id, event_time, weight, until
                        (pipelines.data.roles.dislikes_of)
    items.parquet       item_id, title, categories (list of text), text
    rejected_*.parquet  rows set aside, as text, with row number and reason; malformed rows have only these two
    ingest.json         counts, samples of each reason, and notes on changed or odd values

The live log that the stream worker writes follows the recorded events: a user's ratings of last year and clicks of
today are one history. An event in both counts once, as the log's.
Event roles decide what an event means (services.contracts.event_roles). This file does not know how events are split.
"""

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from models.files import each_file, file_sha256, status_of
from pipelines.data import arrivals, erased, roles, sources
from pipelines.data.erased import keeps_unerased, logged_without_erased
from pipelines.data.examples import MIN_EVENTS_TO_EVALUATE
from pipelines.runner.stage import content_key
from pipelines.tables.columns import check_used
from pipelines.tables.events import EVENT_TYPES, UNKNOWN_ITEM, order_events
from pipelines.tables.files import Frame
from pipelines.tables.findings import NUM_SAMPLES, Findings, Note, SetAside, describe_reason
from pipelines.tables.ids import is_bad
from pipelines.tables.options import PLAIN, TableOptions
from pipelines.tables.reader import EventTable, ItemTable, open_table
from pipelines.tables.times import END_OF_TIMES, FIRST_TIME, UTC_US
from services.contracts import event_roles
from services.contracts.event_roles import DEFAULT_ROLES, EventRoles, Role
from services.contracts.tenant import DEFAULT_TENANT, SEPARATOR, prefix_of
from services.errors import StageFailed
from services.features.schema import BASE_TOPIC
from services.stream import aggregate
from services.stream.log.files import current_files, topic_folder
from services.stream.log.ledger import ErasureLedger, Tombstone

_MIN_EVENTS = MIN_EVENTS_TO_EVALUATE + 1
_MOST_LEAD = timedelta(days=1)
_PLACE = ["topic_id", "partition", "offset"]
_LIVE_TYPES = {
    "event_id": pl.String,
    "user_id": pl.String,
    "item_id": pl.String,
    "event_type": pl.String,
    "event_time_ms": pl.Int64,
    "value": pl.Float64,
    "topic_id": pl.String,
    "partition": pl.Int32,
    "offset": pl.Int64,
}


@dataclass(frozen=True, slots=True)
class IngestSources:
    """Sources of events and items: table files, ml-100k if both are None, and files of the live log.

    Without an events file, the live log holds all events. `roles` are the roles of event types.
    """

    events: Path | None
    items: Path | None
    live_log: tuple[Path, ...]
    roles: EventRoles = DEFAULT_ROLES
    erasures: ErasureLedger | None = None
    """Users whose events are excluded: log events before an erasure, table rows up to its time."""
    tables: TableOptions = PLAIN
    """Options for reading the files of events and items."""
    tenant: str = DEFAULT_TENANT
    """The tenant whose users' log events are read, under the ids that its callers know."""


def live_log_files(offline_log_dir: Path) -> tuple[Path, ...]:
    """List the stream worker's files of raw interactions in order of arrival, skipping files merged into larger ones.

    Within a partition, topics come in order of creation, and a topic's files by day and offset.
    """
    listed = (path for path in each_file(offline_log_dir / "interactions") if path.suffix == ".parquet")
    files = {path: status.st_mtime for path in current_files(listed) if (status := status_of(path))}
    made = {topic_folder(path): files[path] for path in reversed(files)}

    def arrival(path: Path) -> tuple[Path, float, Path]:
        topic = topic_folder(path)
        return topic.parent, made[topic], path

    return tuple(sorted(files, key=arrival))


def key(source: IngestSources) -> str:
    """Return the content key of this source: the files' hashes, and the live events however files divide them."""
    own = [file_sha256(path) for path in (source.events, source.items) if path is not None and path.is_file()]
    live = hashlib.sha256(_live_events(source)[0].write_csv().encode()).hexdigest() if source.live_log else ""
    erasure_ids = sorted(tombstone.erasure_id for tombstone in _tombstones(source))
    parameters = {"own": own, "live": live, "roles": msgspec.to_builtins(source.roles)}
    parameters |= {"erased": erasure_ids} if erasure_ids else {}
    parameters |= {"tenant": source.tenant} if source.tenant else {}
    parameters |= {"tables": repr(source.tables)} if source.tables != PLAIN else {}
    return content_key(
        parameters, [sources.WHEEL_SHA256], [sys.modules[__name__], arrivals, erased, aggregate, event_roles]
    )


def ingest(source: IngestSources, cache_dir: Path, out: Path) -> None:
    """Read, check, merge and order the source into `out`. Raises DataError or EnvironmentFault."""
    item_table, event_table = open_tables(source, cache_dir)
    items = item_table.read_catalogue()
    known_ids = items["item_id"]
    recorded = pl.DataFrame(schema=EVENT_TYPES)
    notes: list[Note] = []
    if event_table is not None:
        recorded = event_table.read(known_ids, keeps_unerased(source.erasures, source.tenant))
        notes += event_table.findings.notes
    notes += item_table.findings.notes
    live, unreadable = _live_events(source)
    if unreadable:
        skipped = f"{len(unreadable)} files cannot be read and are skipped"
        notes.append(Note("live log", skipped, ", ".join(map(str, unreadable[:NUM_SAMPLES]))))
    logged, unusable = _check_live(live, known_ids)
    has_ids = event_table is not None and "event_id" in event_table.named.fields
    recorded = recorded.drop("row") if has_ids else recorded.drop("row", "event_id")
    own = arrivals.not_logged(recorded, logged)
    past = own.filter(roles.role_of(source.roles) != Role.IGNORED)
    arrived = arrivals.arrange(order_events(past), logged, source.roles)
    known = _of_known_items(arrived, known_ids)
    events = roles.with_labels(known, source.roles).filter(roles.joins_history())
    is_live = (pl.col("topic_id") != BASE_TOPIC) & pl.col("item_id").is_in(known_ids.implode())
    all_events = pl.concat([own.select("event_type", "value"), logged.select("event_type", "value")])
    if num_logged := recorded.height - own.height:
        notes.append(Note("events", f"{num_logged} are also in the live log and count once, in their order of arrival"))
    notes += [Note("events", sentence) for sentence in roles.describe_alike(all_events, source.roles)]
    read = event_table.findings if event_table is not None else Findings("events")
    summary: dict[str, Any] = {
        "num_events": events.height,
        "num_live_events": arrived.filter(is_live).height,
        "num_users": events["user_id"].n_unique(),
        "num_items": items.height,
        "repeat_share": roles.repeat_share(events),
        "rejected": {
            "events": _by_reason(read.set_aside),
            "items": _by_reason(item_table.findings.set_aside),
            "live": _by_reason(_reasons(unusable)),
        },
        "num_recorded_rows": max(read.num_rows - read.num_duplicates, recorded.height),
        "num_live_rows": live.height,
        "num_duplicates": read.num_duplicates,
        "num_unread_values": read.num_unread.get("value", 0),
        "roles": roles.describe(all_events, source.roles),
        "notes": [asdict(note) for note in notes],
    }
    _require_enough(events, items, [*summary["roles"], *map(str, notes), *_rejections(summary["rejected"])])
    arrived.write_parquet(out / "arrivals.parquet")
    events.write_parquet(out / "events.parquet")
    roles.dislikes_of(known, source.roles).write_parquet(out / "dislikes.parquet")
    items.write_parquet(out / "items.parquet")
    rejected_events = event_table.rejected if event_table is not None else pl.DataFrame(schema={"reason": pl.String})
    for name, rows in (("events", rejected_events), ("items", item_table.rejected), ("live", unusable)):
        rows.write_parquet(out / f"rejected_{name}.parquet")
    (out / "ingest.json").write_text(json.dumps(summary, indent=1))


def describe_found(ingested: Path) -> list[str]:
    """Return sentences: the number of events of each type by role, the notes on the tables, and the repeats."""
    summary = _read_summary(ingested)
    repeats = f"{summary['repeat_share']:.1%} of labels repeat an item of the user's history"
    return [*summary["roles"], *(str(Note(**note)) for note in summary["notes"]), repeats]


def set_aside(ingested: Path) -> list[str]:
    """Return a sentence for each reason of rejected rows: count, reason and an example row."""
    return _rejections(_read_summary(ingested)["rejected"])


def describe_future(ingested: Path, now: datetime) -> list[str]:
    """Return a sentence on events more than a day in the future; None without such events.

    A time zone does not explain them, and they remain the newest events of their users.
    """
    events = pl.scan_parquet(ingested / "events.parquet")
    future = events.filter(pl.col("event_time") > now + _MOST_LEAD).collect()
    if future.is_empty():
        return []
    user_id, item_id, when = future.sort("event_time").row(-1)[:3]
    latest = f"user_id={user_id}, item_id={item_id}, {when:%Y-%m-%d}"
    what = f"events: {future.height} have an event_time in the future, such as {latest}"
    return [f"{what}: they count as newer than all real events; give Unix seconds, Unix milliseconds or ISO 8601"]


def _read_summary(ingested: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((ingested / "ingest.json").read_text())
    return summary


def _rejections(rejected: dict[str, dict[str, Any]]) -> list[str]:
    return [
        describe_reason(name, reason, SetAside(**group))
        for name, reasons in rejected.items()
        for reason, group in reasons.items()
    ]


def count_for_training(source: IngestSources, item_ids: Sequence[str]) -> tuple[int, int, int]:
    """Return the live log's number of positive events of these items, number of their users, and missing events.

    The last is how many more events a single user needs for training.
    """
    live, _ = _live_events(source)
    logged, _ = _check_live(live, pl.Series(item_ids, dtype=pl.String))
    positive = logged.filter(roles.role_of(source.roles) == Role.POSITIVE, pl.col("item_id").is_in(list(item_ids)))
    longest = max(positive["user_id"].value_counts()["count"], default=0)
    return positive.height, positive["user_id"].n_unique(), max(0, _MIN_EVENTS - longest)


def _require_enough(events: pl.DataFrame, items: pl.DataFrame, found_out: list[str]) -> None:
    """Validate that the data suffices for training and evaluation. Raises StageFailed with roles and rejected rows."""
    positive = events.filter(pl.col("role") == Role.POSITIVE)
    longest = max(positive["user_id"].value_counts()["count"], default=0)
    if longest < _MIN_EVENTS:
        problem = f"of {positive.height} positive events that can be used, no user has more than {longest}"
        needed = f"{_MIN_EVENTS} of one user are needed: two to learn from, one to validate, one to test"
        missing = f"{_MIN_EVENTS - longest} more of one user are missing"
        raise StageFailed("ingest", "; ".join((problem, needed, missing, *found_out)))
    if items.height < 2:
        problem = f"{items.height} items that can be used are too few for a choice; give at least 2"
        raise StageFailed("ingest", "; ".join((problem, *found_out)))


def open_tables(source: IngestSources, cache_dir: Path) -> tuple[ItemTable, EventTable | None]:
    """Open the tables of items and of recorded events, if any. Raises DataError, ConfigError or EnvironmentFault."""
    if source.items is not None:
        return open_own_tables(source.events, source.items, source.tables)
    wheel = sources.fetch_wheel(cache_dir)
    items = ItemTable(Frame(sources.movielens_items(wheel), "items"))
    return items, EventTable(Frame(sources.movielens_events(wheel), "events"))


def open_own_tables(
    events_file: Path | None, items_file: Path, options: TableOptions
) -> tuple[ItemTable, EventTable | None]:
    """Open a user's tables, and map their columns. Raises DataError or ConfigError."""
    items = ItemTable(open_table(items_file, "items", options), options)
    opened = [("items", items.table, items.named)]
    events = None
    if events_file is not None:
        events = EventTable(open_table(events_file, "events", options), options)
        opened.insert(0, ("events", events.table, events.named))
    check_used(options, opened)
    return items, events


def _check_live(live: pl.DataFrame, known_items: pl.Series) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return the live log in order of arrival, and its rows that no model trains on, as text with the reason.

    The gateway has validated these events, so ids are exact. Histories also hold events of items outside the catalogue:
    the next catalogue may have them.
    """
    time = pl.from_epoch("event_time_ms", "ms").dt.replace_time_zone("UTC").cast(UTC_US)
    value = pl.when(pl.col("value").is_finite()).then("value").otherwise(1.0)
    event_type = pl.col("event_type").fill_null("interaction")
    typed = live.with_columns(event_time=time, value=value, event_type=event_type)
    columns = ["user_id", "item_id", "event_time", "event_type", "value", "event_id", *_PLACE]
    is_timely = (pl.col("event_time") >= FIRST_TIME) & (pl.col("event_time") < END_OF_TIMES)
    reason = (
        pl.when(is_bad("user_id")).then(pl.lit("user_id"))
        .when(is_bad("item_id")).then(pl.lit("item_id"))
        .when(~is_timely).then(pl.lit("event_time"))
    )  # fmt: skip
    typed = typed.select(columns).with_columns(reason=reason)
    unknown = reason.when(~pl.col("item_id").is_in(known_items.implode())).then(pl.lit(UNKNOWN_ITEM))
    unusable = typed.with_columns(reason=unknown).filter(pl.col("reason").is_not_null()).drop("event_id", *_PLACE)
    return typed.filter(pl.col("reason").is_null()).drop("reason"), unusable.cast(pl.String)


def _tombstones(source: IngestSources) -> Iterator[Tombstone]:
    ledger = source.erasures
    return (
        (tombstone for partition in ledger.partitions for tombstone in ledger.tombstones(partition))
        if ledger
        else iter(())
    )


def _live_events(source: IngestSources) -> tuple[pl.DataFrame, list[Path]]:
    """Return the log events not covered by an erasure, and the unreadable files."""
    raw, unreadable = [pl.DataFrame(schema=_LIVE_TYPES)], []
    for path in source.live_log:
        try:
            raw.append(pl.read_parquet(path, columns=list(_LIVE_TYPES)))
        except (pl.exceptions.PolarsError, FileNotFoundError):  # also a file that was removed with its day
            unreadable.append(path)
    events = pl.concat(raw).unique(_PLACE, keep="first", maintain_order=True)
    return _of_tenant(logged_without_erased(events, source.erasures), source.tenant), unreadable


def _of_tenant(events: pl.DataFrame, tenant: str) -> pl.DataFrame:
    """Return the events of one tenant's users, with local user ids."""
    owner = pl.col("user_id")
    if not tenant:
        return events.filter(~owner.str.contains(SEPARATOR, literal=True))
    own = events.filter(owner.str.starts_with(prefix_of(tenant)))
    return own.with_columns(owner.str.strip_prefix(prefix_of(tenant)))


def _of_known_items(arrived: pl.DataFrame, known_items: pl.Series) -> pl.DataFrame:
    """Return the events to train on, for and against, at the times of the rows after them."""
    known = arrived.filter(pl.col("item_id").is_in(known_items.implode()))
    return (
        known.select("user_id", "item_id", "row_time", "event_type", "value")
        .rename({"row_time": "event_time"})
        .sort("event_time", "user_id")
    )


def _reasons(rows: pl.DataFrame) -> dict[str, SetAside]:
    """Return the rows of the live log that are set aside, by reason."""
    groups = {}
    for (reason,), group in rows.group_by("reason", maintain_order=True):
        groups[str(reason)] = SetAside(group.height, [], [*group.head(NUM_SAMPLES).to_dicts()])
    return groups


def _by_reason(reasons: dict[str, SetAside]) -> dict[str, Any]:
    return {reason: asdict(group) for reason, group in reasons.items()}
