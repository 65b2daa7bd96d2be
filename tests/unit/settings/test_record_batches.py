"""Undecodable batches, as kafka-python's fetcher reads them from a broker's response."""

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import kafka
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka import TopicPartition
from kafka.record import MemoryRecords, MemoryRecordsBuilder
from kafka.record.util import calc_crc32c

from services.settings.record_batches import MAX_FETCHES, Cause, UndecodableBatch, step_over_undecodable

PLACE = TopicPartition("interactions", 0)
CODECS = {"none": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}
UNPROTECTED = range(8)
"""The base offset is not covered by a batch's checksum, since the broker assigns it later."""


def batch(first: int, num_records: int, codec: str = "none", header: str = "h") -> bytes:
    """Return a batch of records, in the current format, whose values are their offsets."""
    builder = MemoryRecordsBuilder(2, CODECS[codec], batch_size=1 << 20)
    for offset in range(first, first + num_records):
        builder.append(1, b"key", str(offset).encode(), [(header, b"x" * 30)])
    builder.close()
    made = bytearray(builder.buffer())
    struct.pack_into(">q", made, 0, first)
    return bytes(made)


def altered(data: bytes, at: int, value: int) -> bytes:
    """Return the batch with one byte changed and a matching checksum."""
    changed = bytearray(data)
    changed[at] = value
    struct.pack_into(">I", changed, 17, calc_crc32c(memoryview(changed)[21:]))
    return bytes(changed)


@dataclass
class Partition:
    """A partition's batches with their offsets, and a consumer that fetches them over a wire that may change bytes."""

    batches: list[tuple[range, bytes]]
    wire: Callable[[int, bytes], bytes] = lambda _number, data: data
    """Changes a batch, given its number, in transit."""
    num_fetches: int = 0
    _fetcher: Any = field(default_factory=lambda: type("Fetcher", (), {})())

    def read(self, start: int = 0) -> list[int | UndecodableBatch]:
        """Return offsets and undecodable batches from an offset to the end, in order."""
        step_over_undecodable(self)
        return list(self._read(start))

    def _read(self, at: int) -> Iterator[int | UndecodableBatch]:
        while at < self.batches[-1][0].stop:
            self.num_fetches += 1
            assert self.num_fetches < 100, "no progress"
            records = self._fetcher.PartitionRecords(at, PLACE, MemoryRecords(self._response(at)))
            while records:
                yield from (
                    record if isinstance(record, UndecodableBatch) else record.offset for record in records.take(3)
                )
                at = records.next_fetch_offset

    def _response(self, at: int) -> bytes:
        """Return the batches from an offset on; the last batch is truncated, as brokers do."""
        wanted = [(number, data) for number, (offsets, data) in enumerate(self.batches) if offsets.stop > at]
        sent = b"".join(self.wire(number, data) for number, data in wanted)
        return sent if len(wanted) == 1 else sent[:-10]


def partition(*batches: bytes) -> Partition:
    """Build a partition of batches in order; each batch has its own number of records."""
    placed = []
    for data in batches:
        first, num_records = struct.unpack_from(">q", data)[0], struct.unpack_from(">i", data, 57)[0]
        placed.append((range(first, first + num_records), data))
    return Partition(placed)


def split(entries: list[int | UndecodableBatch]) -> tuple[list[int], list[int], list[UndecodableBatch]]:
    """Return the offsets read, the skipped offsets, and the batches of the skipped offsets."""
    dead = [entry for entry in entries if isinstance(entry, UndecodableBatch)]
    left_out = [offset for batch in dead for offset in range(batch.offset, batch.why.last_offset + 1)]
    return [entry for entry in entries if isinstance(entry, int)], left_out, dead


def test_the_fetcher_is_the_one_that_was_read() -> None:
    """`record_batches` replaces a kafka-python class: check the fetcher of a new version before changing this line."""
    assert kafka.__version__ == "3.0.12"


