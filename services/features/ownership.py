"""The owner and the stored position of each log partition: one Redis hash per topic, changed only by two scripts.

    tailrace:partitions                      of the topic of interactions; tailrace:partitions:<topic> of another topic
        <p>:owner, <p>:lease, <p>:until_ms   the process that may write; its lease id is random and new for each process
        <p>:topic_id, <p>:offset             the last record whose effect the rows hold
        <p>:leader_epoch                     that record's leader epoch, if known, and its offset
        <p>:saved                            the topic id and end offset of the records in the offline log
        <p>:whole                            1 while the rows hold base tables and log; requests read no rows without it
        <p>:base, base                       the id of the base tables that the rows began with: as written by the
        partition's
                                             owner, and for all partitions by the pipeline

This is the fence of every write: a script writes rows only while this process holds the lease and the position is the
one that it wrote last, and moves the position in the same step. Redis keeps, replicates and restores steps in order, so
after a store was emptied, failed over or restored, its position is exactly the state of its rows, and the partition's
owner notices at the next write. Time is the store's own, so machines' clocks do not matter. A lease that would last
longer than the maximum dates from before the store's clock was set back, and counts as expired.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from services.errors import OwnershipLost, RowChanged, TailraceError
from services.features.redis_calls import redis_as_dependency
from services.features.schema import LogPosition

if TYPE_CHECKING:
    from redis import Redis

KEY = "tailrace:partitions"
IMPRESSIONS_KEY = "tailrace:partitions:impressions"
LEASE_MS = 3_000
"""How long a partition stays with a process that no longer renews it; shorter than a process takes to start."""
_MAX_ROWS = 200
"""Rows per script: a longer script would block requests."""

_CLAIM = """
local p, lease, owner, lease_ms = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local held = redis.call('HMGET', KEYS[1], p..':lease', p..':until_ms', p..':owner')
local left_ms = tonumber(held[2] or 0) - now_ms
if held[1] and held[1] ~= lease and left_ms > 0 and left_ms <= lease_ms then return {held[3]} end
redis.call('HSET', KEYS[1], p..':lease', lease, p..':owner', owner, p..':until_ms', now_ms + lease_ms)
return redis.call('HMGET', KEYS[1], p..':topic_id', p..':offset', p..':leader_epoch', p..':saved', p..':whole',
  p..':base', 'base')
"""

_UPDATE = """
local p, lease, lease_ms = ARGV[1], ARGV[2], tonumber(ARGV[3])
local seen_topic, seen_offset = ARGV[4], ARGV[5]
local next_argument = 6
local function take() next_argument = next_argument + 1; return ARGV[next_argument - 1] end
if p ~= '' then
    local header = redis.call('HMGET', KEYS[1], p..':lease', p..':topic_id', p..':offset')
    if header[1] ~= lease then return 'lease' end
    if (header[2] or '') ~= seen_topic or (header[3] or '') ~= seen_offset then return 'position' end
end
local header_fields = {}
for _ = 1, tonumber(take()) do table.insert(header_fields, take()) end
local rows = {}
local replaced = {}
for number = 2, #KEYS do
    for _ = 1, tonumber(take()) do
        local field, expected = take(), take()
        if (redis.call('HGET', KEYS[number], field) or '') ~= expected then return 'row' end
    end
    local cells = {}
    replaced[number] = take() == '1'
    for _ = 1, tonumber(take()) do table.insert(cells, take()) end
    rows[number] = cells
end
for number, cells in pairs(rows) do
    if replaced[number] then redis.call('UNLINK', KEYS[number]) end
    if #cells > 0 then redis.call('HSET', KEYS[number], unpack(cells)) end
end
if p ~= '' then
    local time = redis.call('TIME')
    redis.call('HSET', KEYS[1], p..':until_ms', time[1] * 1000 + math.floor(time[2] / 1000) + lease_ms)
    if #header_fields > 0 then redis.call('HSET', KEYS[1], unpack(header_fields)) end
