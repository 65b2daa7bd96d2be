"""Sends records to one Kafka topic from an event loop, through a separate thread.

kafka-python blocks (for metadata, for a connection), and its producer is unusable once the broker has lost its topics.
So one thread owns the client, sends the jobs of a bounded queue, and creates a new client after a failure. If no caller
waits for the acknowledgement, records are gathered briefly and sent together: each exchange with a broker holds the
interpreter for about as long as a request does.

A caller waits at most `ack_timeout_s` for the broker's acknowledgement; records not passed to the client by then are
never sent. Records already passed may still arrive after a refusal; repeated event ids make that harmless. Does not
know the records' meaning.
"""

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import structlog
from kafka import KafkaProducer, TopicPartition
from kafka.errors import KafkaError
from opentelemetry.trace import SpanKind

from services.errors import DependencyUnavailable, Overloaded
from services.observability.tracing import note, span, trace_headers
from services.router.breaker import Breaker
from services.settings.addresses import KafkaAddress
from services.settings.arrivals import ArrivalFile
from services.settings.kafka_clients import any_listens, close_producer, missing_permission, open_client

log = structlog.get_logger()

Record = tuple[bytes, bytes | None]
"""Key and value; a value of None is a tombstone."""

_CONNECT_S = 1.0
_METADATA_S = 0.5
_RECONNECT_S = 0.5
_RETRY_AFTER_S = 1.0
_STOP_S = 2.0
_CLOSE_S = 0.1
_LINGER_MS = 5
"""Long enough to pass all gathered records to the client as one batch."""
_BATCH_BYTES = 262_144
"""Room for a request's events in one batch per partition. Batches above a topic's limit are split by the client."""


@dataclass(slots=True)
class _Job:
    """Records acknowledged together, their headers, and the future of their partitions and offsets."""

    records: Sequence[Record]
    expires_at_s: float
    headers: list[tuple[str, bytes]]
    done: "Future[list[tuple[int, int]]]" = field(default_factory=Future)


