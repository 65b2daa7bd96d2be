"""Batches that cannot be decoded, as kafka-python's fetcher reads them from a broker's response."""

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
"""The base offset is outside of a batch's checksum, which is made before the broker chooses it."""


def batch(first: int, num_records: int, codec: str = "none", header: str = "h") -> bytes:
    """Build a batch of records whose values are their offsets, in the present format."""
    builder = MemoryRecordsBuilder(2, CODECS[codec], batch_size=1 << 20)
    for offset in range(first, first + num_records):
        builder.append(1, b"key", str(offset).encode(), [(header, b"x" * 30)])
    builder.close()
    made = bytearray(builder.buffer())
    struct.pack_into(">q", made, 0, first)
    return bytes(made)


def altered(data: bytes, at: int, value: int) -> bytes:
    """Return the batch with other bytes at one place, and with the checksum of these."""
    changed = bytearray(data)
    changed[at] = value
    struct.pack_into(">I", changed, 17, calc_crc32c(memoryview(changed)[21:]))
    return bytes(changed)


@dataclass
class Partition:
    """A partition's batches at a broker, each with its offsets, and a consumer that fetches them over a wire that may change bytes."""

    batches: list[tuple[range, bytes]]
    wire: Callable[[int, bytes], bytes] = lambda _number, data: data
    """Changes a batch, by its number, on its way."""
    num_fetches: int = 0
    _fetcher: Any = field(default_factory=lambda: type("Fetcher", (), {})())

    def read(self, start: int = 0) -> list[int | UndecodableBatch]:
        """Return offsets and undecodable batches from an offset to the end, in the order in which they come."""
        step_over_undecodable(self)
        return list(self._read(start))

    def _read(self, at: int) -> Iterator[int | UndecodableBatch]:
        while at < self.batches[-1][0].stop:
            self.num_fetches += 1
            assert self.num_fetches < 100, "no progress"
            records = self._fetcher.PartitionRecords(at, PLACE, MemoryRecords(self._response(at)))
            while records:
                yield from (one if isinstance(one, UndecodableBatch) else one.offset for one in records.take(3))
                at = records.next_fetch_offset

    def _response(self, at: int) -> bytes:
        """Return the batches from an offset on; the last one is cut off, as brokers do."""
        wanted = [(number, data) for number, (offsets, data) in enumerate(self.batches) if offsets.stop > at]
        sent = b"".join(self.wire(number, data) for number, data in wanted)
        return sent if len(wanted) == 1 else sent[:-10]


def partition(*batches: bytes) -> Partition:
    """Build a partition of batches in order, each of its number of records."""
    placed = []
    for data in batches:
        first, num_records = struct.unpack_from(">q", data)[0], struct.unpack_from(">i", data, 57)[0]
        placed.append((range(first, first + num_records), data))
    return Partition(placed)


def split(found: list[int | UndecodableBatch]) -> tuple[list[int], list[int], list[UndecodableBatch]]:
    """Return the offsets read, those left out, and the batches that they were in."""
    dead = [one for one in found if isinstance(one, UndecodableBatch)]
    left_out = [offset for one in dead for offset in range(one.offset, one.why.last_offset + 1)]
    return [one for one in found if isinstance(one, int)], left_out, dead


def test_the_fetcher_is_the_one_that_was_read() -> None:
    """`record_batches` replaces a class inside of kafka-python: with another version, read its fetcher again, then change this line."""
    assert kafka.__version__ == "3.0.12"


@pytest.mark.parametrize("codec", CODECS)
def test_every_codec_is_read(codec: str) -> None:
    """What producers compress, and brokers with `compression.type`, is decoded."""
    assert partition(batch(0, 5, codec), batch(5, 5, codec)).read() == list(range(10))


@pytest.mark.parametrize(
    ("middle", "cause", "left_out"),
    [
        (altered(batch(5, 5), 22, 7), Cause.CODEC, range(5, 10)),  # a codec that nobody knows
        (altered(batch(5, 5, "zstd"), 70, 0), Cause.CODEC, range(5, 10)),
        (altered(batch(5, 5, "lz4"), 62, 0), Cause.CODEC, range(5, 10)),
        (altered(batch(5, 5, "snappy"), 62, 255), Cause.CODEC, range(5, 10)),
        (altered(batch(5, 5, "gzip"), 61, 0), Cause.CODEC, range(5, 10)),
        (altered(batch(5, 5), 61, 1), Cause.FORMAT, range(5, 10)),  # a record's length
        (altered(batch(5, 5), 16, 3), Cause.FORMAT, range(5, 10)),  # a format to come
        (altered(batch(5, 5, header="é"), -1 - 30 - 2, 65), Cause.HEADERS, range(9, 10)),
    ],
    ids=["codec", "zstd", "lz4", "snappy", "gzip", "length", "magic", "header"],
)
def test_a_batch_that_cannot_be_decoded_is_stepped_over(middle: bytes, cause: Cause, left_out: range) -> None:
    """It comes once, with its offsets, its cause and its bytes; the records before and behind it are read."""
    read, missing, dead = split(partition(batch(0, 5), middle, batch(10, 5)).read())

    assert [one.why.cause for one in dead] == [cause]
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
    """Whichever it is, header included, and wherever reading begins: every record of the other batches is read once, in order."""
    whole = partition(*(batch(first, 5, codec) for first in (0, 5, 10)))
    whole.wire = lambda n, data: flipped(data, at, mask) if n == number else data

    read, left_out, dead = split(whole.read(start))

    assert sorted(read + left_out) == list(range(start, 15))
    assert read == sorted(read)
    assert {offset // 5 for offset in left_out} <= {number}
    assert len(dead) <= 2


@given(**CHANGED_BYTE)
def test_a_byte_changed_on_the_way_costs_nothing(number: int, at: int, mask: int, codec: str, start: int) -> None:
    """The batch is fetched again, and is right then."""
    whole = partition(*(batch(first, 5, codec) for first in (0, 5, 10)))
    whole.wire = lambda n, data: flipped(data, at, mask) if (n, whole.num_fetches) == (number, 1) else data

    assert whole.read(start) == list(range(start, 15))


def test_a_wire_that_changes_every_fetch_is_believed_in_the_end() -> None:
    """While the bytes differ they are fetched again, but not for ever."""
    whole = partition(batch(0, 5), batch(5, 5))
    whole.wire = lambda n, data: flipped(data, 70 + whole.num_fetches, 1) if n == 0 else data

    read, left_out, _ = split(whole.read())

    assert (read, left_out) == ([5, 6, 7, 8, 9], [0, 1, 2, 3, 4])
    assert whole.num_fetches == MAX_FETCHES + 1


def flipped(data: bytes, at: int, mask: int) -> bytes:
    """Return the batch with some bits of one byte changed."""
    at = min(at, len(data) - 1)
    return data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :]
