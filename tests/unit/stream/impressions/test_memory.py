"""The memory of impressions against a list of all impressions."""

from pathlib import Path

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from services.contracts.events import Impression, decode_impression
from services.features.schema import LogPosition
from services.stream.decode import LoggedImpression
from services.stream.impressions.memory import remember
from services.stream.log.kinds import IMPRESSIONS
from services.stream.log.offline_log import OfflineLog

ITEMS = st.lists(st.sampled_from("abcdefgh"), max_size=5)


def logged(offset: int, items: list[str], time_s: int) -> LoggedImpression:
    """Return an impression at this position."""
    impression = Impression(
        request_id=f"r{offset}",
        user_id="u",
        shown_time_ms=time_s * 1_000,
        item_ids=tuple(items),
        tier="llm",
        reason="llm_in_time",
        bundle_version="v",
        newest_event_time_ms=None,
        history_len=0,
        history_digest="0",
    )
    return LoggedImpression(impression, LogPosition("t", 0, offset))


@given(st.lists(st.tuples(ITEMS, st.integers(0, 100)), max_size=12), st.integers(1, 10), st.integers(0, 12))
def test_counts_and_times_are_those_of_all_impressions_since_an_item_was_last_forgotten(
    script: list[tuple[list[str], int]], max_items: int, again: int
) -> None:
    """The most recently shown items are kept, an impression's top last; a redelivery changes nothing."""
    events = [logged(offset, items, time_s) for offset, (items, time_s) in enumerate(script)]
    counts: dict[str, tuple[int, int]] = {}
    for items, time_s in script:
        for item_id in reversed(list(dict.fromkeys(items))):
            num, last_s = counts.pop(item_id, (0, 0))
            counts[item_id] = (num + 1, max(last_s, time_s))
        counts = dict(list(counts.items())[-max_items:])

    row = remember(None, events[:again], max_items)
    row = remember(row, events, max_items)

    remembered = {} if row is None else dict(zip(row.item_ids, zip(row.counts, row.times_s, strict=True), strict=True))
    assert list(remembered.items()) == list(counts.items())
    assert remember(row, events[:again], max_items) is row


def test_an_impression_is_read_as_it_was_written_and_newer_fields_are_left_out() -> None:
    """Unknown fields of a newer gateway are ignored, and fields without a value are not encoded."""
    impression = logged(1, ["a", "b"], 1_800_000_000).impression
    value = impression.encode()

    assert decode_impression(value) == impression
    assert b"null" not in value
    assert decode_impression(value[:-1] + b',"of_tomorrow":"x"}') == impression


def test_every_field_of_an_impression_is_in_the_log(tmp_path: Path) -> None:
    """An impression with every field set is read back from the log unchanged."""
    full = msgspec.structs.replace(
        logged(1, ["a", "b"], 1_800_000_000).impression,
        surface="home",
        name="default",
        variant="x=1",
        positions=(1, 3),
        scores=(0.5, 0.25),
        propensity=(0.5, 1.0),
        elapsed_ms=1.5,
        deadline_ms=200,
        session="5e55",
        features_as_of_us=7,
    )
    log = OfflineLog(tmp_path, kind=IMPRESSIONS)
    log.append([LoggedImpression(decode_impression(full.encode()), LogPosition("t", 0, 1))])

    assert [logged.impression for logged in log.read(0)] == [full]
    named = set(Impression.__struct_fields__) - {"failure"}  # the worker skips records of failed requests
    assert named <= set(IMPRESSIONS.schema.names)
