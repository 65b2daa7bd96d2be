"""The record batches of a consumer's fetches: an undecodable batch becomes one `UndecodableBatch` record.

kafka-python raises at such a batch, at every poll, and never reads past it. So this module replaces the class with
which its fetcher reads a response. Besides services/settings/broker_log.py this is the only place that uses the
internals of kafka-python's consumer: read in version 3.0.12, tested by tests/unit/settings/test_record_batches.py.

A batch with the right checksum is as the broker stores it. Any other batch may have been damaged on its way here, so it
is fetched again, until its bytes are the same twice or `MAX_FETCHES` is reached; later batches are fetched after that.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from hashlib import blake2b
from typing import Any

from kafka import TopicPartition
from kafka.consumer.fetcher import Fetcher
from kafka.errors import CorruptRecordError
from kafka.record.default_records import DefaultRecordBatch
from kafka.record.legacy_records import LegacyRecordBatch

MAX_FETCHES = 5
"""Fetches after which a batch with a wrong checksum is skipped, even if its bytes differed each time."""
_FRAME = struct.Struct(">qi")
"""The start of every record format: base offset, and the length of the rest."""
_MAGIC_OFFSET = 16
_CURRENT_FORMAT = 2
_MAX_PROBLEM_CHARS = 200


class Cause(StrEnum):
    """The undecodable part of a batch of records."""

    CHECKSUM = "checksum"
    CODEC = "codec"
    FORMAT = "format"
    HEADERS = "headers"


@dataclass(frozen=True, slots=True)
class Undecodable:
    """Why a batch of records cannot be decoded, also in the client's words, and its last offset."""

    cause: Cause
    problem: str
    last_offset: int

    def reason(self, partition: int, offset: int) -> str:
        """Describe it as the reason of a dead letter; `offset` is the first skipped offset of the batch."""
        what = _CAUSES[self.cause] + (f" ({self.problem})" if self.problem else "")
        return f"{self.cause}: {what}; offsets {offset} to {self.last_offset} of partition {partition} are skipped"


_CAUSES = {
    Cause.CHECKSUM: "the batch is not what its producer sent, as its checksum shows at every fetch",
    Cause.CODEC: "the batch cannot be decompressed",
    Cause.FORMAT: "the batch is in no known format",
    Cause.HEADERS: "a header's name is not UTF-8",
}


@dataclass(frozen=True, slots=True)
class UndecodableBatch:
    """An undecodable batch, or its rest: the first missing offset, the cause, and the whole batch's bytes."""

    offset: int
    why: Undecodable
    data: bytes


def step_over_undecodable(consumer: Any) -> None:
    """Have a KafkaConsumer, before its first fetch, return undecodable batches among its records instead of raising."""
    consumer._fetcher.PartitionRecords = partial(_Records, {})


class _WrongChecksum(Exception):
    """A batch's bytes do not match its checksum."""


@dataclass(frozen=True, slots=True)
class _Suspect:
    """A batch that was not confirmed yet: its start, its number of fetches, and the digest of its bytes."""

    offset: int
    num_fetches: int
    digest: bytes


class _Batches:
    """The verified batches in one response's bytes, with the interface of MemoryRecords that the fetcher uses."""

    def __init__(self, data: bytes) -> None:
        self._rest = memoryview(data)
        self._is_first = True
        self.data = self.tail = self._rest
        """The last batch, cut at its length field; and the whole response from the batch's start."""
        self.verified: DefaultRecordBatch | LegacyRecordBatch | None = None
        """The last batch, if its checksum is right: it is as the broker stores it."""

    def next_batch(self) -> DefaultRecordBatch | LegacyRecordBatch | None:
        """Return the next batch; None at the end, where the broker may truncate a batch. Raises any decoding error."""
        is_first, self._is_first = self._is_first, False
        self.data = self.tail = self._rest
        self.verified = None
        length = _FRAME.unpack_from(self._rest)[1] if len(self._rest) >= _FRAME.size else len(self._rest)
        end = _FRAME.size + length
        if not self._rest or (end > len(self._rest) and not is_first):
            return None
        if not _MAGIC_OFFSET < end <= len(self._rest):
            raise CorruptRecordError(f"a length of {length} bytes")
        self.data, self._rest = self._rest[:end], self._rest[end:]
        batch = _parse(self.data)
        if not batch.validate_crc():
            raise _WrongChecksum
        self.verified = batch
        return batch


