"""Which records can be applied."""

import json
from dataclasses import replace

import msgspec
import pytest

from services.contracts.events import Interaction
from services.contracts.message import MAX_ID_CHARS
from services.errors import InvalidRequest
from services.features.ownership import partition_of
from services.features.schema import LogPosition
from services.settings.record_batches import Cause, Undecodable
from services.stream.decode import (
    MAX_HEADERS_BYTES,
    MAX_VALUE_BYTES,
    Misplaced,
    Record,
    decode,
    read_impression,
)
from services.stream.log.kinds import IMPRESSIONS

NOW_MS = 1_795_262_400_000
YEAR_2099_MS = 4_070_908_800_000


def record(value: bytes | None, key: bytes | None = b"u", offset: int = 0) -> Record:
    return Record(LogPosition("t", 0, offset), key, value, NOW_MS)


def value(**changes: object) -> bytes:
    """Return a readable value with some fields changed."""
    fields = {"event_id": "e", "user_id": "u", "item_id": "i", "event_time_ms": NOW_MS}
    return json.dumps(fields | changes).encode()


def erasure(accepted_time_ms: object = NOW_MS) -> bytes:
    return json.dumps({"erasure_id": "x", "user_id": "u", "accepted_time_ms": accepted_time_ms}).encode()


def test_a_readable_record_becomes_an_event() -> None:
    """An encoded interaction is decoded, with its position in the log."""
    interaction = Interaction(event_id="e", user_id="ü", item_id="i", event_time_ms=NOW_MS)

    decoded = decode([record(interaction.encode(), interaction.key, offset=5)], 1, NOW_MS)

    (good,) = decoded.events
    assert good.interaction == interaction
    assert good.event.position == LogPosition("t", 0, 5)
    assert good.event.event_time_us == NOW_MS * 1_000
    assert decoded.dead == decoded.misplaced == []


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (record(None), "value"),
        (record(b'{"event_time_ms":' + b"9" * 5_000 + b"}"), "JSON"),
        (record(value(user_id="other")), "key"),
        (record(value(), key=None), "key"),
        (record(value(event_time_ms=NOW_MS + 3_600_000)), "event_time_ms"),
        (replace(record(value(event_time_ms=YEAR_2099_MS)), timestamp_ms=YEAR_2099_MS), "the worker's clock"),
        (record(value(event_time_ms=NOW_MS // 1_000)), "looks like seconds"),
        (record(value(event_time_ms=NOW_MS / 1_000 + 0.5)), "not an integer"),
        (record(value(accepted_time_ms=10**30)), "accepted_time_ms"),
        (record(value(accepted_time_ms=-1)), "accepted_time_ms"),
        (record(value(accepted_time_ms=NOW_MS // 1_000)), "accepted_time_ms"),
        (record(value(accepted_time_ms=YEAR_2099_MS)), "accepted_time_ms"),
        *(
            (record(erasure(bad)), "accepted_time_ms")
            for bad in (
                *(None, True, "0", 0, -1, 0.5, NOW_MS / 1_000, NOW_MS // 1_000, NOW_MS * 1_000, 2**63, 10**400),
                *(YEAR_2099_MS, NOW_MS - 31 * 86_400_000),
            )
        ),
        (record(value() + b" " * MAX_VALUE_BYTES), "value"),
        (replace(record(value()), headers_bytes=MAX_HEADERS_BYTES + 1), "headers"),
    ],
)
def test_what_cannot_be_applied_is_a_dead_letter_with_a_reason(bad: Record, words: str) -> None:
    """Each kind of bad record becomes a dead letter with a reason, and its neighbours are kept."""
    decoded = decode([record(value()), bad, record(value())], 1, NOW_MS)

    (letter,) = decoded.dead
    assert len(decoded.events) == 2
    assert letter.record is bad
    assert words in letter.reason


def impression(**changes: object) -> bytes:
    """Return an impression's value with some fields changed."""
    fields = {"request_id": "r", "user_id": "u", "shown_time_ms": NOW_MS, "item_ids": ["a", "b"], "tier": "llm"}
    shown = {"reason": "asked", "bundle_version": "v", "history_len": 1, "history_digest": "d"}
    return json.dumps(fields | shown | changes).encode()


@pytest.mark.parametrize(
    "changes",
    [
        *({"shown_time_ms": bad} for bad in (0, -1, NOW_MS // 1_000, NOW_MS * 1_000, 2**63, YEAR_2099_MS, True)),
        *({"positions": [1, bad]} for bad in (0, -1, 2**31, 2**63, 10**30, 1.5)),
        *({name: bad} for name in ("history_len", "deadline_ms", "features_as_of_us") for bad in (-1, 2**63, 10**30)),
        *({"propensity": [0.5, bad]} for bad in (-0.1, 1.1, float("nan"))),
    ],
    ids=str,
)
def test_an_impression_with_an_impossible_number_is_refused(changes: dict[str, object]) -> None:
    """The error names the field; the unchanged impression is read and fits the log's columns."""
    good = read_impression(record(impression()), NOW_MS)

    with pytest.raises(InvalidRequest) as refused:
        read_impression(record(impression(**changes)), NOW_MS)

    assert refused.value.field.split("[")[0].split(".")[0] in changes
    assert IMPRESSIONS.table([good]).num_rows == 1


def test_a_record_on_another_users_partition_is_sent_on_once() -> None:
    """CRC32 partitioning puts user u on 0 of 4 partitions, Kafka on 3; a second misplacement is a dead letter."""
    foreign = record(value())

    decoded = decode([foreign, replace(foreign, is_rerouted=True)], 4, NOW_MS)

    assert decoded.events == []
    assert decoded.misplaced == [Misplaced(foreign, partition_of("u", 4))]
    assert [letter.reason.split(":")[0] for letter in decoded.dead] == ["partition"]


def test_a_batch_that_cannot_be_decoded_is_one_dead_letter_that_names_it() -> None:
    """The reason has cause, partition and both offsets, and the position is the last offset."""
    batch = replace(record(b"\x00"), undecodable=Undecodable(Cause.CODEC, "unknown codec 7", 9))

    (letter,) = decode([batch], 4, NOW_MS).dead

    assert letter.reason.startswith("codec: ")
    assert "unknown codec 7" in letter.reason
    assert "offsets 0 to 9 of partition 0" in letter.reason
    assert batch.last_position == LogPosition("t", 0, 9)


def test_the_largest_event_is_within_the_bound() -> None:
    """The largest event has ids of maximal length in JSON's longest form."""
    name = "\U0001f600" * MAX_ID_CHARS
    event = Interaction(
        event_id=name, user_id=name, item_id=name, event_type=name, request_id=name, event_time_ms=NOW_MS
    )
    longest = json.dumps(
        {field: given for field, given in msgspec.structs.asdict(event).items() if given is not None}, indent=8
    )

    assert decode([replace(record(longest.encode()), key=event.key)], 1, NOW_MS).dead == []
    assert len(longest) > MAX_VALUE_BYTES / 5
