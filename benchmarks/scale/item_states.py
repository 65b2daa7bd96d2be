"""Memory, start and cost of a request with many item states.

    python -m benchmarks.scale item-states --json OUT [--items 1000000]

The parent starts a broker, writes the states of all items to a snapshot, and changes some items in the topic
afterwards. A separate process then starts as a gateway does: catalogue, snapshot, the topic's tail. Its cost above the
catalogue's counts.
"""

import gc
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
from kafka import KafkaAdminClient, KafkaProducer

from benchmarks.load.command import about_run, at_least_one, report_parser, write_report
from benchmarks.scale import servers
from benchmarks.scale.row import catalogue_of, print_fields
from models.catalogue import load_catalogue
from services.contracts.items import ItemState
from services.contracts.recommend import RecommendRequest, Tier
from services.gateway.ranking import ItemRanking, choose
from services.gateway.request.masks import masks_for
from services.items.follower import ItemFollower
from services.items.layout import ItemLayout
from services.items.live_items import LiveItems
from services.items.snapshot import Positions, write_snapshot
from services.settings.addresses import KafkaAddress
from services.settings.kafka_topics import Topic, create_missing

_TOPIC = Topic(name="items", num_partitions=4, keep_ms=None)
_NUM_TAIL = 10_000
_START_S = 60.0
_NUM_REQUESTS = 200
_HIDDEN_SHARE = 50


def main() -> None:
    """Measure, print a line, write the JSON."""
    parser = report_parser(__doc__ or "")
    parser.add_argument("--items", type=at_least_one, default=1_000_000, help="items with a state (1000000)")
    options = parser.parse_args()
    write_report(options.json, about_run("scale item-states") | _measure(options.items))


def _measure(num_items: int) -> dict[str, Any]:
    """Return the cost of this many items for a process."""
    with tempfile.TemporaryDirectory() as folder, servers.broker(settings := servers.settings_in(Path(folder))):
        broker = settings.kafka_bootstrap
        catalogue_of(1_000).save(Path(folder) / "catalogue.parquet")
        _state(num_items, broker, Path(folder) / "snapshot.parquet")
        command = [sys.executable, "-m", "benchmarks.scale.item_states", str(num_items), broker, folder]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    report: dict[str, Any] = {"num_items": num_items, "num_tail": _NUM_TAIL, **json.loads(done.stdout.splitlines()[-1])}
    print(f"{num_items} items: {report['memory_mb']} MB, start {report['start_s']} s")
    return report


def _state(num_items: int, broker: str, snapshot: Path) -> None:
    """Make the topic, write a snapshot with a state of every item, and change some in the topic."""
    items = LiveItems()
    items.apply((state.item_id, state) for state in map(_state_of, range(num_items)))
    admin = KafkaAdminClient(bootstrap_servers=broker)
    create_missing(admin, [_TOPIC])
    (topic,) = admin.describe_topics([_TOPIC.name])
    admin.close()
    write_snapshot(snapshot, items, Positions(str(topic["topic_id"]), {}))
    producer = KafkaProducer(bootstrap_servers=broker)
    for number in range(_NUM_TAIL):
        state = _state_of(number * (num_items // _NUM_TAIL or 1) % num_items)
        producer.send(_TOPIC.name, key=state.key, value=state.encode())
    producer.flush()
    producer.close()


def _state_of(number: int) -> ItemState:
    """Return a typical state: two texts, two numbers and a flag, two categories; every fiftieth item is hidden."""
    return ItemState(
        item_id=f"item-{number:07d}",
        categories=(f"category {number % 500}", f"shelf {number % 20}"),
        attributes={
            "brand": f"brand {number % 3_000}",
            "colours": (f"colour {number % 12}", f"colour {number % 7 + 12}"),
            "price": number % 1_000 / 10,
            "stock": float(number % 40),
            "sale": number % 9 == 0,
        },
        available=number % _HIDDEN_SHARE != 0,
        published_ms=1_700_000_000_000 + number,
        value=1.0,
    )


def start(num_items: int, broker: str, folder: Path) -> None:
    """Start as a gateway does and print the cost."""
    load_catalogue(folder / "catalogue.parquet")  # a gateway has one before; a small catalogue adds little memory
    catalogue = catalogue_of(num_items)
    catalogue.index_of  # noqa: B018 - fills the cached property
    plain = LiveItems().lay(catalogue)
    without_ms = _request_ms(plain)
    del plain
    gc.collect()
    before = psutil.Process().memory_info().rss
    started_s, worked_s = time.perf_counter(), time.process_time()
    items = LiveItems()
    layout = items.lay(catalogue)
    follower = ItemFollower(items, KafkaAddress(bootstrap=broker), _TOPIC.name, folder / "snapshot.parquet")
    follower.start(_START_S)
    start_s, start_cpu_s = time.perf_counter() - started_s, time.process_time() - worked_s
    gc.collect()
    memory_mb = (psutil.Process().memory_info().rss - before) / 2**20
    with_ms = _request_ms(layout)
    follower.stop()
    requests = {"request_with_ms": with_ms, "request_without_ms": without_ms}
    print_fields(memory_mb=memory_mb, start_s=start_s, start_cpu_s=start_cpu_s, **requests)


def _request_ms(layout: ItemLayout) -> float:
    """Return a request's median milliseconds for masks and the selection of ten items."""
    request = RecommendRequest(request_id="r", user_id="u", exclude_seen=True)
    history = [f"item-{number:07d}" for number in range(0, 500, 10)]
    order = np.arange(layout.num_known)[::-1]
    taken_s = []
    for _ in range(_NUM_REQUESTS):
        started_s = time.perf_counter()
        masks = masks_for(request, history, layout)
        best = order[:400][masks.showable[order[:400]]][:20]
        ranking = ItemRanking(Tier.STUDENT, best, np.zeros(len(best)))
        choose([ranking], masks.showable, 10, layout.columns.available)
        taken_s.append(time.perf_counter() - started_s)
    return 1_000 * median(taken_s)


if __name__ == "__main__":
    start(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
