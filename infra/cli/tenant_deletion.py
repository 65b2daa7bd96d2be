"""The deletion of a tenant's data: erases its users, drops its catalogue, and looks in every store for the rest.

    state of the tenants file, keys ─▶ erasures of its users, in the interactions log ─▶ the worker, store by store
                                   ├─▶ deletions of its items, in the items topic
                                   ├─▶ explanations of its anonymous visitors
                                   └─▶ outputs of its trainings, in this state folder

Each run continues where the last ended, and reports. Open erasures are in a file of the state folder,
which is removed at the end. A gateway may accept events until it has reloaded the tenants file, and the worker may
be behind: an erasure in each partition, sent after the reload, shows that it has applied all of them, and covers the
anonymous visitors. For impressions its committed offsets show it.
"""

import asyncio
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.cli.erase import count_done, erase_users, read_accepted
from infra.kafka.sender import topic_sender

if TYPE_CHECKING:
    from services.settings.settings import Settings


_LOOK_S = 0.2
_RELOADED_S = 3.0
"""After this time every gateway has reloaded a changed tenants file."""
_IMPRESSIONS_S = 15.0
"""The worker commits what it has applied every second."""


@dataclass(frozen=True, slots=True)
class Found:
    """A tenant's remains in a scan: user ids, and entries by store."""

    users: set[str] = field(default_factory=set)
    entries: dict[str, int] = field(default_factory=dict)


def pending_file(settings: "Settings", tenant: str) -> Path:
    """Return the file of a tenant's erasures that are not done yet."""
    return settings.state_dir / f"deleted-{tenant}.csv"


def delete_data(settings: "Settings", tenant: str) -> list[str] | None:
    """Erase what is found of a tenant. Return what remains elsewhere; None while its ids are in a store.

    Raises DependencyUnavailable, EnvironmentFault or OSError.
    """
    _await_reload(settings)
    path, scanned = pending_file(settings, tenant), scan(settings, tenant)
    accepted = read_accepted(path)
    ends = _user_of_each_partition(tenant, settings.topic_partitions)
    if _num_open(settings, accepted):
        known = {*accepted}
    else:  # users and visitors that are found now came back
        known = set() if scanned.entries["visitors"] else accepted.keys() & ends
    if new := sorted((scanned.users | ends) - known):
        accepted |= erase_users(settings, new, path, of_visitors=ends)
    _drop_items(settings, tenant, is_counted=bool(scanned.entries["popularity"]))
    _drop_explanations(settings, tenant)
    if (
        not _drop_outputs(settings, tenant)
        or _num_open(settings, accepted)
        or not _are_impressions_applied(settings)
        or any(scan(settings, tenant).entries.values())
    ):
        return None
    files = [] if _rewrite_file(settings) else ["Redis' own files until it writes them again"]
    path.unlink(missing_ok=True)
    return [
        "records in the broker's topics until their retention ends",
        *files,
        "bundles",
        f"outputs of trainings in state folders other than {settings.state_dir}",
        "lines of the audit, which name items",
        "your own backups",
    ]


def _await_reload(settings: "Settings") -> None:
    if settings.tenants_file is not None:
        changed_s = settings.tenants_file.stat().st_mtime
        time.sleep(min(max(0.0, changed_s + _RELOADED_S - time.time()), _RELOADED_S))


def _user_of_each_partition(tenant: str, num_partitions: int) -> set[str]:
    """Return an unused user id of the tenant for each partition of the log."""
    from services.contracts.tenant import scoped
    from services.features.ownership import partition_of

    by_partition: dict[int, str] = {}
    for number in count():
        user_id = scoped(tenant, f"end of log {number}")
        by_partition.setdefault(partition_of(user_id, num_partitions), user_id)
        if len(by_partition) == num_partitions:
            break
    return {*by_partition.values()}


def _num_open(settings: "Settings", accepted: Mapping[str, str]) -> int:
    """Return the number of erasures that are not done; Redis' file is rewritten once, at the end of the deletion."""
    from services.contracts.erasure import ErasureStore

    _, num_done = asyncio.run(count_done(settings, list(accepted.values()), frozenset({ErasureStore.STORE_FILES})))
    return len(accepted) - num_done


