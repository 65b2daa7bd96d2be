"""The scan for a deleted tenant's ids, over real servers: an id that is planted in a store is found there."""

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from kafka import KafkaProducer
from redis import Redis

from benchmarks.many.scan import in_files, in_metrics, in_objects, in_redis, in_topics, scan, text_sought
from models.registry.storage.objects import open_store
from services.settings.settings import Settings
from tests.support.servers import HOST, Server, object_environment
from tests.support.stream.stream_rig import Rig
from tests.support.wait import wait_for

ID = "user-4711"


@pytest.mark.parametrize(
    "plant",
    [
        lambda redis: redis.set(ID, "value"),
        lambda redis: redis.set("key", f"of {ID}"),
        lambda redis: redis.hset("key", ID, "value"),
        lambda redis: redis.hset("key", "field", ID),
        lambda redis: redis.rpush("key", "a", ID),
        lambda redis: redis.sadd("key", "a", ID),
        lambda redis: redis.zadd("key", {"a": 1, ID: 2}),
    ],
    ids=["key", "string", "field", "value", "list", "set", "sorted set"],
)
def test_an_id_in_redis_is_found(rig: Rig, plant: Callable[[Redis], object]) -> None:
    """In a key, and in a value of each type."""
    with Redis(host=HOST, port=rig.features.redis.port) as client:
        client.flushall()
        before = scan(rig.settings, {"id": [text_sought(ID)]}, [in_redis])["id"]
        plant(client)
        after = scan(rig.settings, {"id": [text_sought(ID)]}, [in_redis])["id"]
        client.flushall()

    assert (before, [*after], len(after["redis"])) == ({}, ["redis"], 1)


def test_an_id_that_redis_file_compresses_is_found(rig: Rig) -> None:
    """After a rewrite the file has the value compressed, without the whole id in it."""
    middle = text_sought(f"{'x' * 40}-{ID}-{'x' * 40}")
    with Redis(host=HOST, port=rig.features.redis.port) as client:
        client.set("key", f"{'x' * 200}-{ID}-{'x' * 200}")
        client.bgrewriteaof()
        wait_for(lambda: not client.info("persistence")["aof_rewrite_in_progress"], what="the rewritten file")
        folder = Path(client.config_get("dir")["dir"])
        raw = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
        found = scan(rig.settings, {"id": [middle]}, [in_files])["id"]
        client.delete("key")

    assert f"{'x' * 40}-{ID}-{'x' * 40}".encode() not in raw
    assert len(found) == 1


def test_an_id_in_a_record_of_any_topic_is_found(rig: Rig) -> None:
    """In the key, in the value, in a header; a record without the id is not found."""
    producer = KafkaProducer(bootstrap_servers=rig.settings.kafka_bootstrap, max_block_ms=10_000)
    records = (
        (ID.encode(), b"v", []),
        (b"k", ID.encode(), []),
        (b"k", None, [("name", ID.encode())]),
        (b"k", b"v", []),
    )
    for topic in (rig.settings.interactions_topic, rig.settings.dead_letter_topic):
        for key, value, headers in records:
            producer.send(topic, key=key, value=value, headers=headers).get(10)
    producer.close()

    found = scan(rig.settings, {"id": [text_sought(ID)]}, [in_topics])["id"]
    assert {kind: len(places) for kind, places in found.items()} == {
        f"topic {rig.settings.interactions_topic}": 3,
        f"topic {rig.settings.dead_letter_topic}": 3,
    }


def test_an_id_in_an_object_is_found(object_store: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In its name, and in its content."""
    object_store.ensure_running()
    for name, value in object_environment(object_store).items():
        monkeypatch.setenv(name, value)
    settings = Settings(state_dir=tmp_path, bundle_store=f"s3://bundles/{tmp_path.name}")
    store = open_store(settings.bundle_store)
    for path, content in ((f"versions/{ID}.json", b"{}"), ("files/a", ID.encode()), ("files/b", b"other")):
        store.put(path, content)

    found = scan(settings, {"id": [text_sought(ID)]}, [in_objects])["id"]
    assert len(found["objects"]) == 2


def test_an_id_in_a_metric_is_found(tmp_path: Path) -> None:
    """In a label's value."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(f'requests_total{{user="{ID}"}} 1\nrequests_total{{user="other"}} 1\n'.encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer((HOST, 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        settings = Settings(state_dir=tmp_path, metrics_port=server.server_port)
        found = scan(settings, {"id": [text_sought(ID)]}, [in_metrics])["id"]
        server.shutdown()

    assert len(found["metrics"]) == 1