end
return 'done'
"""


def partition_of(user_id: str, num_partitions: int) -> int:
    """Return the partition that holds a user's events: the choice of Kafka's own client for this key."""
    from kafka.partitioner.default import murmur2

    return int(murmur2(user_id.encode()) & 0x7FFFFFFF) % num_partitions


@dataclass(frozen=True, slots=True)
class RowWrite:
    """The write of one hash: `cells`, if each field of `expected` has that value now, empty for an absent field.

    With `is_replaced` all other fields are deleted, and without cells the hash itself.
    """

    key: bytes
    cells: Mapping[bytes, bytes]
    expected: Mapping[bytes, bytes]
    is_replaced: bool = False


@dataclass(frozen=True, slots=True)
class PartitionWrite:
    """The write of one owned partition: rows, the log position that they hold then (None: unchanged), other fields.

    `leader_epoch` belongs to the record at the position; None if unknown.
    """

    partition: int
    rows: Sequence[RowWrite] = ()
    position: LogPosition | None = None
    state: Mapping[str, str | int] = field(default_factory=dict)
    leader_epoch: int | None = None

    @property
    def all_state(self) -> Mapping[str, str | int]:
        """The fields, including the position's."""
        if self.position is None:
            return self.state
        at = self.position
        epoch = "" if self.leader_epoch is None else f"{self.leader_epoch}/{at.offset}"
        return {**self.state, "topic_id": at.topic_id, "offset": at.offset, "leader_epoch": epoch}


@dataclass(frozen=True, slots=True)
class Claim:
    """The state of a partition that this process now owns.

    `position` is None in a store that never held any of its records.
    """

    position: LogPosition | None
    saved: LogPosition | None
    """All records up to it are in the offline log, or did not have to be logged."""
    is_whole: bool
    base_ids: frozenset[str]
    """The id of the base tables whose rows of this partition are all in the store."""
    leader_epoch: int | None = None
    """The leader epoch of the record at the position; None if unknown."""
    is_continued: bool = False
    """Whether the store is where this process wrote last: no other process has applied events since."""