def _parse(data: memoryview) -> DefaultRecordBatch | LegacyRecordBatch:
    magic = data[_MAGIC_OFFSET]
    if magic > _CURRENT_FORMAT:
        raise CorruptRecordError(f"record format {magic} is unknown")
    return DefaultRecordBatch(data) if magic == _CURRENT_FORMAT else LegacyRecordBatch(data, magic)


class _Records(Fetcher.PartitionRecords):  # type: ignore[misc]
    """The records of one partition in one response.

    `suspects` are the unconfirmed batches of all responses, by partition.
    """

    def __init__(
        self,
        suspects: dict[TopicPartition, _Suspect],
        fetch_offset: int,
        tp: TopicPartition,
        records: Any,
        **options: Any,
    ) -> None:
        self._suspects = suspects
        if not records.has_next():
            records._next_slice = records._buffer  # else the fetcher raises if the first batch's length is wrong
        super().__init__(fetch_offset, tp, records, **options | {"check_crcs": False})  # `_Batches` does

    def _unpack_records(self, tp: TopicPartition, records: Any, *deserializers: Any) -> Iterator[Any]:
        batches = _Batches(records._buffer)
        while self:
            try:
                yield from super()._unpack_records(tp, batches, *deserializers)
            except Exception as error:  # noqa: BLE001 - whatever a decoder raises at such bytes
                batch = self._describe(batches, error)
            else:
                return
            if batches.verified or self._is_confirmed(tp, batch):
                self.next_fetch_offset = batch.why.last_offset + 1
                yield batch
            if not batches.verified:  # where the next batch begins is uncertain
                self.next_fetch_offset = max(self.next_fetch_offset, self.fetch_offset)
                self.drain()

    def _describe(self, batches: _Batches, error: Exception) -> UndecodableBatch:
        first = max(self.fetch_offset, self.next_fetch_offset)
        end = _end(batches.tail, first) if batches.verified or _base(batches.tail) <= first else first + 1
        why = Undecodable(_cause(error, batches), str(error)[:_MAX_PROBLEM_CHARS], end - 1)
        return UndecodableBatch(first, why, bytes(batches.data))

    def _is_confirmed(self, tp: TopicPartition, batch: UndecodableBatch) -> bool:
        """Return whether the batch had the same bytes before or was fetched often enough; otherwise remember it."""
        before = self._suspects.pop(tp, None)
        digest = blake2b(batch.data).digest()
        if before is None or before.offset != batch.offset:
            before = _Suspect(batch.offset, 0, b"")
        if before.digest == digest or before.num_fetches + 1 == MAX_FETCHES:
            return True
        self._suspects[tp] = _Suspect(batch.offset, before.num_fetches + 1, digest)
        return False


def _cause(error: Exception, batches: _Batches) -> Cause:
    if isinstance(error, _WrongChecksum):
        return Cause.CHECKSUM
    if isinstance(error.__context__, UnicodeDecodeError):
        return Cause.HEADERS
    is_compressed = batches.verified is not None and batches.verified.compression_type
    return Cause.CODEC if is_compressed and not isinstance(error, CorruptRecordError) else Cause.FORMAT


def _base(data: memoryview) -> int:
    return int(_FRAME.unpack_from(data)[0]) if len(data) >= _FRAME.size else 0


def _end(data: memoryview, first: int) -> int:
    """Return the offset after a batch by two header fields; the smaller value after `first`, since one may be wrong."""
    header = DefaultRecordBatch.HEADER_STRUCT
    is_old = len(data) > _MAGIC_OFFSET and data[_MAGIC_OFFSET] < _CURRENT_FORMAT
    lengths = [1] if is_old else []  # an old format's base offset is the offset of its last record
    if len(data) >= header.size:
        fields = header.unpack_from(data)
        lengths += [fields[6] + 1, fields[12]]  # last offset delta, number of records
    return min((_base(data) + length for length in lengths if _base(data) + length > first), default=first + 1)
