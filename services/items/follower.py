"""Follows the topic `items` into this process's live catalogue: from a snapshot's positions or from the beginning.

Each process reads all partitions by itself, without a group. While the broker is unavailable, the known state stays,
and items are still shown and hidden by their times. A recreated topic (a broker may keep nothing on disk), or a log
that came back shorter, is read from its beginning on top of the known state: a state holds until it is stated again,
and no hidden item is shown before the end is reached. Such a topic lacks the states of a damaged snapshot, so it is not
read until the file is restored or removed. A record that cannot be read is counted, logged and skipped.
"""

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import structlog
from kafka import TopicPartition
from kafka.errors import OffsetOutOfRangeError

from services.contracts.items import ItemPatch, ItemState
from services.errors import DependencyUnavailable, EnvironmentFault, InvalidRequest, ReaderBehind
from services.items.live_items import Change, Knowledge, LiveItems
from services.items.patches import PatchMerger
from services.items.snapshot import Positions, read_snapshot, read_whole_topic, write_snapshot
from services.settings.addresses import KafkaAddress
from services.settings.arrivals import ArrivalFile
from services.settings.fetch_pace import FetchPace, FetchWaits
from services.settings.kafka_clients import REQUEST_MS, broker_as_dependency, open_reader
from services.settings.kafka_topics import Topic, create_missing
from services.settings.record_batches import UndecodableBatch
from services.settings.topic_reader import TopicReader

log = structlog.get_logger()

ITEMS_START_S = 15.0
"""How long a starting process waits for the next records if a broker answers; it reads about 20,000 per second."""
_FETCH_WAITS = FetchWaits(busy_ms=50, quiet_ms=500, untouched_ms=700)
_POLL_MS = 300
_FETCHED_AGAIN_S = 4 * _FETCH_WAITS.busy_ms / 1_000
_MAX_RECORDS = 500
"""Decoding this many takes 10 ms; meanwhile the process's other threads wait for the interpreter."""
_CHECK_EVERY_S = 2.0
_RETRY_S = 0.5
_RETRY_AFTER_S, _LONGEST_RETRY_S = 1.0, 60.0
_TICK_S, _LONGEST_TICK_S = 0.1, 1.0


@dataclass(slots=True)
class _Awaited:
    """A caller that waits until all records in the topic at the time of the call are read.

    `ends`: the positions to reach. `rough`: partitions whose last batch may end later, because the embedded broker
    reports its first record as the end, and the real end only to a fetch; with the time since when that record is the
    next.
    """

    done: "Future[None]" = field(default_factory=Future)
    ends: dict[TopicPartition, int] | None = None
    rough: dict[TopicPartition, float] = field(default_factory=dict)