def _are_impressions_applied(settings: "Settings") -> bool:
    """Wait until the worker has applied the impressions that the topic has now; return whether it did in time.

    Raises DependencyUnavailable.
    """
    from kafka import TopicPartition

    from services.settings.broker_log import BrokerLog
    from services.settings.kafka_clients import broker_as_dependency, open_reader
    from services.settings.kafka_topics import create_missing, wanted_topic
    from services.stream.impressions.worker import IMPRESSIONS_GROUP

    name, until_s = settings.impressions_topic, time.monotonic() + _IMPRESSIONS_S
    with ExitStack() as clients, broker_as_dependency():
        admin, consumer = open_reader(settings.kafka_address, clients, fetch_max_wait_ms=50, max_poll_records=1)
        create_missing(admin, [wanted_topic(settings, name)])
        log = BrokerLog(consumer, name)
        for place in [TopicPartition(name, number) for number in range(settings.topic_partitions)]:
            end = log.end(place.partition)
            while log.begin(place.partition) < end > _committed(admin, IMPRESSIONS_GROUP, place):
                if time.monotonic() > until_s:
                    return False
                time.sleep(_LOOK_S)
    return True


def _committed(admin: Any, group: str, place: Any) -> int:
    """Return the offset that a group has committed for a partition; negative without one. Raises KafkaError."""
    return int(admin.list_group_offsets({group: [place]})[group][place].offset)


def scan(settings: "Settings", tenant: str) -> Found:
    """Look for a tenant's ids in Redis, the offline logs, the live catalogue and the popularity of items.

    The ledger of erasures has the ids of users whose erasure is not done; these are not data to erase again.

    Raises DependencyUnavailable, EnvironmentFault or OSError.
    """
    scanned = Found()
    in_logs = list(users_in_logs(settings.offline_log_dir, tenant))
    for store, user_ids in (("redis", _in_redis(settings, tenant)), ("offline logs", in_logs)):
        scanned.entries[store] = 0
        for user_id in user_ids:
            scanned.entries[store] += 1
            scanned.users.update({user_id} - {""})
    scanned.entries["visitors"] = in_logs.count("")
    scanned.entries["open erasures"] = _num_open_in_ledger(settings, tenant)
    scanned.entries["popularity"] = _num_popular_rows(settings, tenant)
    scanned.entries["items"] = len(_stated(settings, tenant))
    return scanned


def _in_redis(settings: "Settings", tenant: str) -> Iterator[str]:
    """Yield the user of each key and explanation of the tenant; empty for an anonymous visitor."""
    from services.contracts.explanation import whose
    from services.contracts.tenant import prefix_of
    from services.features.explanations import each_explanation
    from services.features.layout import entities_of
    from services.features.redis_calls import redis_as_dependency
    from services.features.repo import RepoAddress, project_of
    from services.features.schema import USER_ID
    from services.settings.redis_clients import open_redis

    prefix = prefix_of(tenant)
    project = project_of(RepoAddress(settings.feature_repo_dir, settings.redis_address))
    client = open_redis(settings.redis_address, 5.0)
    with redis_as_dependency():
        for key in client.scan_iter(match=b"*" + prefix.encode() + b"*", count=1_000):
            user_id = entities_of(key, project)[USER_ID.name]
            if user_id.startswith(prefix):  # another tenant's id may end with this id
                yield user_id
        for _, _, record in each_explanation(client):
            if _mark_of(prefix) in record:
                yield whose(record)[0] or ""
    client.close()


def _num_popular_rows(settings: "Settings", tenant: str) -> int:
    """Return how many partitions' rows of popular items have the tenant's items."""
    from services.contracts.tenant import prefix_of
    from services.features.layout import RowLayout
    from services.features.redis_calls import redis_as_dependency
    from services.features.repo import RepoAddress, project_of
    from services.features.schema import POPULARITY
    from services.settings.redis_clients import open_redis

    layout = RowLayout(POPULARITY, project_of(RepoAddress(settings.feature_repo_dir, settings.redis_address)))
    prefix, client = prefix_of(tenant), open_redis(settings.redis_address, 5.0)
    partitions = [str(partition) for partition in range(settings.topic_partitions)]
    with redis_as_dependency():
        cells = [client.hmget(layout.key(partition), layout.fields) for partition in partitions]
    client.close()
    rows = layout.rows(partitions, cells).values()
    item_ids = [{item_id for window in row.windows.values() for item_id in window.item_ids} for row in rows]
    return sum(any(item_id.startswith(prefix) for item_id in of_row) for of_row in item_ids)


