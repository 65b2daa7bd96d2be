"""Records into one Kafka topic, from an event loop, through a thread of its own.

kafka-python blocks (for metadata, for a connection) and its producer is of no more use after the broker lost its topics, so
both stay on one thread: it owns the client, sends what lies in a bounded queue, and makes a new client after a failure.
Where nobody waits for the acknowledgement, records may gather for a moment and leave together: each exchange with a broker
keeps the interpreter busy for about as long as a request does. A caller waits for the broker's acknowledgement at most
`ack_timeout_s`; what was not handed to the client by then is never sent. What was handed over may still arrive after a
refusal: a repeated event id makes that harmless.

Does not know what the records mean.
"""

import asyncio
import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import structlog
from kafka import KafkaProducer
from kafka.errors import KafkaError
from opentelemetry.trace import SpanKind

from services.errors import DependencyAway, Overloaded
from services.observability.tracing import note, span, trace_headers
from services.router.breaker import Breaker
from services.settings.addresses import KafkaAddress

log = structlog.get_logger()

Record = tuple[bytes, bytes]
"""Key and value."""

_CONNECT_S = 1.0
_METADATA_S = 0.5
_RECONNECT_S = 0.5
_RETRY_AFTER_S = 1.0
_STOP_S = 2.0
_LINGER_MS = 5
"""Until a handful of gathered records has been handed over whole."""


@dataclass(slots=True)
class _Job:
    """Records that are acknowledged together, and the future that learns of it. `trace` goes out as record headers."""

    records: Sequence[Record]
    expires_at_s: float
    trace: list[tuple[str, bytes]]
    done: "Future[None]" = field(default_factory=Future)