class ItemFollower:
    """Owns the reading thread, and a thread that applies the items' times."""

    def __init__(
        self,
        items: LiveItems,
        kafka: KafkaAddress,
        topic: str,
        snapshot: Path,
        *,
        makes: Topic | None = None,
        write_every_s: float | None = None,
        arrivals_dir: Path | None = None,
        on_refused: Callable[[int], object] = lambda _number: None,
        on_unavailable: Callable[[int], object] = lambda _is_unavailable: None,
        on_look: Callable[[], object] = lambda: None,
        on_left_out: Callable[[int], object] = lambda _number: None,
        on_knowledge: Callable[[int], object] = lambda _knowledge: None,
    ) -> None:
        """Keep the parts without reading.

        Args:
            items: The live catalogue that the records change.
            kafka: The brokers.
            topic: The topic's name.
            snapshot: The file to begin with, which may be missing.
            makes: The topic, in the process that creates it if it is missing.
            write_every_s: How often changes are written to the snapshot, in the process that writes it; None: never.
            arrivals_dir: Where producers on this machine touch the topic's file, if they do.
            on_refused: Called with a number of records that cannot be read.
            on_unavailable: Called with 1 when the topic cannot be read, with 0 when it can be read again.
            on_look: Called about every two seconds while the topic can be read, in the reading thread.
            on_left_out: Called with a number of attributes that exceed the limit of names.
            on_knowledge: Called with the `Knowledge` of the items at construction and at each change of it.
        """
        self._items = items
        self._kafka = kafka
        self._topic = topic
        self._snapshot = snapshot
        self._makes = makes
        self._write_every_s = write_every_s
        self._arrivals = ArrivalFile(arrivals_dir, topic)
        self._on_refused = on_refused
        self._on_unavailable = on_unavailable
        self._on_look = on_look
        self._on_left_out = on_left_out
        self._on_knowledge = on_knowledge
        self._positions = Positions("", {})
        self._whole_topic = ""
        """The id of the topic if it has all states that are known."""
        self._is_damaged = False
        self._failure = ""
        self._merger = PatchMerger()
        self._deferred: dict[str, ItemState] = {}
        """States that would show a hidden item, held back until the topic's end: a later record may hide it again."""
        self._has_changed = False
        self._knows(Knowledge.NONE)
        self._written_s = 0.0
        self._awaited: list[_Awaited] = []
        self._awaited_lock = threading.Lock()
        self._stopped = threading.Event()
        self._has_times = threading.Event()
        """Ends the clock's wait: an item that is due earlier may have arrived."""
        self._threads = [
            threading.Thread(target=work, name=name, daemon=True)
            for work, name in ((self._run, "items-reader"), (self._tick, "items-clock"))
        ]

    @property
    def positions(self) -> Positions:
        return self._positions

    @property
    def failure(self) -> str:
        """Why the topic cannot be read now; empty while it can."""
        return self._failure

    def patch_of(self, changes: Mapping[str, Any]) -> ItemPatch:
        """Return the header of a patch of the states that are known now."""
        positions = self._positions
        return ItemPatch(dict(changes), positions.topic_id, {at: mark.offset for at, mark in positions.marks.items()})

    def is_unsettled(self, item_id: str) -> bool:
        """Return whether an item's last record is not its state; see `PatchMerger`."""
        return item_id in self._merger.unsettled

    def start(self, timeout_s: float = 0.0) -> None:
        """Load the snapshot, start following, and wait for the topic's end, or until none comes for `timeout_s`."""
        try:
            self._load()
        except EnvironmentFault as error:
            log.warning("items_snapshot_unreadable", error=str(error), cause=repr(error.__cause__))
        for thread in self._threads:
            thread.start()
        with suppress(DependencyUnavailable):
            self.read_to_end(timeout_s)

    def stop(self) -> None:
        """End the threads. Blocks for a moment."""
        self._stopped.set()
        self._has_times.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(2 * _POLL_MS / 1_000 + 1.0)
        self._fail_awaited()

    def read_to_end(self, stall_s: float) -> None:
        """Wait until all records now in the topic are applied, as long as some are read every `stall_s`.

        Raises DependencyUnavailable.
        """
        end, read = self._await_end().done, None
        while (positions := self._positions) != read:
            read = positions
            with suppress(TimeoutError):
                return end.result(stall_s)
        end.cancel()
        raise DependencyUnavailable(self._topic, _RETRY_AFTER_S, f"no record was read for {stall_s:g} s")

    async def catch_up(self, timeout_s: float) -> None:
        """Wait until all records now in the topic are applied.

        Raises DependencyUnavailable; ReaderBehind if it takes longer, with the time that the records left will take.
        """
        awaited, offsets = self._await_end(), self._offsets
        try:
            await asyncio.wait_for(asyncio.wrap_future(awaited.done), timeout_s)
        except TimeoutError as error:
            now = self._offsets
            num_read = sum(offset - offsets.get(number, offset) for number, offset in now.items())
            ends = {at.partition: end for at, end in (awaited.ends or {}).items()}
            num_left = sum(max(0, end - now.get(number, 0)) for number, end in ends.items())
            if not num_left:
                raise DependencyUnavailable(self._topic, _RETRY_AFTER_S) from error
            left_s = timeout_s * num_left / max(1, num_read)
            retry_after_s = min(max(_RETRY_AFTER_S, math.ceil(left_s)), _LONGEST_RETRY_S)
            raise ReaderBehind(self._topic, num_left, retry_after_s) from error

    @property
    def _offsets(self) -> dict[int, int]:
        return {number: mark.offset for number, mark in self._positions.marks.items()}

    def _await_end(self) -> _Awaited:
        awaited = _Awaited()
        with self._awaited_lock:
            self._awaited.append(awaited)
        self._arrivals.touch()
        return awaited

    def _fail_awaited(self) -> None:
        with self._awaited_lock:
            failed, self._awaited = self._awaited, []
        for waiter in failed:
            if waiter.done.set_running_or_notify_cancel():
                waiter.done.set_exception(DependencyUnavailable(self._topic, _RETRY_AFTER_S))

    def _load(self) -> None:
        """Raises EnvironmentFault."""
        self._is_damaged = True
        self._whole_topic = read_whole_topic(self._snapshot)
        positions = read_snapshot(self._snapshot, self._items)
        self._is_damaged = False
        if positions is not None:
            self._positions = positions
            self._knows(Knowledge.SNAPSHOT)
            log.info("items_snapshot_loaded", num_named=self._items.layout.num_named)

    def _knows(self, knowledge: Knowledge) -> None:
        self._items.knowledge = knowledge
        self._on_knowledge(knowledge)

    def _tick(self) -> None:
        """Act on items' times, a tenth of a second after each is due; until then wait, at most a second."""
        while not self._stopped.is_set():
            self._has_times.clear()
            self._items.act_on_time()
            self._has_times.wait(min(max(_TICK_S, self._items.until_next_s()), _LONGEST_TICK_S))

    def _run(self) -> None:
        """Follow until stopped; after any failure of the broker or its records, start again after a moment."""
        is_unavailable = False
        while not self._stopped.is_set():
            try:
                with ExitStack() as clients, broker_as_dependency():
                    admin, consumer = self._open(clients)
                    if self._is_damaged and not self._is_whole(admin):
                        self._load()
                    self._follow(clients, admin, consumer)
                    is_unavailable = False
            except Exception as error:  # noqa: BLE001 - the thread must survive any failure of the client
                self._failure = _reason(error)
                if not is_unavailable:
                    log.warning("items_unavailable", topic=self._topic, error=self._failure)
                if isinstance(error.__cause__, OffsetOutOfRangeError):
                    self._positions = Positions("", {})
                is_unavailable = True
                self._on_unavailable(1)
                self._fail_awaited()
                self._write()
                self._stopped.wait(_RETRY_S)

    def _open(self, clients: ExitStack) -> tuple[Any, Any]:
        admin, consumer = open_reader(
            self._kafka,
            clients,
            fetch_max_wait_ms=_FETCH_WAITS.busy_ms,
            max_poll_records=_MAX_RECORDS,
            reconnect_backoff_max_ms=500,
        )
        if self._makes is not None:
            create_missing(admin, [self._makes])
        return admin, consumer

    def _follow(self, clients: ExitStack, admin: Any, consumer: Any) -> None:
        """Read the partitions from the known positions, until stopped or until the topic is another topic."""
        reader = TopicReader(admin, consumer, [self._topic])
        before = {TopicPartition(self._topic, number): mark for number, mark in self._positions.marks.items()}
        reader.resume({self._topic: self._positions.topic_id}, before)
        topic_id = reader.topic_ids[self._topic]
        if self._is_damaged or not self._items.has_states:
            self._whole_topic = topic_id
        elif topic_id != self._positions.topic_id or reader.num_begun_again:
            self._lose_topic(topic_id)
        reader.num_begun_again = 0
        self._begin_merging(reader)
        log.info("items_followed", topic=self._topic, topic_id=topic_id)
        self._failure = ""
        self._on_unavailable(0)
        checked_s, current = time.monotonic(), self._await_end().done
        pace = FetchPace(consumer, _FETCH_WAITS, self._arrivals.watch())
        clients.callback(pace.close)
        while not self._stopped.is_set():
            awaited = self._begin_awaiting(consumer, reader.places)
            fetched = reader.poll(_POLL_MS, partial(pace.poll, is_urgent=bool(awaited)))
            if reader.num_begun_again:
                reader.num_begun_again, current = 0, self._await_end().done
                self._lose_topic(topic_id)
                self._begin_merging(reader)
            self._take((record for batch in fetched.values() for record in batch), is_behind=not current.done())
            marks = {topic_partition.partition: mark for topic_partition, mark in reader.marks.items()}
            self._positions = Positions(reader.topic_ids[self._topic], marks)
            reached = self._reached(awaited, consumer, is_empty=not fetched)
            if current.done() or any(waiter.done is current for waiter in reached):
                self._end_catch_up()
                self._release(reached)
            now_s = time.monotonic()
            if pace.is_vain or now_s - checked_s >= _CHECK_EVERY_S:
                checked_s = now_s
                if not reader.is_same():
                    self._fail_awaited()
                    return
                self._on_look()
                self._write()
        self._write()

    def _is_whole(self, admin: Any) -> bool:
        """Return whether the topic is known to have all states of the damaged snapshot."""
        (topic,) = admin.describe_topics([self._topic])
        return str(topic["topic_id"]) == self._whole_topic

    def _lose_topic(self, topic_id: str) -> None:
        """Note that the known states are not in the topic."""
        self._whole_topic = ""
        fix = "repeat the changes of the ten seconds before; keep the topic on disk"
        log.warning("items_topic_lost", topic=self._topic, topic_id=topic_id, states="as in the snapshot", fix=fix)

    def _begin_merging(self, reader: TopicReader) -> None:
        offsets = {topic_partition.partition: mark.offset for topic_partition, mark in reader.marks.items()}
        self._merger.begin(reader.topic_ids[self._topic], offsets)

    def _end_catch_up(self) -> None:
        """Apply the deferred states, if this was not done yet: the end of the topic is reached."""
        if self._deferred or self._items.knowledge is not Knowledge.CURRENT:
            self._apply(list(self._deferred.items()))
            self._deferred.clear()
            self._is_damaged = False
            self._knows(Knowledge.CURRENT)

    def _take(self, records: Iterable[Any], *, is_behind: bool) -> None:
        """Apply records.

        Records read again from a topic's beginning (`is_behind`) may be older than the known state.
        """
        changes: list[Change] = []
        pending: dict[str, ItemState | None] = {}
        num_refused = 0

        def state_of(item_id: str) -> ItemState | None:
            if item_id in pending:
                return pending[item_id]
            return self._deferred.get(item_id) or self._items.stated(item_id)

        for record in records:
            try:
                item_id, state = self._change(record, state_of)
                self._deferred.pop(item_id, None)
                pending.pop(item_id, None)
                if is_behind and state is not None and state.available and self._items.hides(item_id):
                    self._deferred[item_id] = state
                else:
                    changes.append((item_id, state))
                    pending[item_id] = state
            except InvalidRequest as error:
                num_refused += 1
                log.warning("item_record_refused", topic=self._topic, offset=record.offset, error=str(error))
        if num_refused:
            self._on_refused(num_refused)
        self._apply(changes)

    def _change(self, record: Any, state_of: Callable[[str], ItemState | None]) -> Change:
        """Return a record's change. Raises InvalidRequest."""
        if isinstance(record, UndecodableBatch):
            raise InvalidRequest("batch", record.why.problem or str(record.why.cause), "send it again")
        return self._merger.change(record, state_of)

    def _apply(self, changes: list[Change]) -> None:
        if changes:
            if num_left_out := self._items.apply(changes):
                self._on_left_out(num_left_out)
                log.warning("item_attributes_left_out", topic=self._topic, num_attributes=num_left_out)
            self._has_changed = True
            self._has_times.set()

    def _begin_awaiting(self, consumer: Any, places: list[TopicPartition]) -> list[_Awaited]:
        """Return the waiting callers, with the ends that they wait for."""
        with self._awaited_lock:
            awaited = list(self._awaited)
        if any(waiter.ends is None for waiter in awaited):
            ends = consumer.end_offsets(places, timeout_ms=REQUEST_MS)
            for waiter in awaited:
                if waiter.ends is None:
                    waiter.ends, waiter.rough = dict(ends), dict.fromkeys(ends, time.monotonic())
        return awaited

    def _reached(self, awaited: list[_Awaited], consumer: Any, *, is_empty: bool) -> list[_Awaited]:
        """Return the callers whose ends are reached.

        The first end of a fetch beyond a rough end replaces it; later records are not awaited. A fetch before the last
        batch may have reported an equal end, so this counts once later fetches brought no record. A rough end counts as
        reached at once after a fetch without records.
        """
        reached, now_s = [], time.monotonic()
        for waiter in awaited:
            ends = waiter.ends or {}
            for topic_partition, since_s in [*waiter.rough.items()]:
                if (fetched_end := consumer.highwater(topic_partition) or 0) > ends[topic_partition]:
                    ends[topic_partition] = int(fetched_end)
                    del waiter.rough[topic_partition]
                elif consumer.position(topic_partition) < ends[topic_partition]:
                    waiter.rough[topic_partition] = now_s
                elif now_s - since_s > _FETCHED_AGAIN_S:
                    del waiter.rough[topic_partition]
            if all(
                consumer.position(topic_partition) >= end and (is_empty or topic_partition not in waiter.rough)
                for topic_partition, end in ends.items()
            ):
                reached.append(waiter)
        return reached

    def _release(self, reached: list[_Awaited]) -> None:
        """Wake these callers, whose records are all applied."""
        for waiter in reached:
            with self._awaited_lock, suppress(ValueError):
                self._awaited.remove(waiter)
            if waiter.done.set_running_or_notify_cancel():
                waiter.done.set_result(None)

    def _write(self) -> None:
        """Write the snapshot if this process writes it and it is due.

        While it reads its first states, other hidden items are unknown, which a snapshot would present as known.
        """
        if self._write_every_s is None or not self._has_changed or self._deferred:
            return
        if self._items.knowledge is Knowledge.NONE:
            return
        if not self._stopped.is_set() and time.monotonic() - self._written_s < self._write_every_s:
            return
        self._written_s = time.monotonic()
        try:
            write_snapshot(self._snapshot, self._items, self._positions, self._whole_topic)
            self._has_changed = False
        except Exception as error:  # noqa: BLE001 - whatever ails the snapshot, the topic is followed
            log.warning("items_snapshot_not_written", path=str(self._snapshot), error=repr(error))


def _reason(error: Exception) -> str:
    if isinstance(error, EnvironmentFault) or (isinstance(error, DependencyUnavailable) and error.__cause__ is None):
        return str(error)
    return getattr(error, "why", "") or repr(error.__cause__ or error)
