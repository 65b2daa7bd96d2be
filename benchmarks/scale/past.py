"""What a worker finds at its start: a live bundle that lists items, and an offline log whose every effect the store holds."""

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from models.catalogue import Catalogue
from models.registry import BundleStore
from services.features.ownership import KEY
from services.settings.settings import Settings
from services.stream.log_files import FULL_SIZE, Span
from services.stream.offline_log import SCHEMA

_TOPIC_ID, _VERSION = "topic-before", "v1"
_HOUR_MS = 3_600_000


def publish_items(root: Path, item_ids: Sequence[str]) -> None:
    """Publish a bundle of a catalogue alone, and make it live."""
    catalogue = Catalogue(
        item_ids=tuple(item_ids),
        titles=tuple(item_ids),
        categories=((),) * len(item_ids),
        codes=np.arange(len(item_ids), dtype=np.int32)[:, None],
        level_sizes=(len(item_ids),),
        popularity=np.ones(len(item_ids)),
    )
    with tempfile.TemporaryDirectory() as folder:
        catalogue.save(Path(folder) / "catalogue.parquet")
        BundleStore(root).publish(Path(folder), _VERSION, {})
    BundleStore(root).promote(_VERSION)


def write_log(settings: Settings, client: Any, item_ids: Sequence[str], num_events: int) -> None:
    """Write merged files of a former topic, its newest event an hour old, and let the store hold their effect."""
    num_each = num_events // settings.topic_partitions
    if not num_each:
        return
    day = time.strftime("%Y-%m-%d", time.gmtime())
    items = pa.array(item_ids)
    for partition in range(settings.topic_partitions):
        folder = settings.offline_log_dir / "interactions" / f"partition={partition}" / _TOPIC_ID / day
        folder.mkdir(parents=True)
        for first in range(0, num_each, FULL_SIZE):
            offsets = np.arange(first, min(first + FULL_SIZE, num_each))
            numbers = offsets * settings.topic_partitions + partition
            pq.write_table(
                _events(items, numbers, offsets, partition),
                folder / Span(first, int(offsets[-1])).name,
                compression="zstd",
            )
        header = {"topic_id": _TOPIC_ID, "offset": num_each - 1, "saved": f"{_TOPIC_ID}/{num_each - 1}", "whole": 1}
        client.hset(KEY, mapping={f"{partition}:{name}": value for name, value in header.items()})


def _events(items: pa.Array, numbers: np.ndarray, offsets: np.ndarray, partition: int) -> pa.Table:
    """Return one file's events: event n is of item n, in turn, so that all items are touched."""
    size = len(numbers)
    times_ms = time.time_ns() // 1_000_000 - _HOUR_MS - np.arange(size)[::-1]
    columns = {
        "event_id": [f"past-{number}" for number in numbers],
        "user_id": [f"past-{number % 100_003}" for number in numbers],
        "item_id": items.take(pa.array(numbers % len(items))),
        "event_type": ["click"] * size,
        "event_time_ms": times_ms,
        "value": np.ones(size),
        "topic_id": [_TOPIC_ID] * size,
        "partition": np.full(size, partition, dtype=np.int32),
        "offset": offsets,
        "accepted_time_ms": times_ms,
    }
    return pa.table(columns, schema=SCHEMA)
