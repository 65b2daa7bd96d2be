"""Items and events from files, databases and an object store reach a real broker exactly once, through the command."""

import json
import sqlite3
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from adbc_driver_postgresql import dbapi
from kafka import KafkaConsumer, TopicPartition

from infra.kafka.sender import topic_sender
from models.files import each_file
from models.registry.store import BundleStore
from pipelines.imports.importing import BATCH_ROWS
from pipelines.imports.sources import local_file
from pipelines.runner.run_lock import run_lock_if_free
from pipelines.tables.files import Table
from services.errors import ConfigError, DataError, EnvironmentFault
from services.settings.settings import Settings, inherited_environment
from services.stream.erasure.tables import remove_outputs
from tests.support.servers import Server, object_environment
from tests.support.wait import wait_for

ROWS = [
    {"item_id": f"sku-{number:03}", "title": f"Item {number}", "price": number + 0.5, "new": number % 2 == 0}
    for number in range(120)
]
QUERY = "SELECT item_id, title, price, new FROM products ORDER BY item_id"


def rows_of(source: str, query: str | None, downloads: Path) -> list[dict[str, Any]]:
    """Return the rows of a source."""
    table = Table(local_file(source, query, downloads), None, bool)
    return [row for batch in table.batches() for row in batch.frame.to_dicts()]


class Shop:
    """A state folder, and the import into a broker's topics."""

    def __init__(self, state_dir: Path, broker: Server) -> None:
        self.broker = broker
        self.settings = Settings(state_dir=state_dir, kafka_bootstrap=broker.address)

    def run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return self.command("import", *arguments)

    def command(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "infra.cli.main", *arguments],
            env={**inherited_environment(), **self.settings.as_environment()},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    def kill_at_the_first_batch(self, kind: str, *options: str) -> None:
        """Run an import, and SIGKILL it when it has recorded progress."""
        command = [sys.executable, "-m", "infra.cli.main", "import", kind, *options]
        killed = subprocess.Popen(command, env={**inherited_environment(), **self.settings.as_environment()})
        try:
            wait_for(lambda: any(self.settings.imports_dir.glob(f"{kind}-*.json")), what="the first batch")
        finally:
            killed.kill()
            killed.wait()

    def records(self, topic: str) -> list[tuple[str, dict[str, Any]]]:
        """Return key and value of all records of a topic.

        Reads until a second is quiet, since this broker's end offsets lag behind its records.
        """
        consumer = KafkaConsumer(bootstrap_servers=self.broker.address)
        try:
            places = [TopicPartition(topic, number) for number in consumer.partitions_for_topic(topic) or ()]
            consumer.assign(places)
            consumer.seek_to_beginning()
            by_position: dict[tuple[int, int], tuple[str, dict[str, Any]]] = {}
            until_s = time.monotonic() + 60
            while time.monotonic() < until_s and ((polled := consumer.poll(1_000)) or not by_position):
                for records in polled.values():
                    by_position |= {
                        (record.partition, record.offset): (record.key.decode(), json.loads(record.value))
                        for record in records
                    }
            return [record for _, record in sorted(by_position.items(), key=lambda entry: entry[0])]
        finally:
            consumer.close()


@pytest.fixture
def shop(tmp_path: Path, broker: Server) -> Shop:
    return Shop(tmp_path / "state", broker)