@pytest.mark.parametrize("codec", CODECS)
def test_every_codec_is_read(codec: str) -> None:
    """Batches compressed by producers, or by brokers with `compression.type`, are decoded."""
    assert partition(batch(0, 5, codec), batch(5, 5, codec)).read() == list(range(10))


@pytest.mark.parametrize(
    ("middle", "cause", "left_out"),
    [
        (altered(batch(5, 5), 22, 7), Cause.CODEC, range(5, 10)),  # an unknown codec
        (altered(batch(5, 5, "zstd"), 70, 0), Cause.CODEC, range(5, 10)),
        (altered(batch(5, 5, "lz4"), 62, 0), Cause.CODEC, range(5, 10)),
        (altered(batch(5, 5, "snappy"), 62, 255), Cause.CODEC, range(5, 10)),
        (altered(batch(5, 5, "gzip"), 61, 0), Cause.CODEC, range(5, 10)),
        (altered(batch(5, 5), 61, 1), Cause.FORMAT, range(5, 10)),  # a record's length
        (altered(batch(5, 5), 16, 3), Cause.FORMAT, range(5, 10)),  # a future format
        (altered(batch(5, 5, header="é"), -1 - 30 - 2, 65), Cause.HEADERS, range(9, 10)),
    ],
    ids=["codec", "zstd", "lz4", "snappy", "gzip", "length", "magic", "header"],
)
def test_a_batch_that_cannot_be_decoded_is_stepped_over(middle: bytes, cause: Cause, left_out: range) -> None:
    """The batch is reported once with offsets, cause and bytes; the records before and after it are read."""
    read, missing, dead = split(partition(batch(0, 5), middle, batch(10, 5)).read())

    assert [batch.why.cause for batch in dead] == [cause]
    assert dead[0].data == middle
    assert missing == list(left_out)
    assert read == [offset for offset in range(15) if offset not in left_out]


CHANGED_BYTE = {
    "number": st.integers(0, 2),
    "at": st.integers(UNPROTECTED.stop, 200),
    "mask": st.integers(1, 255),
    "codec": st.sampled_from([*CODECS]),
    "start": st.integers(0, 9),
}


@given(**CHANGED_BYTE)
def test_a_byte_changed_on_the_brokers_disk_costs_its_batch_alone(
    number: int, at: int, mask: int, codec: str, start: int
) -> None:
    """For any changed byte, header included, and any start, all records of other batches are read once, in order."""
    whole = partition(*(batch(first, 5, codec) for first in (0, 5, 10)))
    whole.wire = lambda n, data: flipped(data, at, mask) if n == number else data

    read, left_out, dead = split(whole.read(start))

    assert sorted(read + left_out) == list(range(start, 15))
    assert read == sorted(read)
    assert {offset // 5 for offset in left_out} <= {number}
    assert len(dead) <= 2


@given(**CHANGED_BYTE)
def test_a_byte_changed_on_the_way_costs_nothing(number: int, at: int, mask: int, codec: str, start: int) -> None:
    """The batch is fetched again and is intact then."""
    whole = partition(*(batch(first, 5, codec) for first in (0, 5, 10)))
    whole.wire = lambda n, data: flipped(data, at, mask) if (n, whole.num_fetches) == (number, 1) else data

    assert whole.read(start) == list(range(start, 15))


def test_a_wire_that_changes_every_fetch_is_believed_in_the_end() -> None:
    """Differing bytes are fetched again up to MAX_FETCHES times."""
    whole = partition(batch(0, 5), batch(5, 5))
    whole.wire = lambda n, data: flipped(data, 70 + whole.num_fetches, 1) if n == 0 else data

    read, left_out, _ = split(whole.read())

    assert (read, left_out) == ([5, 6, 7, 8, 9], [0, 1, 2, 3, 4])
    assert whole.num_fetches == MAX_FETCHES + 1


def flipped(data: bytes, at: int, mask: int) -> bytes:
    """Return the batch with some bits of one byte flipped."""
    at = min(at, len(data) - 1)
    return data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :]