class TopicProducer:
    """Sends to one topic; at most `max_in_flight` jobs wait or are on their way.

    Args:
        ack_timeout_s: How long one call may wait for the broker.
        max_in_flight: Jobs over this are refused.
        gather_s: How long records gather after others have left, a quarter of `ack_timeout_s` at most; 0 sends each at once.
    """

    def __init__(
        self, kafka: KafkaAddress, topic: str, ack_timeout_s: float, max_in_flight: int, gather_s: float = 0.0
    ) -> None:
        self._kafka = kafka
        self._topic = topic
        self._about = {"messaging.system": "kafka", "messaging.operation.type": "send"}
        self._about |= {"messaging.operation.name": "send", "messaging.destination.name": topic}
        self._ack_timeout_s = ack_timeout_s
        self._gather_s = min(gather_s, ack_timeout_s / 4)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._free = threading.BoundedSemaphore(max_in_flight)
        self._thread = threading.Thread(target=self._run, name=f"produce-{topic}", daemon=True)
        self._broken = threading.Event()
        self._connecting = Breaker(1, _RECONNECT_S)

    def start(self) -> None:
        """Start the thread; it connects at once, so that the first record need not wait for that."""
        self._thread.start()

    def stop(self) -> None:
        """Send what waits, for at most two seconds, and end the thread. Blocks."""
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join(_STOP_S)

    async def record(self, records: Sequence[Record]) -> None:
        """Send records and wait until the broker has them all.

        Raises Overloaded when too much is in flight, DependencyAway when the broker does not acknowledge in time.
        """
        with span(f"send {self._topic}", SpanKind.PRODUCER, self._about):
            note({"messaging.batch.message_count": len(records)})
            job = self._enqueue(records)
            if job is None:
                raise Overloaded(self._topic, _RETRY_AFTER_S)
            try:
                await asyncio.wait_for(asyncio.wrap_future(job.done), self._ack_timeout_s)
            except (TimeoutError, KafkaError) as error:
                log.warning("records_refused", topic=self._topic, num_records=len(records), error=repr(error))
                raise DependencyAway(self._topic, _RETRY_AFTER_S) from error

    def offer(self, record: Record, on_done: Callable[[bool], None]) -> bool:
        """Send a record without waiting. False: too much is in flight, and it is dropped. `on_done` hears of the outcome."""
        job = self._enqueue([record])
        if job is None:
            return False
        job.done.add_done_callback(lambda done: on_done(not done.cancelled() and done.exception() is None))
        return True

    def _enqueue(self, records: Sequence[Record]) -> _Job | None:
        if not self._free.acquire(blocking=False):
            return None
        trace = [(name, text.encode()) for name, text in trace_headers()]
        job = _Job(records, time.monotonic() + self._ack_timeout_s, trace)
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
        """Make a client; None while no broker answers, and for half a second after that without another attempt."""
        if not self._connecting.allows(time.monotonic()):
            return None
        self._broken.clear()
        try:
            client = self._make_client() if _listens(self._kafka.bootstrap) else None
            error = "no broker listens"
        except Exception as raised:  # noqa: BLE001 - whatever the client fails at, the thread must go on
            client, error = None, repr(raised)
        if client is None:
            log.warning("broker_away", topic=self._topic, error=error)
            self._connecting.failed(time.monotonic())
        else:
            self._connecting.succeeded()
        return client

    def _make_client(self) -> KafkaProducer:
        ack_ms = int(self._ack_timeout_s * 1_000)
        linger_ms = min(_LINGER_MS, ack_ms // 4) if self._gather_s else 0
        return KafkaProducer(
            **self._kafka.client_options(),
            acks="all",
            linger_ms=linger_ms,
            allow_auto_create_topics=False,
            max_block_ms=int(_METADATA_S * 1_000),
            bootstrap_timeout_ms=int(_CONNECT_S * 1_000),
            request_timeout_ms=max(1, ack_ms - linger_ms - 1),
            delivery_timeout_ms=ack_ms,
            reconnect_backoff_max_ms=500,
            metrics_enabled=False,
        )

    def _send(self, client: Any, job: _Job) -> None:
        """Hand a job's records to the client and have its future settled by their acknowledgements."""
        if not job.done.set_running_or_notify_cancel():
            return
        if client is None or time.monotonic() >= job.expires_at_s:
            job.done.set_exception(KafkaError("no broker, or no time left to send"))
            return
        acks = _Acks(job, len(job.records), self._broken)
        try:
            for key, value in job.records:
                client.send(self._topic, value, key, headers=job.trace).add_both(acks.one)
        except Exception as error:  # noqa: BLE001 - whatever the client breaks at, the thread must live on
            acks.fail(error)


class _Acks:
    """Counts a job's acknowledgements; called from the client's threads."""

    def __init__(self, job: _Job, num_expected: int, broken: threading.Event) -> None:
        self._job = job
        self._missing = num_expected
        self._broken = broken
        self._lock = threading.Lock()

    def one(self, outcome: Any) -> None:
        """One record was acknowledged (its metadata) or failed (an exception)."""
        if isinstance(outcome, BaseException):
            self.fail(outcome)
            return
        with self._lock:
            self._missing -= 1
            if self._missing == 0 and not self._job.done.done():
                self._job.done.set_result(None)

    def fail(self, error: BaseException) -> None:
        """The job cannot be acknowledged whole; the client is not trusted any more."""
        self._broken.set()
        with self._lock:
            if not self._job.done.done():
                self._job.done.set_exception(error if isinstance(error, KafkaError) else KafkaError(repr(error)))


def _listens(bootstrap: str) -> bool:
    """Whether any of the brokers (`host:port,host:port`) takes a connection.

    Called before a client is made, since a client that finds no broker leaves five open descriptors to the collector.
    """
    for address in bootstrap.split(","):
        host, _, port = address.strip().rpartition(":")
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), _CONNECT_S):
            return True
    return False


def _close(client: Any) -> None:
    if client is not None:
        with contextlib.suppress(KafkaError, OSError):
            client.close(timeout=0.1)
