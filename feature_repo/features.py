"""The feature repository: entities, feature views and the feature service. Feast loads it by path: no own imports.

The offline tables are in the folder `data/` next to this file: each stack applies a copy in its state folder.
"""
# ruff: noqa: INP001 - Feast loads this file by its path; the folder is no package

from datetime import timedelta
from pathlib import Path

from feast import Entity, FeatureService, FeatureView, Field, FileSource, ValueType
from feast.types import Array, Bytes, Float64, Int64, String

_DATA = Path(__file__).resolve().parent / "data"
_FOR_EVER = timedelta(0)


def _table(name: str) -> FileSource:
    """Return the source of one offline table; its rows are valid from their event_timestamp on."""
    return FileSource(name=f"{name}_table", path=str(_DATA / f"{name}.parquet"), timestamp_field="event_timestamp")


user = Entity(name="user", join_keys=["user_id"], value_type=ValueType.STRING)
bundle = Entity(name="bundle", join_keys=["bundle_version"], value_type=ValueType.STRING)
log_partition = Entity(name="log_partition", join_keys=["partition_id"], value_type=ValueType.STRING)

user_history = FeatureView(
    name="user_history",
    entities=[user],
    ttl=_FOR_EVER,
    source=_table("user_history"),
    schema=[
        Field(name="user_id", dtype=String),
        Field(name="item_ids", dtype=Array(String), description="oldest to newest, in the order of arrival"),
        Field(name="newest_event_time_ms", dtype=Int64),
        Field(name="num_events", dtype=Int64, description="events of the history, over the user's whole life"),
        Field(name="row_time_us", dtype=Int64, description="equals event_timestamp; rises with each change of the row"),
        Field(name="recent_event_ids", dtype=Array(String), description="of rows that were written before the digests"),
        Field(name="topic_id", dtype=String, description="with partition and offset: the last event applied"),
        Field(name="partition", dtype=Int64),
        Field(name="offset", dtype=Int64),
        Field(name="disliked_item_ids", dtype=Array(String), description="kept out of answers; no part of the history"),
        Field(
            name="recent_event_digests", dtype=Bytes, description="8 bytes per event id, to recognise a client's retry"
        ),
    ],
)

user_shown = FeatureView(
    name="user_shown",
    entities=[user],
    ttl=_FOR_EVER,
    source=_table("user_shown"),
    schema=[
        Field(name="user_id", dtype=String),
        Field(name="shown_item_ids", dtype=Array(String), description="those shown last at the end, a bounded number"),
        Field(name="shown_counts", dtype=Array(Int64), description="since the user last acted on the item"),
        Field(name="shown_times_s", dtype=Array(Int64), description="when last, in Unix seconds"),
        Field(name="shown_topic_id", dtype=String, description="with partition and offset: the last impression"),
        Field(name="shown_partition", dtype=Int64),
        Field(name="shown_offset", dtype=Int64),
    ],
)

user_recommendations = FeatureView(
    name="user_recommendations",
    entities=[user, bundle],
    ttl=_FOR_EVER,
    source=_table("user_recommendations"),
    schema=[
        Field(name="user_id", dtype=String),
        Field(name="bundle_version", dtype=String),
        Field(name="recommended_item_ids", dtype=Array(String), description="best first"),
        Field(name="scores", dtype=Array(Float64)),
        Field(
            name="made_from_row_us", dtype=Int64, description="row_time_us of the history that the list was made from"
        ),
    ],
)

popularity = FeatureView(
    name="popularity",
    entities=[log_partition],
    ttl=_FOR_EVER,
    source=_table("popularity"),
    schema=[
        Field(name="partition_id", dtype=String),
        Field(name="as_of_ms", dtype=Int64),
        *(
            Field(name=f"{column}_{window}", dtype=dtype)
            for window in ("1h", "24h", "7d")
            for column, dtype in (("item_ids", Array(String)), ("counts", Array(Int64)))
        ),
    ],
)

recommend_v1 = FeatureService(
    name="recommend_v1",
    features=[
        user_history[["item_ids", "newest_event_time_ms", "num_events", "row_time_us", "disliked_item_ids"]],
        user_shown[["shown_item_ids", "shown_counts", "shown_times_s"]],
        user_recommendations,
    ],
)