def users_in_logs(offline_log_dir: Path, tenant: str) -> Iterator[str]:
    """Yield the user of each logged event and impression of the tenant, once per file; empty for anonymous visitors.

    Raises EnvironmentFault for a file that cannot be read.
    """
    import polars as pl

    from models.files import each_file
    from services.contracts.tenant import prefix_of, scoped_name
    from services.errors import EnvironmentFault
    from services.stream.log.ledger import ErasureLedger

    user, prefix = pl.col("user_id"), prefix_of(tenant)
    is_visitor = user.is_null() & pl.col("name").str.starts_with(scoped_name(tenant, ""))
    for path in each_file(offline_log_dir):
        if path.suffix != ".parquet" or ErasureLedger.owns(path):
            continue
        try:
            if "user_id" not in (columns := pl.read_parquet_schema(path)):
                continue
            rows = pl.read_parquet(path, columns=[*filter(columns.__contains__, ("user_id", "name"))])
        except FileNotFoundError:  # the worker has merged or removed it, and the second listing has the merged file
            continue
        except pl.exceptions.PolarsError as error:
            raise EnvironmentFault(f"{path}: unreadable, so its users are unknown; repair or remove it") from error
        is_own = user.str.starts_with(prefix)
        own = rows.filter(is_own | is_visitor if "name" in columns else is_own)
        yield from own["user_id"].fill_null("").unique().to_list()


def _num_open_in_ledger(settings: "Settings", tenant: str) -> int:
    from services.contracts.tenant import prefix_of
    from services.stream.log.ledger import ErasureLedger

    ledger, prefix = ErasureLedger(settings.offline_log_dir), prefix_of(tenant)
    every = (tombstone for partition in ledger.partitions for tombstone in ledger.tombstones(partition))
    return sum((tombstone.user_id or "").startswith(prefix) for tombstone in every)


def _stated(settings: "Settings", tenant: str) -> list[str]:
    """Return the tenant's items in the live catalogue. Raises DependencyUnavailable."""
    from pipelines.publication.new_items import read_live_items

    own = read_live_items(settings).tenants.get(tenant)
    return [] if own is None else own.read(lambda layout: [item_id for _, item_id in layout.stated()])


def _drop_items(settings: "Settings", tenant: str, *, is_counted: bool) -> None:
    """Delete each item of the tenant in the topic, then the whole catalogue in every process that follows it.

    Its popularity ends with the catalogue, so that a tenant with counts but without items of its own is dropped too.
    """
    from services.contracts.tenant import prefix_of, scoped

    item_ids = _stated(settings, tenant)
    if item_ids or is_counted:
        keys = [scoped(tenant, item_id) for item_id in item_ids] + [prefix_of(tenant)]
        with topic_sender(settings, settings.items_topic) as send:
            send([(key.encode(), None) for key in keys])


def _rewrite_file(settings: "Settings") -> bool:
    """Have Redis rewrite its append-only file, which holds the tenant's earlier rows; return whether it did."""
    from services.features.erasing import ErasingWriter, FileRewrite
    from services.features.repo import RepoAddress

    writer = ErasingWriter(RepoAddress(settings.feature_repo_dir, settings.redis_address))
    while (state := writer.begin_rewrite()) is FileRewrite.BUSY:
        time.sleep(_LOOK_S)
    while state is FileRewrite.RUNNING:
        time.sleep(_LOOK_S)
        state = writer.rewrite_state()
    return state is FileRewrite.DONE


def _drop_explanations(settings: "Settings", tenant: str) -> None:
    """Remove the tenant's explanations; its users' erasures remove their explanations too."""
    from services.contracts.tenant import prefix_of
    from services.features.explanations import remove_explanations
    from services.settings.redis_clients import open_redis

    client, mark = open_redis(settings.redis_address, 5.0), _mark_of(prefix_of(tenant))
    remove_explanations(client, lambda record: mark in record)
    client.close()


def _drop_outputs(settings: "Settings", tenant: str) -> bool:
    """Remove the outputs of the tenant's trainings, and all scratch; return False while a run uses its folder."""
    from pipelines.runner.run_lock import run_lock_if_free
    from pipelines.runner.stage import remove_outputs_of
    from services.stream.erasure.tables import remove_scratch

    if not settings.stages_dir.exists():
        return True
    with run_lock_if_free(settings.stages_dir) as is_free:
        if is_free:
            remove_outputs_of(settings.stages_dir, tenant)
    return is_free and remove_scratch(settings.stages_dir)


def _mark_of(prefix: str) -> bytes:
    """Return the form of a tenant's prefix in a stored explanation, which is JSON."""
    return json.dumps(prefix)[:-1].encode()