class Partitions:
    """The partitions that this process owns. Used from one thread."""

    def __init__(self, client: "Redis", lease: str, owner: str, key: str = KEY) -> None:
        """Take a connected client.

        `lease` must be unique to this object; `owner` is for display; `key` is the hash of the partitions' topic.
        """
        self._client = client
        self._key = key
        self._lease, self._owner = lease, owner
        self._claim = client.register_script(_CLAIM)
        self._update = client.register_script(_UPDATE)
        self._positions: dict[int, LogPosition | None] = {}

    def position(self, partition: int) -> LogPosition | None:
        """Return the position that this process wrote last."""
        return self._positions[partition]

    @property
    def owned(self) -> tuple[int, ...]:
        """The partitions that this process claimed and does not know to be released or lost."""
        return tuple(self._positions)

    def claim(self, partition: int) -> Claim | None:
        """Claim a partition; None while another process owns it. Raises DependencyUnavailable."""
        with redis_as_dependency():
            reply = self._claim(keys=[self._key], args=[partition, self._lease, self._owner, LEASE_MS])
        if len(reply) == 1:
            return None
        topic_id, offset, epoch, saved, whole, *base_ids = ("" if cell is None else cell.decode() for cell in reply)
        position = LogPosition(topic_id, partition, int(offset)) if topic_id else None
        saved_topic, _, saved_offset = saved.rpartition("/")
        leader_epoch, _, epoch_offset = epoch.partition("/")  # an earlier version moves only the offset
        is_continued = partition in self._positions and self._positions[partition] == position
        self._positions[partition] = position
        return Claim(
            position=position,
            saved=LogPosition(saved_topic, partition, int(saved_offset)) if saved else None,
            is_whole=whole == "1",
            base_ids=frozenset(filter(None, base_ids)),
            leader_epoch=int(leader_epoch) if leader_epoch and epoch_offset == offset else None,
            is_continued=is_continued,
        )

    def write(
        self, partition: int, rows: Sequence[RowWrite] = (), position: LogPosition | None = None, **state: str | int
    ) -> None:
        self.write_all([PartitionWrite(partition, rows, position, state)])

    def write_all(self, writes: Sequence[PartitionWrite]) -> None:
        """Write partitions, each once, and renew their leases, all in one exchange.

        A partition's rows and state are one step (per 200 rows; the state with the last rows). Raises OwnershipLost,
        RowChanged (some rows may have been written, but not the position) or DependencyUnavailable; the other
        partitions are still written.
        """
        for write in writes:
            rest = len(write.rows) - _MAX_ROWS
            for at in range(0, rest, _MAX_ROWS):
                (outcome,) = self._run([PartitionWrite(write.partition, write.rows[at : at + _MAX_ROWS])])
                self._check(write.partition, outcome)
        last = [replace(write, rows=write.rows[(len(write.rows) - 1) // _MAX_ROWS * _MAX_ROWS :]) for write in writes]
        outcomes = self._run(last)
        for write, outcome in zip(last, outcomes, strict=True):
            if outcome == "done" and write.position is not None:
                self._positions[write.partition] = write.position
        for write, outcome in zip(last, outcomes, strict=True):
            self._check(write.partition, outcome)

    def _run(self, writes: Sequence[PartitionWrite]) -> list[str]:
        """Run the update of each write and return the outcomes."""
        for write in writes:
            if write.partition not in self._positions:
                raise OwnershipLost(write.partition, "not claimed")
        if len(writes) == 1:
            return [_run(self._update, self._key, self._fenced(writes[0]), writes[0].rows)]
        with redis_as_dependency():
            return [outcome.decode() for outcome in self._exchange(writes)]

    def _exchange(self, writes: Sequence[PartitionWrite]) -> list[bytes]:
        """Run the updates in one exchange. redis-py by default first asks whether the store has the script."""
        from redis.exceptions import NoScriptError

        def run() -> list[bytes]:
            pipe = self._client.pipeline(transaction=False)
            for write in writes:
                keys, arguments = _arguments(self._key, self._fenced(write), write.rows)
                pipe.evalsha(self._update.sha, len(keys), *keys, *arguments)
            outcomes: list[bytes] = pipe.execute()
            return outcomes

        try:
            return run()
        except NoScriptError:  # a restarted store has lost the script and made no write
            self._client.script_load(_UPDATE)
            return run()

    def _fenced(self, write: PartitionWrite) -> list[Any]:
        """Return the arguments before the rows': the fence, and the fields of the partition."""
        seen, state = self._positions[write.partition], write.all_state
        fence = [write.partition, self._lease, LEASE_MS, *(("", "") if seen is None else (seen.topic_id, seen.offset))]
        fields = [part for name, value in state.items() for part in (f"{write.partition}:{name}", value)]
        return [*fence, len(fields), *fields]

    def _check(self, partition: int, outcome: str) -> None:
        if outcome == "row":
            raise RowChanged("a row was written meanwhile; read it again")
        if outcome != "done":
            del self._positions[partition]
            raise OwnershipLost(
                partition,
                "the lease is not ours" if outcome == "lease" else "the store is not at the position written last",
            )

    def release(self) -> None:
        """Release all partitions at once. Raises nothing: a lease that cannot be released expires."""
        with suppress(TailraceError):
            for partition in self.owned:
                self.write(partition, until_ms=0)
        self._positions.clear()


def whole_field(user_id: str, num_partitions: int) -> str:
    """Return the field of KEY that is 1 while the store holds all rows of a user's partition."""
    return f"{partition_of(user_id, num_partitions)}:whole"


def mark_base(client: "Redis", base_id: str) -> None:
    """Record that the store has all rows of these base tables. Raises DependencyUnavailable."""
    with redis_as_dependency():
        client.hset(KEY, "base", base_id)


def write_unowned(client: "Redis", rows: Sequence[RowWrite]) -> None:
    """Write rows without an owner if they are as expected.

    Raises RowChanged (some may have been written) or DependencyUnavailable.
    """
    update = client.register_script(_UPDATE)
    for at in range(0, len(rows), _MAX_ROWS):
        if _run(update, KEY, ["", "", LEASE_MS, "", "", 0], rows[at : at + _MAX_ROWS]) == "row":
            raise RowChanged("a row was written meanwhile; read it again")


def _run(script: Any, key: str, arguments: Sequence[Any], rows: Sequence[RowWrite]) -> str:
    """Run the update of these rows and return its outcome. Raises DependencyUnavailable."""
    with redis_as_dependency():
        outcome: bytes = script(*_arguments(key, arguments, rows))
    return outcome.decode()


def _arguments(key: str, before: Sequence[Any], rows: Sequence[RowWrite]) -> tuple[list[Any], list[Any]]:
    """Return the script's keys and arguments: first the given ones, then each row's."""
    given = list(before)
    for row in rows:
        given += [len(row.expected), *(part for pair in row.expected.items() for part in pair)]
        given += [int(row.is_replaced), 2 * len(row.cells), *(part for pair in row.cells.items() for part in pair)]
    return [key, *(row.key for row in rows)], given