def test_items_of_a_file_are_imported_once(shop: Shop, tmp_path: Path) -> None:
    """A second run sends only added rows; an unusable row is reported."""
    path = tmp_path / "items.csv"
    table = pl.DataFrame(ROWS)
    table.write_csv(path)
    options = ("items", str(path), "--number", "price", "--flag", "new")
    first, second = shop.run(*options), shop.run(*options)
    sent = shop.records("items")
    pl.concat([table, pl.DataFrame([ROWS[0] | {"item_id": "added"}, ROWS[1] | {"item_id": ""}])]).write_csv(path)
    third = shop.run(*options)

    assert first.stdout.endswith("items: 120 rows\n"), first.stderr
    assert second.stdout.endswith("items: 120 rows, 120 of them before this run\n")
    expected = {"title": "Item 7", "attributes": {"price": 7.5, "new": False}, "available": True}
    assert (len(sent), dict(sent)["sku-007"]) == (120, expected)
    assert "items: 1 set aside (item_id), such as " in third.stdout
    assert "; row 123\n" in third.stdout
    assert sorted(key for key, _ in shop.records("items")) == sorted(["added", *dict(sent)])


def test_events_are_parted_by_age(shop: Shop, tmp_path: Path) -> None:
    """New events enter the stream with an ID from their content, old events the table; both once after two runs."""
    now_s, day_s, path, table = int(time.time()), 86_400, tmp_path / "events.jsonl", tmp_path / "old.parquet"
    rows = [{"user_id": f"u{day % 7}", "item_id": "sku-001", "event_time": now_s - day * day_s} for day in range(1, 60)]
    for title in (1, 2, 1):
        path.write_text("\n".join(json.dumps(row | {"value": title}) for row in rows))
        done = shop.run("events", str(path), "--table", str(table))
        assert done.returncode == 0, done.stdout + done.stderr
    sent = {value["event_id"] for _, value in shop.records("interactions")}
    old = pl.read_parquet(table)

    assert len(sent) + old.height == 2 * len(rows)
    assert old["event_id"].n_unique() == old.height
    assert old["event_time"].max() < (now_s - 28 * day_s) * 1_000
    assert all(key == value["user_id"] for key, value in shop.records("interactions"))


def test_a_killed_import_goes_on_where_it_was(shop: Shop, tmp_path: Path) -> None:
    """After SIGKILL no item is missing, and at most the batch in flight is there twice."""
    path, num = tmp_path / "many.parquet", 60 * BATCH_ROWS
    pl.DataFrame({"item_id": [f"i{number}" for number in range(num)]}).write_parquet(path)
    shop.kill_at_the_first_batch("items", str(path))
    done = shop.run("items", str(path))

    assert "of them before this run" in done.stdout, done.stdout + done.stderr
    keys = [key for key, _ in shop.records("items")]
    assert len(set(keys)) == num
    assert len(keys) <= num + BATCH_ROWS


def test_an_erasure_removes_the_rows_that_a_killed_import_left(shop: Shop, tmp_path: Path) -> None:
    """The copies of a database's answer and of its events in order are in the folder that the worker looks through."""
    path, now_s = tmp_path / "shop.db", int(time.time())
    with sqlite3.connect(path) as made:
        made.execute("CREATE TABLE clicks (user_id TEXT, item_id TEXT, event_time INTEGER)")
        made.executemany(
            "INSERT INTO clicks VALUES ('ann', ?, ?)", ((f"i{at}", now_s - at) for at in range(40 * BATCH_ROWS))
        )
    made.close()
    query = ("--query", "SELECT * FROM clicks ORDER BY event_time")
    shop.kill_at_the_first_batch("events", f"sqlite://{path}", *query)
    left = [path.suffix for path in each_file(shop.settings.state_dir) if b"ann" in path.read_bytes()]
    is_free = remove_outputs(shop.settings.stages_dir, {"eve"}.__contains__)

    assert {".jsonl", ".parquet"} <= {*left}
    assert is_free
    assert not [path for path in each_file(shop.settings.state_dir) if b"ann" in path.read_bytes()]


