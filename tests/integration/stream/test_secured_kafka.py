"""Kafka over TLS against a real broker behind a TLS proxy, and the options that a password sets."""

import asyncio
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import trustme
from kafka import KafkaAdminClient
from kafka.errors import KafkaError

from services.errors import ConfigError, DependencyUnavailable
from services.features.schema import LogPosition
from services.gateway.events.producer import TopicProducer
from services.settings.addresses import KafkaAddress
from services.settings.kafka_clients import open_client
from services.stream.partition_consumer import LogAddress, PartitionConsumer
from tests.support.gateway.tls_proxy import tls_proxy
from tests.support.servers import HOST, Server, broker_server, free_port
from tests.support.wait import wait_for

TOPIC = "interactions"
PASSWORD = 'p=1,"x" é'


@pytest.fixture
def front() -> int:
    """The port that clients connect to, which the broker advertises."""
    return free_port()


@pytest.fixture
def broker(tmp_path: Path, front: int) -> Iterator[Server]:
    """A broker that advertises the TLS proxy."""
    with broker_server(tmp_path / "broker", advertised=f"{HOST}:{front}") as server:
        yield server


@pytest.fixture
def over_tls(tmp_path: Path, broker: Server, front: int) -> Iterator[KafkaAddress]:
    """The broker's address over TLS."""
    ca = trustme.CA()
    ca.cert_pem.write_to_path(tmp_path / "ca.pem")
    with tls_proxy(tmp_path / "proxy", ca, broker.port, front):
        yield KafkaAddress(bootstrap=f"{HOST}:{front}", tls_ca_file=tmp_path / "ca.pem")


async def send_and_read(address: KafkaAddress) -> list[bytes | None]:
    """Send with the gateway's producer, read with the worker's consumer."""
    producer = TopicProducer(address, TOPIC, 5.0, 10)
    producer.start()
    session = await asyncio.to_thread(PartitionConsumer, log_address(address))
    await asyncio.to_thread(
        session.assign, session.wanted, lambda partition, _committed: LogPosition("t", partition, 0)
    )
    await producer.record([(b"u", b"event")])
    records = await asyncio.to_thread(wait_for, lambda: session.poll(100), what="the record")
    await asyncio.to_thread(session.close)
    await asyncio.to_thread(producer.stop)
    return [record.value for record in records]


def log_address(address: KafkaAddress) -> LogAddress:
    return LogAddress(kafka=address, topic=TOPIC, dead_letter_topic="dlq", group="g", num_partitions=1)


async def test_events_go_out_and_come_in_over_tls(over_tls: KafkaAddress) -> None:
    """Producer and consumer work over TLS."""
    assert await send_and_read(over_tls) == [b"event"]


def test_an_unverified_broker_is_unavailable(over_tls: KafkaAddress, tmp_path: Path) -> None:
    """The consumer connects neither with another authority nor without TLS."""
    trustme.CA().cert_pem.write_to_path(tmp_path / "other.pem")

    for stranger in (replace(over_tls, tls_ca_file=tmp_path / "other.pem"), replace(over_tls, tls_ca_file=None)):
        with pytest.raises(DependencyUnavailable):
            PartitionConsumer(log_address(stranger))


def test_client_options_follow_the_address(tmp_path: Path) -> None:
    """The options cover plaintext, TLS and a password; the address's repr holds no password."""
    (tmp_path / "password").write_text(PASSWORD)
    (tmp_path / "ca.pem").touch()
    plain = KafkaAddress(bootstrap="b:1")
    user = replace(plain, username="u", password_file=tmp_path / "password")
    both = replace(user, tls_ca_file=tmp_path / "ca.pem")

    assert plain.client_options() == {"bootstrap_servers": "b:1", "security_protocol": "PLAINTEXT"}
    assert replace(plain, tls_ca_file=tmp_path / "ca.pem").security_protocol == "SSL"
    assert both.client_options() == {
        "bootstrap_servers": "b:1",
        "security_protocol": "SASL_SSL",
        "ssl_cafile": str(tmp_path / "ca.pem"),
        "sasl_mechanism": "SCRAM-SHA-512",
        "sasl_plain_username": "u",
        "sasl_plain_password": PASSWORD,
    }
    assert PASSWORD not in repr(both)
    with pytest.raises(ConfigError, match="nowhere"):
        replace(user, password_file=tmp_path / "nowhere").client_options()


async def test_each_connection_logs_in_with_the_password_of_the_file(tmp_path: Path) -> None:
    """A disconnected client reads the password file again when it reconnects."""
    seen: list[bytes] = []
    file = tmp_path / "password"
    file.write_text("one")

    async def broker(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Accept a PLAIN login, and close the connection at the next request."""
        apis = struct.pack(">i" + 4 * "hhh", 4, 18, 0, 0, 17, 1, 1, 36, 0, 0, 3, 0, 1)
        with suppress(asyncio.IncompleteReadError):
            while True:
                (length,) = struct.unpack(">i", await reader.readexactly(4))
                frame = await reader.readexactly(length)
                key, version, correlation = struct.unpack(">hhi", frame[:8])
                answers = {
                    18: struct.pack(">h", 35 if version else 0) + apis,
                    17: struct.pack(">hih5s", 0, 1, 5, b"PLAIN"),
                    36: struct.pack(">hhi", 0, -1, 0),
                }
                if key == 36:
                    seen.append(frame.split(b"\0")[-1])
                    file.write_text("two")
                elif key not in answers:
                    break
                body = answers[key]
                writer.write(struct.pack(">ii", 4 + len(body), correlation) + body)
                await writer.drain()
        writer.close()

    async with await asyncio.start_server(broker, HOST, 0) as server:
        port = server.sockets[0].getsockname()[1]
        address = KafkaAddress(bootstrap=f"{HOST}:{port}", username="u", password_file=file, sasl_mechanism="PLAIN")
        with pytest.raises(KafkaError):
            await asyncio.to_thread(open_client, KafkaAdminClient, address, bootstrap_timeout_ms=1_500)

    assert seen[:2] == [b"one", b"two"]