class TopicProducer:
    """Sends to one topic; at most `max_in_flight` jobs are queued or unacknowledged.

    Args:
        ack_timeout_s: How long one call may wait for the broker.
        max_in_flight: Jobs beyond this number are refused.
        gather_s: How long to gather records after a send, at most a quarter of `ack_timeout_s`; 0 sends each at once.
        arrivals_dir: Where to wake the topic's readers on this machine, if they wait for that.
    """

    def __init__(
        self,
        kafka: KafkaAddress,
        topic: str,
        ack_timeout_s: float,
        max_in_flight: int,
        gather_s: float = 0.0,
        arrivals_dir: Path | None = None,
    ) -> None:
        self._kafka = kafka
        self._topic = topic
        self._about = {"messaging.system": "kafka", "messaging.operation.type": "send"}
        self._about |= {"messaging.operation.name": "send", "messaging.destination.name": topic}
        self._ack_timeout_s = ack_timeout_s
        self._arrivals = ArrivalFile(arrivals_dir, topic)
        self._gather_s = min(gather_s, ack_timeout_s / 4)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._free = threading.BoundedSemaphore(max_in_flight)
        self._thread = threading.Thread(target=self._run, name=f"produce-{topic}", daemon=True)
        self._broken = threading.Event()
        self._connecting = Breaker(1, _RECONNECT_S)

    def start(self) -> None:
        """Start the thread; it connects at once, so that the first record does not wait for the connection."""
        self._thread.start()

    def stop(self) -> None:
        """Send the queued jobs, for at most two seconds, and stop the thread. Blocks."""
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join(_STOP_S)

    async def record(
        self, records: Sequence[Record], headers: Sequence[tuple[str, bytes]] = ()
    ) -> Sequence[tuple[int, int]]:
        """Send records and wait until the broker has acknowledged them all; return their partitions and offsets.

        Raises Overloaded if too much is in flight, DependencyUnavailable if the broker does not acknowledge in time.
        """
        with span(f"send {self._topic}", SpanKind.PRODUCER, self._about):
            note({"messaging.batch.message_count": len(records)})
            job = self._enqueue(records, headers)
            if job is None:
                raise Overloaded(self._topic, _RETRY_AFTER_S)
            try:
                return await asyncio.wait_for(asyncio.wrap_future(job.done), self._ack_timeout_s)
            except (TimeoutError, KafkaError) as error:
                why = missing_permission(error, [self._topic], ["Write"])
                log.warning("records_refused", topic=self._topic, num_records=len(records), error=why or repr(error))
                raise DependencyUnavailable(self._topic, _RETRY_AFTER_S, why) from error

    def offer(self, record: Record, on_done: Callable[[bool], None]) -> bool:
        """Send a record without waiting; return False if too much is in flight.

        `on_done` is called with whether it arrived.
        """
        job = self._enqueue([record])
        if job is None:
            return False
        job.done.add_done_callback(lambda done: on_done(not done.cancelled() and done.exception() is None))
        return True

    def _enqueue(self, records: Sequence[Record], headers: Sequence[tuple[str, bytes]] = ()) -> _Job | None:
        if not self._free.acquire(blocking=False):
            return None
        trace = [(name, text.encode()) for name, text in trace_headers()]
        job = _Job(records, time.monotonic() + self._ack_timeout_s, [*trace, *headers])
        job.done.add_done_callback(lambda _: self._free.release())
        self._jobs.put(job)
        return job

    def _run(self) -> None:
        client = self._connect()
        while (job := self._next()) is not None:
            if self._broken.is_set():
                _close(client)
                client = None
            client = client or self._connect()
            self._send(client, job)
        _close(client)

    def _next(self) -> _Job | None:
        """Wait for a job; None ends the thread."""
        if self._gather_s and self._jobs.empty():
            time.sleep(self._gather_s)
        return self._jobs.get()

    def _connect(self) -> Any:
        """Return a new client; None if no broker answers, and without another attempt for half a second after that."""
        if not self._connecting.allows(time.monotonic()):
            return None
        self._broken.clear()
        try:
            client = self._make_client() if any_listens(self._kafka.bootstrap, _CONNECT_S) else None
            error = "no broker listens"
        except Exception as raised:  # noqa: BLE001 - the thread must survive any failure of the client
            client, error = None, missing_permission(raised, [self._topic]) or repr(raised)
        if client is None:
            log.warning("broker_unavailable", topic=self._topic, error=error)
            self._connecting.failed(time.monotonic())
        else:
            self._connecting.succeeded()
        return client

    def _make_client(self) -> Any:
        ack_ms = int(self._ack_timeout_s * 1_000)
        linger_ms = min(_LINGER_MS, ack_ms // 4) if self._gather_s else 0
        return open_client(
            KafkaProducer,
            self._kafka,
            acks="all",
            batch_size=_BATCH_BYTES,
            linger_ms=linger_ms,
            allow_auto_create_topics=False,
            max_block_ms=int(_METADATA_S * 1_000),
            bootstrap_timeout_ms=int(_CONNECT_S * 1_000),
            request_timeout_ms=max(1, ack_ms - linger_ms - 1),
            delivery_timeout_ms=ack_ms,
            reconnect_backoff_max_ms=500,
        )

    def _send(self, client: Any, job: _Job) -> None:
        """Pass a job's records to the client; their acknowledgements settle its future."""
        if not job.done.set_running_or_notify_cancel():
            return
        if client is None or time.monotonic() >= job.expires_at_s:
            job.done.set_exception(KafkaError("no broker, or no time left to send"))
            return
        acks = _Acks(job, len(job.records), self._broken, self._arrivals)
        try:
            for receipt in self._append(client, job):
                receipt.add_both(acks.one)
        except Exception as error:  # noqa: BLE001 - the thread must survive any failure of the client
            acks.fail(error)

    def _append(self, client: Any, job: _Job) -> list[Any]:
        """Pass a job's records to the client before its sender wakes, and return their receipts.

        `KafkaProducer.send` wakes the sender at the first record, so the records of a job travel in many batches, and
        it chooses the partition of each record again. Uses private parts of the client, read in kafka-python 3.0.12.
        """
        client.partitions_for(self._topic)  # waits for the topic's metadata
        append, choose = client._accumulator.append, client._partition
        place = cache(lambda key: TopicPartition(self._topic, choose(self._topic, None, key, None, key, None)))
        appended = [append(place(key), None, key, value, job.headers) for key, value in job.records]
        if any(is_full or is_new for _, is_full, is_new, _ in appended):
            client._sender.wakeup()
        return [receipt for receipt, *_ in appended]


class _Acks:
    """Counts a job's acknowledgements; called from the client's threads."""

    def __init__(self, job: _Job, num_expected: int, broken: threading.Event, arrivals: ArrivalFile) -> None:
        self._job = job
        self._num_expected = num_expected
        self._written: list[tuple[int, int]] = []
        self._broken = broken
        self._arrivals = arrivals
        self._lock = threading.Lock()

    def one(self, outcome: Any) -> None:
        """Count one record's acknowledgement (its metadata) or failure (an exception)."""
        if isinstance(outcome, BaseException):
            self.fail(outcome)
            return
        with self._lock:
            self._written.append((int(outcome.partition), int(outcome.offset)))
            if len(self._written) == self._num_expected and not self._job.done.done():
                self._arrivals.touch()
                self._job.done.set_result(self._written)

    def fail(self, error: BaseException) -> None:
        """Fail the job and replace the client, whose state is unknown."""
        self._broken.set()
        with self._lock:
            if not self._job.done.done():
                self._job.done.set_exception(error if isinstance(error, KafkaError) else KafkaError(repr(error)))


def _close(client: Any) -> None:
    if client is not None:
        close_producer(client, _CLOSE_S)