def test_without_a_broker_the_command_says_what_to_do(tmp_path: Path, broker: Server) -> None:
    """A failed delivery records no progress, and publishes no bundle: it would show the items that are to be hidden."""
    shop, path = Shop(tmp_path / "state", broker), tmp_path / "items.csv"
    pl.DataFrame(ROWS).write_csv(path)
    broker.kill()
    failed = shop.run("items", str(path), "--first-bundle")
    versions = BundleStore(shop.settings.bundle_root).versions()
    broker.start()
    done = shop.run("items", str(path), "--first-bundle")

    assert (failed.returncode, "tailrace up" in failed.stderr, versions) == (1, True, [])
    assert (done.returncode, len(shop.records("items"))) == (0, 120), done.stdout + done.stderr
    assert BundleStore(shop.settings.bundle_root).live_version() is not None


def test_commands_refuse_items_that_are_known_in_part(shop: Shop, tmp_path: Path) -> None:
    """An import and `add-items` name the damaged snapshot and the fix; no record is sent, and no progress lost."""
    path, snapshot = tmp_path / "items.csv", shop.settings.items_snapshot
    pl.DataFrame(ROWS).write_csv(path)
    snapshot.parent.mkdir(parents=True)
    snapshot.write_bytes(b"damaged")
    refused = [shop.run("items", str(path), "--again"), shop.command("add-items")]
    recorded = [*shop.settings.imports_dir.glob("*.json")]
    snapshot.unlink()
    done = shop.run("items", str(path))

    fix = f"topic items is unavailable: {snapshot}: damaged snapshot of items; restore it, or remove {snapshot}"
    for ended in refused:
        assert (ended.returncode, fix in " ".join(ended.stderr.split())) == (1, True), ended.stdout + ended.stderr
    assert recorded == []
    assert done.stdout.endswith("items: 120 rows\n"), done.stderr


def test_records_sent_together_travel_in_one_batch(shop: Shop) -> None:
    """Each batch costs the embedded broker and its readers a time: it reports its last batch's first record as the end.

    A single record is not held back.
    """
    settings = shop.settings.model_copy(update={"topic_partitions": 1})
    consumer = KafkaConsumer(bootstrap_servers=shop.broker.address)
    place = TopicPartition(settings.items_topic, 0)
    try:
        with topic_sender(settings, settings.items_topic) as send:
            send([(f"i{number}".encode(), b"{}") for number in range(BATCH_ROWS)])
            ends = [consumer.end_offsets([place])[place]]
            send([(b"i0", None)])
            ends.append(consumer.end_offsets([place])[place])
    finally:
        consumer.close()

    assert ends == [1, BATCH_ROWS + 1]


def test_an_import_loads_no_library_of_models() -> None:
    """Loading them takes longer than the import of a small table."""
    code = "import sys, pipelines.imports.following, pipelines.imports.run; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("kind", ["items", "events"])
def test_an_import_waits_for_another_import(shop: Shop, tmp_path: Path, kind: str) -> None:
    """Imports share scratch files: a second import would send the other table's rows, or none."""
    path, imports = tmp_path / "table.jsonl", shop.settings.imports_dir
    path.write_text(json.dumps({"user_id": "u", "item_id": "sku-001", "event_time": int(time.time())}))
    command = [sys.executable, "-m", "infra.cli.main", "import", kind, str(path)]
    environment = {**inherited_environment(), **shop.settings.as_environment(), "COLUMNS": "300"}
    with run_lock_if_free(imports) as is_free:
        second = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        assert second.stdout is not None
        waiting, files = second.stdout.readline(), [*imports.glob("*.json")]
    finished = second.stdout.read()
    second.stdout.close()

    assert is_free
    assert (waiting, files) == (f"waiting for another run in {imports}\n", [])
    assert (second.wait(60), finished.endswith(f"{kind}: 1 rows\n")) == (0, True), finished


