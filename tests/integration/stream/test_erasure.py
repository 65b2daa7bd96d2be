"""Erasure with a real broker, Valkey and worker: removed data, data that must not return, and crashes."""

import asyncio
import csv
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pyarrow.parquet as pq
import pytest
from redis import Redis

from benchmarks.many.scan import traces_of
from infra.cli.erase import BATCH_USERS
from infra.cli.tenant_deletion import delete_data, scan
from infra.kafka.sender import topic_sender
from models.registry.store import BundleStore
from pipelines.features.tables import build_tables, serve
from pipelines.runner.run_lock import run_lock_if_free
from pipelines.runner.stage import StageCache, silent
from services.contracts.erasure import Erasure, ErasureProgress
from services.contracts.events import Interaction
from services.contracts.explanation import OWN_FIELDS, encode_explanation
from services.contracts.tenant import scoped
from services.errors import DependencyUnavailable
from services.features.erasing import RedisReceipts
from services.features.explanations import RedisExplanations
from services.features.schema import USER_HISTORY, LogPosition, PrecomputedRow
from services.features.shown import ShownWriter
from services.features.user_data import UserStore
from services.features.writer import FeatureWriter
from services.settings.settings import inherited_environment
from services.stream.decode import LoggedErasure
from services.stream.export import UserExport
from services.stream.log.kinds import IMPRESSIONS
from services.stream.log.ledger import ErasureLedger
from services.stream.log.offline_log import OfflineLog
from tests.integration.stream.test_impressions import impression, show
from tests.support.servers import HOST
from tests.support.stream.stream_rig import Rig, click, erasure
from tests.support.stream.topics import read_topic
from tests.support.training.bundles import publish_bundle
from tests.support.training.synthetic import ratings, write_arrivals
from tests.support.wait import wait_for

SECRET = "user-müller/7"
OTHER = "other"