def test_rows_of_sqlite_are_as_they_were_written(tmp_path: Path) -> None:
    """An invalid statement and a missing file are reported by name."""
    path = tmp_path / "shop.db"
    with sqlite3.connect(path) as made:
        made.execute("CREATE TABLE products (item_id TEXT, title TEXT, price REAL, new BOOLEAN)")
        made.executemany("INSERT INTO products VALUES (:item_id, :title, :price, :new)", ROWS)
    made.close()

    assert rows_of(f"sqlite://{path}", QUERY, tmp_path) == ROWS
    with pytest.raises(DataError, match="no such column"):
        rows_of(f"sqlite://{path}", "SELECT no_such FROM products", tmp_path)
    with pytest.raises(DataError, match="no database"):
        rows_of(f"sqlite://{path}.gone", QUERY, tmp_path)
    with pytest.raises(ConfigError, match="--query"):
        rows_of(f"sqlite://{path}", None, tmp_path)


def test_a_column_of_sqlite_may_begin_with_other_values(tmp_path: Path) -> None:
    """A price may be missing or whole in the first thousands of rows, and text in another."""
    path, prices = tmp_path / "shop.db", [None] * 3_000 + [2, 1_234_567.89]
    with sqlite3.connect(path) as made:
        made.execute("CREATE TABLE products (item_id, title, price)")
        made.executemany("INSERT INTO products VALUES (?, ?, ?)", [(n, "a", price) for n, price in enumerate(prices)])
    made.close()
    numbers = rows_of(f"sqlite://{path}", "SELECT price FROM products", tmp_path)
    with sqlite3.connect(path) as made:
        made.execute("INSERT INTO products VALUES ('x', 'b', 'free')")
    made.close()
    texts = rows_of(f"sqlite://{path}", "SELECT price FROM products", tmp_path)

    assert [row["price"] for row in numbers] == prices
    assert [row["price"] for row in texts[-3:]] == ["2", "1234567.89", "free"]


@pytest.fixture(scope="module")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Postgres with the products."""
    with warnings.catch_warnings():  # platformdirs warns if XDG_RUNTIME_DIR is not set, as for root
        warnings.simplefilter("ignore")
        import pgserver

        server = pgserver.get_server(tmp_path_factory.mktemp("pg"), cleanup_mode="delete")
    try:
        with dbapi.connect(server.get_uri()) as made, made.cursor() as cursor:
            cursor.adbc_ingest("products", pl.DataFrame(ROWS).to_arrow())
            made.commit()
        yield server.get_uri()
    finally:
        server.cleanup()


def test_rows_of_postgres_are_as_they_were_written(postgres: str, tmp_path: Path) -> None:
    """An invalid statement is reported with the database's error; an unreachable database is not a data error."""
    assert rows_of(postgres, QUERY, tmp_path) == ROWS
    with pytest.raises(DataError, match="no_such"):
        rows_of(postgres, "SELECT no_such FROM products", tmp_path)
    with pytest.raises((EnvironmentFault, DataError), match=r"127\.0\.0\.1:1/shop") as caught:
        rows_of("postgresql://who:secret@127.0.0.1:1/shop", QUERY, tmp_path)
    assert "secret" not in str(caught.value)


def test_rows_of_an_object_are_those_of_the_file(
    object_store: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupted download resumes; a changed object is read again; a missing object is reported."""
    from models.registry.storage.objects import open_store

    for name, value in object_environment(object_store).items():
        monkeypatch.setenv(name, value)
    path = tmp_path / "items.parquet"
    store, url, downloads = open_store("s3://bundles"), "s3://bundles/shop/items.parquet", tmp_path / "downloads"
    for rows in (ROWS, ROWS[:50]):
        pl.DataFrame(rows).write_parquet(path)
        store.put("shop/items.parquet", path)
        assert rows_of(url, None, downloads) == rows
    (whole,) = [file for file in downloads.iterdir() if file.read_bytes() == path.read_bytes()]
    part = whole.with_suffix(f"{whole.suffix}.part")
    part.write_bytes(whole.read_bytes()[:100])
    whole.unlink()

    assert rows_of(url, None, downloads) == ROWS[:50]
    with pytest.raises(DataError, match="no object"):
        rows_of("s3://bundles/gone.csv", None, downloads)