def recent(number: int, user_id: str) -> Interaction:
    """Build an event of this moment."""
    return click(number, user_id, event_time_ms=time.time_ns() // 1_000_000)


def receipt_of(rig: Rig, erasure_id: str) -> ErasureProgress | None:
    """Read a receipt as a gateway does."""

    async def read() -> ErasureProgress | None:
        """Read the receipt in a new event loop."""
        receipts = RedisReceipts(rig.settings.redis_address)
        try:
            return await receipts.get(erasure_id, 5.0)
        finally:
            await receipts.close()

    return asyncio.run(read())


def is_done(rig: Rig, erasure_id: str) -> bool:
    """Return whether an erasure is done everywhere."""
    receipt = receipt_of(rig, erasure_id)
    return receipt is not None and receipt.is_done


def until_done(rig: Rig, *erasure_ids: str) -> None:
    for erasure_id in erasure_ids:
        wait_for(
            lambda erasure_id=erasure_id: is_done(rig, erasure_id), 90.0, f"the receipt: {receipt_of(rig, erasure_id)}"
        )


def test_what_came_before_leaves_and_what_comes_after_begins_a_new_history(rig: Rig) -> None:
    """An erasure removes a user's row and log, keeps other users', and events since begin a new, logged history.

    Events from before that arrive after it are dropped.
    """
    rig.start_worker()
    rig.send(*(click(number, SECRET) for number in range(1, 6)), click(6, OTHER))
    wait_for(lambda: len(rig.logged()) == 6, what="the log")
    rig.send(click(7, SECRET), erasure(SECRET), click(10, SECRET), recent(8, SECRET), click(9, OTHER))

    wait_for(lambda: rig.rows(SECRET) and rig.rows(SECRET)[SECRET].item_ids == ("i8",), what="the new history")
    until_done(rig, "x")
    rig.send(click(11, SECRET), click(12, OTHER))
    wait_for(lambda: rig.rows(OTHER)[OTHER].item_ids[-1] == "i12", what="the other user's row")
    wait_for(lambda: "e12" in {event_id for event_id, _, _ in rig.logged()}, what="the log")
    rig.stop_worker()

    assert rig.rows(SECRET)[SECRET].item_ids == ("i8",)
    assert rig.rows(OTHER)[OTHER].item_ids == ("i6", "i9", "i12")
    assert sorted(event_id for event_id, _, _ in rig.logged()) == ["e12", "e6", "e8", "e9"]
    assert rig.metric("tailrace_stream_skipped_total", reason="before_erasure") >= 2


def test_a_deleted_tenant_is_in_no_file_and_no_key(rig: Rig) -> None:
    """The deletion erases every user of the tenant, and no other user; a scan of all stores finds no id of it."""
    settings = rig.settings = rig.settings.model_copy(update={"names": "default,acme.default"})
    settings.stages_dir.mkdir(parents=True, exist_ok=True)
    publish_bundle(settings.bundle_root, "v1")
    BundleStore(settings.bundle_root, "acme.default").promote("v1")
    rig.start_worker()
    now_ms = time.time_ns() // 1_000_000
    own = (click(number, scoped("acme", f"u{number % 3}"), event_time_ms=now_ms) for number in range(1, 9))
    rig.send(*own, click(9, OTHER))
    visitor = impression(1, None, (f"{SECRET}-item",))
    show(rig, *(msgspec.structs.replace(visitor, name=name) for name in ("acme.default", "eu-acme.default")))
    wait_for(lambda: len(rig.logged()) == 9, what="the log")
    wait_for(lambda: scan(settings, "acme").entries["visitors"], what="the visitor's impression")
    wait_for(lambda: scan(settings, "acme").entries["popularity"], 60.0, "the popular items")
    with topic_sender(settings, settings.items_topic) as send:
        send([(scoped("acme", "i1").encode(), b'{"available": false}'), (b"i1", b'{"available": false}')])
    before = scan(settings, "acme")

    wait_for(lambda: delete_data(settings, "acme"), 120.0, "the deletion")
    rig.stop_worker()

    assert before.users == {scoped("acme", f"u{number}") for number in range(3)}
    assert before.entries["items"] == 1
    assert traces_of(rig.settings, "acme\x1f") == []
    assert traces_of(rig.settings, OTHER)
    (left,) = OfflineLog(settings.offline_log_dir, kind=IMPRESSIONS).read(0)
    assert left.impression.name == "eu-acme.default"


def test_a_tenant_whose_id_ends_with_anothers_is_not_the_other(rig: Rig) -> None:
    """The search for the users and items of tenant acme skips tenant eu-acme."""
    settings = rig.settings = rig.settings.model_copy(update={"names": "default,eu-acme.default"})
    publish_bundle(settings.bundle_root, "v1")
    BundleStore(settings.bundle_root, "eu-acme.default").promote("v1")
    rig.start_worker()
    rig.send(click(1, scoped("eu-acme", "u1"), event_time_ms=time.time_ns() // 1_000_000))
    wait_for(lambda: scan(settings, "eu-acme").entries["popularity"], 60.0, "the popular items")
    found, other = scan(settings, "eu-acme"), scan(settings, "acme")
    rig.stop_worker()

    assert found.users == {scoped("eu-acme", "u1")}
    assert found.entries["redis"]
    assert (other.users, [*other.entries.values()]) == (set(), [0] * len(other.entries))


def test_a_tenant_is_not_deleted_while_a_training_runs(rig: Rig) -> None:
    """A training that publishes meanwhile ends first; then its outputs are removed."""
    settings = rig.settings
    rig.start_worker()
    with run_lock_if_free(settings.stages_dir):
        output = StageCache(settings.stages_dir, "acme").run("train", "k1", lambda out: (out / "weights").touch())
        while_training = [delete_data(settings, "acme") for _ in range(2)]
    wait_for(lambda: delete_data(settings, "acme"), 120.0, "the deletion")
    rig.stop_worker()

    assert while_training == [None, None]
    assert not output.path.exists()


def test_a_tenant_is_not_deleted_while_its_events_are_not_applied(rig: Rig) -> None:
    """Events that a worker has not read yet are found before the deletion is done, and a returning user is erased."""
    settings = rig.settings
    output = StageCache(settings.stages_dir, "acme").run("ingest", "k1", lambda out: (out / "events").touch())
    rig.send(*(click(number, scoped("acme", f"u{number}")) for number in range(4)))

    while_waiting = delete_data(settings, "acme")
    rig.start_worker()
    wait_for(lambda: scan(settings, "acme").entries["offline logs"], what="the applied events")
    wait_for(lambda: not scan(settings, "acme").users or delete_data(settings, "acme"), 120.0, "the erasures")
    rig.send(recent(9, scoped("acme", "u1")))
    wait_for(lambda: scan(settings, "acme").users, what="the returning user")
    wait_for(lambda: delete_data(settings, "acme"), 120.0, "the deletion")
    rig.stop_worker()

    assert not output.path.exists()
    assert not while_waiting
    assert traces_of(settings, "acme\x1f") == []


def test_a_tenant_is_not_deleted_while_its_impressions_are_not_applied(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user known only by an impression that the worker has not read yet is found before the deletion is done."""
    monkeypatch.setattr("services.features.ownership.LEASE_MS", 600_000)
    monkeypatch.setattr("infra.cli.tenant_deletion._IMPRESSIONS_S", 1.0)
    settings, owner = rig.settings, ShownWriter(rig.features)
    for partition in range(settings.topic_partitions):
        owner.partitions.claim(partition)  # so that the worker does not apply impressions
    show(rig, impression(1, scoped("acme", "seen")))
    rig.start_worker()
    wait_for(lambda: delete_data(settings, "acme") or not scan(settings, "acme").entries["open erasures"], 60.0)
    while_waiting = delete_data(settings, "acme")
    owner.close()
    wait_for(lambda: delete_data(settings, "acme"), 120.0, "the deletion")
    rig.stop_worker()

    assert while_waiting is None
    assert traces_of(settings, "acme\x1f") == []


def test_a_tenant_whose_items_cannot_be_read_is_not_deleted(rig: Rig) -> None:
    """Without the broker, the tenant's items are unknown, not absent."""
    assert not any(scan(rig.settings, "acme").entries.values())
    rig.broker.kill()

    with pytest.raises(DependencyUnavailable):
        scan(rig.settings, "acme")


def test_an_open_erasure_is_waited_for_and_not_sent_again(rig: Rig) -> None:
    """The ledger names a user until the last store is done; each further erasure would keep the deletion open."""
    user_id = scoped("acme", "u1")
    asked = Erasure(erasure_id="x", user_id=user_id, accepted_time_ms=1)
    logged = LoggedErasure(asked, LogPosition(topic_id="t", partition=0, offset=0))
    ledger = ErasureLedger(rig.settings.offline_log_dir)
    ledger.append([logged], ["t"])
    opened = scan(rig.settings, "acme")
    ledger.close(0, ["x"], 2)

    assert (opened.users, opened.entries["open erasures"]) == (set(), 1)
    assert not any(scan(rig.settings, "acme").entries.values())


def test_an_erased_user_is_in_no_file_and_no_key(rig: Rig) -> None:
    """After a completed receipt, Redis and all files contain no form of the ID."""
    rig.start_worker()
    rig.send(*(click(number, SECRET) for number in range(1, 30)), click(30, OTHER))
    wait_for(lambda: len(rig.logged()) == 30, what="the log")
    assert traces_of(rig.settings, SECRET)

    rig.send(erasure(SECRET))
    until_done(rig, "x")
    rig.stop_worker()

    assert traces_of(rig.settings, SECRET) == []
    assert traces_of(rig.settings, OTHER)


def explain(rig: Rig, user_id: str) -> None:
    """Store the explanation of a request of this user, as a gateway does."""

    async def put() -> None:
        """Store the explanation in a new event loop."""
        store = RedisExplanations(rig.settings.redis_address, 900, 2**20)
        values = {"request_id": f"r-{user_id}", "user_id": user_id, "at_unix_ms": time.time_ns() // 1_000_000}
        own = [values.get(name) for name in OWN_FIELDS]
        await store.put([(f"r-{user_id}", encode_explanation(own, (), None, ()))], 5.0)
        await store.close()

    asyncio.run(put())


def serve_past(rig: Rig, folder: Path, *user_ids: str) -> None:
    """Serve base tables with five events of each of these users, from an output of the pipeline's stages."""
    output = rig.settings.stages_dir / "features" / "0123456789abcdef"
    output.mkdir(parents=True)
    write_arrivals(ratings(*((user_id, f"old{index}") for user_id in user_ids for index in range(5))), folder)
    build_tables(folder, 30, output, silent)
    serve(output, rig.features, rig.settings.offline_log_dir, silent)


def export_of(rig: Rig, user_id: str) -> dict[str, object]:
    """Read a user's data as a gateway exports it."""
    store = UserStore(rig.features)
    return UserExport(store, rig.settings.offline_log_dir, 4, lambda: ("v1",))(user_id)


def test_a_user_leaves_base_tables_lists_explanations_and_stage_outputs(
    rig: Rig, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """All stores of a user's data are in the export before and empty after, including Redis' file; others stay."""
    serve_past(rig, tmp_path_factory.mktemp("given"), SECRET, OTHER)
    publish_bundle(rig.settings.bundle_root, "v1")
    lists = [
        PrecomputedRow(user_id=user, item_ids=("a",), scores=(1.0,), bundle_version=version, made_from_row_us=1)
        for user in (SECRET, OTHER)
        for version in ("v1", "never published")
    ]
    FeatureWriter(rig.features).write_precomputed(lists, 1_000_000)
    for user_id in (SECRET, OTHER):
        explain(rig, user_id)
    rig.start_worker()
    rig.send(click(1, SECRET), click(2, OTHER))
    wait_for(lambda: len(rig.logged()) == 2, what="the log")
    before = export_of(rig, SECRET)

    rig.send(erasure(SECRET))
    until_done(rig, "x")
    rig.stop_worker()
    after, others = export_of(rig, SECRET), export_of(rig, OTHER)

    assert all(before[kind] for kind in ("history", "lists", "explanations", "events"))
    assert not any(after[kind] for kind in ("history", "lists", "explanations", "events", "shown", "impressions"))
    assert all(others[kind] for kind in ("history", "lists", "explanations", "events"))
    assert traces_of(rig.settings, SECRET) == []
    base = pq.read_table(rig.settings.offline_log_dir / "base_histories.parquet")
    assert base["user_id"].to_pylist() == [OTHER]
    assert rig.features.table_path(USER_HISTORY.name).exists()
    assert not list(rig.settings.stages_dir.glob("*/*/"))


def test_neither_a_lost_nor_a_restored_store_nor_the_pipeline_brings_a_user_back(rig: Rig, tmp_path: Path) -> None:
    """A restored backup, an emptied store and old pipeline tables do not bring an erased user back, but do others."""
    serve_past(rig, tmp_path, SECRET, OTHER)
    kept = rig.settings.stages_dir.rename(tmp_path / "kept")
    rig.start_worker()
    rig.send(click(1, SECRET), click(2, OTHER))
    wait_for(lambda: len(rig.logged()) == 2, what="the log")
    rig.stop_worker()
    with Redis(host=HOST, port=rig.features.redis.port) as client:
        backup = {key: client.dump(key) for key in client.scan_iter()}
        rig.start_worker()
        rig.send(erasure(SECRET), recent(3, SECRET), click(4, OTHER))
        until_done(rig, "x")
        rig.stop_worker()
        client.flushall()
        for key, value in backup.items():
            client.restore(key, 0, value)
        assert len(rig.rows(SECRET)[SECRET].item_ids) == 6
        for what in ("restored", "emptied"):
            rig.start_worker()
            wait_for(
                lambda: OTHER in rig.rows(OTHER) and rig.rows(OTHER)[OTHER].num_events == 7, what=f"{what}, others"
            )
            wait_for(lambda: SECRET in rig.rows(SECRET) and rig.rows(SECRET)[SECRET].item_ids == ("i3",), what=what)
            rig.stop_worker()
            client.flushall()

    serve(next(kept.glob("features/*")), rig.features, rig.settings.offline_log_dir, silent)
    assert set(rig.rows(SECRET, OTHER)) == {OTHER}
    rig.start_worker()
    wait_for(lambda: is_done(rig, "x"), what="the receipt, written again")
    wait_for(
        lambda: SECRET in rig.rows(SECRET) and rig.rows(SECRET)[SECRET].item_ids == ("i3",), what="the new history"
    )


@pytest.mark.parametrize("num_lives", [2, pytest.param(6, marks=pytest.mark.grid)])
def test_erasures_survive_a_worker_that_is_killed_at_any_moment(num_lives: int, rig: Rig) -> None:
    """With many users' erasures and killed workers, row and log hold exactly the events after each last erasure."""
    draw, sent = random.Random(5), list[Interaction | Erasure]()
    heartbeat = rig.settings.state_dir / "run" / "worker-0.beat"
    environment = {**inherited_environment(), **rig.settings.as_environment()}
    for life in range(num_lives):
        heartbeat.unlink(missing_ok=True)
        worker = subprocess.Popen([sys.executable, "-m", "services.stream"], env=environment)
        for _ in range(8):
            batch: list[Interaction | Erasure] = []
            for _ in range(12):
                user_id, number = f"user-{draw.randrange(15)}", len(sent) + len(batch)
                is_erasure = draw.random() < 0.15
                batch.append(erasure(user_id, f"x{number}") if is_erasure else recent(number, user_id))
            rig.send(*batch)
            sent += batch
            time.sleep(draw.random() / 2)
        if life != 1:  # the worker is killed whether or not it has started
            wait_for(heartbeat.exists, 60.0, "the worker")
        time.sleep(draw.uniform(1, 6))
        os.kill(worker.pid, signal.SIGKILL)
        worker.wait()
    rig.start_worker()
    erasures = [message for message in sent if isinstance(message, Erasure)]
    wait_for(lambda: all(is_done(rig, erasure.erasure_id) for erasure in erasures[-3:]), 120.0, "the last receipts")
    until_done(rig, *(erasure.erasure_id for erasure in erasures))
    rig.stop_worker()

    expected: dict[str, list[str]] = {message.user_id: [] for message in sent}
    for message in sent:
        if isinstance(message, Erasure):
            expected[message.user_id].clear()
        else:
            expected[message.user_id].append(message.item_id)
    rows = rig.rows(*expected)
    assert {user: list(rows[user].item_ids) if user in rows else [] for user in expected} == {
        user: items[-30:] for user, items in expected.items()
    }
    assert sorted(event_id for event_id, _, _ in rig.logged()) == sorted(
        "e" + item[1:] for items in expected.values() for item in items
    )
    ledger = ErasureLedger(rig.settings.offline_log_dir)
    tombstones = [tombstone for partition in ledger.partitions for tombstone in ledger.tombstones(partition)]
    assert sorted(tombstone.erasure_id for tombstone in tombstones) == sorted(
        erasure.erasure_id for erasure in erasures
    )
    assert all(tombstone.user_id is None for tombstone in tombstones)


NUM_BY_FILE = BATCH_USERS + 1_200
"""More users than the command sends at once."""


def run_erase(rig: Rig, users: Path, out: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "infra.cli.main", "erase", "--users", str(users), "--out", str(out)],
        env={**inherited_environment(), **rig.settings.as_environment()},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_many_users_are_erased_by_a_file_across_a_kill(rig: Rig, tmp_path: Path) -> None:
    """After a kill behind the first batch the command resumes; finally all are erased, and a last run sends nothing."""
    user_ids = [f"user, {number}" for number in range(NUM_BY_FILE)]
    users, out = tmp_path / "users.txt", tmp_path / "erased.csv"
    users.write_text("\n".join(f'"{user_id}"' for user_id in [*user_ids, user_ids[0]]))
    rig.send(*(click(number, user_id) for number, user_id in enumerate(user_ids[-50:])), click(99, OTHER))
    rig.start_worker()
    wait_for(lambda: rig.rows(OTHER), what="the worker")
    command = [sys.executable, "-m", "infra.cli.main", "erase", "--users", str(users), "--out", str(out)]
    killed = subprocess.Popen(command, env={**inherited_environment(), **rig.settings.as_environment()})
    try:
        wait_for(lambda: out.exists() and out.read_text().count("\n") > 1_000, what="the first batch")
    finally:
        killed.kill()
        killed.wait()
    num_before = out.read_text().count("\n") - 1
    with out.open("a") as file:
        file.write('"user, 4')  # a partial line, as a kill may leave it
    resumed = run_erase(rig, users, out)
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    done = wait_for(
        lambda: last if f"{NUM_BY_FILE} from all stores" in (last := run_erase(rig, users, out)).stdout else None, 180.0
    )

    assert resumed.returncode == 0, resumed.stderr
    assert f"{NUM_BY_FILE} users accepted ({num_before} before this run)" in resumed.stdout
    assert sorted(row["user_id"] for row in rows) == sorted(user_ids)
    assert (
        f"{NUM_BY_FILE} users accepted ({NUM_BY_FILE} before this run)\n{NUM_BY_FILE} are erased from the stores"
        in done.stdout
    )
    assert rig.rows(*user_ids[-50:], OTHER).keys() == {OTHER}
    sent = [record for _, record in read_topic(rig.broker, "interactions") if b"erasure_id" in (record.value or b"")]
    assert NUM_BY_FILE <= len(sent) <= NUM_BY_FILE + BATCH_USERS


def test_a_file_of_users_with_what_is_no_id_erases_nobody(rig: Rig, tmp_path: Path) -> None:
    """An invalid line is named; another file at the output's path is refused and kept."""
    users, out = tmp_path / "users.txt", tmp_path / "erased.csv"
    users.write_text(f"good\n{'x' * 300}\n")
    long = run_erase(rig, users, out)
    users.write_text("good\n")
    out.write_text("user_id,item_id,event_time\n")
    foreign = run_erase(rig, users, out)

    assert (long.returncode, foreign.returncode) == (1, 1)
    assert "--users: 'xxxxxxxx" in long.stderr
    assert "no user was erased" in long.stderr
    assert "is not a file of erasures" in foreign.stderr
    assert out.read_text() == "user_id,item_id,event_time\n"
