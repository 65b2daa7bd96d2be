"""The erasure ledger, and the offline log that applies it, against a list of sent records."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.contracts.erasure import Erasure
from services.contracts.events import Impression, Interaction
from services.contracts.tenant import scoped
from services.features.schema import BASE_TOPIC, LogPosition
from services.stream.decode import LoggedErasure, LoggedImpression, LoggedInteraction
from services.stream.log.kinds import IMPRESSIONS
from services.stream.log.ledger import ErasureLedger
from services.stream.log.offline_log import OfflineLog

USERS = ("ann", "bob", "cyd")


def logged(user_id: str, offset: int, topic_id: str = "t") -> LoggedInteraction:
    """Return an event at this position."""
    event = Interaction(event_id=f"{topic_id}{offset}", user_id=user_id, item_id="i", event_time_ms=1_700_000_000_000)
    return LoggedInteraction(event, LogPosition(topic_id, 0, offset))


def erased(user_id: str, offset: int, topic_id: str = "t", accepted_ms: int = 1_000) -> LoggedErasure:
    """Return an erasure at this position."""
    erasure = Erasure(erasure_id=f"x{topic_id}{offset}", user_id=user_id, accepted_time_ms=accepted_ms)
    return LoggedErasure(erasure, LogPosition(topic_id, 0, offset))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(USERS), st.integers(0, 9), st.booleans()), max_size=60),
    st.integers(1, 9),
)
def test_the_log_is_what_came_after_each_users_last_erasure(script: list[tuple[str, int, bool]], size: int) -> None:
    """For any order of records, topics and batches, reads, merges and files on disk have the same events."""
    with TemporaryDirectory() as folder:
        log = OfflineLog(Path(folder))
        left: list[tuple[str, str]] = []
        for at in range(0, len(script), size):
            topic_id = f"t{at // max(1, 2 * size)}"
            batch: list[LoggedInteraction] = []
            for offset, (user_id, number, ends) in enumerate(script[at : at + size], at):
                if number < 2:
                    log.ledger.append([erased(user_id, offset, topic_id)], log.topic_ids(0))
                    left = [row for row in left if row[0] != user_id]
                else:
                    batch.append(logged(user_id, offset, topic_id))
                    left.append((user_id, f"{topic_id}{offset}"))
                if ends:
                    log.append(batch)
                    batch = []
            log.append(batch)
            log.compact(0, 1e10)
        read = [(logged.interaction.user_id, logged.interaction.event_id) for logged in log.read(0)]

        assert read == left
        assert log.erase(0).is_clean
        assert [
            (logged.interaction.user_id, logged.interaction.event_id) for logged in OfflineLog(Path(folder)).read(0)
        ] == left
        assert log.erase(0).num_rewritten == 0


def test_a_tenants_visitors_are_erased_and_no_other_tenants(tmp_path: Path) -> None:
    """Of rows without a user, the model name says whose visitor was shown them; later rows and users' rows stay."""
    rows = [("acme.fr", None, 1), ("eu-acme.fr", None, 1), ("fr", None, 1), (None, None, 1), ("acme.fr", "ann", 1)]
    rows.append(("acme.fr", None, 2_000))
    log = OfflineLog(tmp_path, kind=IMPRESSIONS)
    log.append([shown(name, user_id, offset, time_ms) for offset, (name, user_id, time_ms) in enumerate(rows)])
    end = Erasure(erasure_id="x", user_id=scoped("acme", "end"), accepted_time_ms=1_000, is_of_visitors=True)
    log.ledger.append([LoggedErasure(end, LogPosition("t", 0, 0))], ["t"])
    left = [(logged.impression.name, logged.impression.user_id) for logged in log.read(0)]

    assert left == [row[:2] for row in rows[1:]]
    assert log.erase(0).num_rewritten == 1
    assert pq.read_table(next(tmp_path.rglob("t/*/*.parquet")))["name"].to_pylist() == [name for name, _ in left]


def shown(name: str | None, user_id: str | None, offset: int, time_ms: int) -> LoggedImpression:
    """Return an impression at this position and time."""
    impression = Impression(
        request_id=f"r{offset}",
        user_id=user_id,
        shown_time_ms=time_ms,
        item_ids=("i",),
        tier="student",
        reason="short_history",
        bundle_version="v1",
        newest_event_time_ms=None,
        history_len=0,
        history_digest="0",
        name=name,
    )
    return LoggedImpression(impression, LogPosition("t", 0, offset))


def test_an_erasure_is_in_the_ledger_once_and_names_nobody_when_it_is_done(tmp_path: Path) -> None:
    """Redelivery adds no entry, processes agree, and the file has the user id only until the erasure is done."""
    ledger = ErasureLedger(tmp_path)
    for _ in range(2):
        ledger.append([erased("ann", 3), erased("bob", 4)], ["old", "t"])
    other = ErasureLedger(tmp_path)
    before = other.tombstones(0)
    other.close(0, ["xt3"], 9_000)
    after = ledger.tombstones(0)

    assert [tombstone.user_id for tombstone in before] == ["ann", "bob"]
    assert [(tombstone.user_id, tombstone.done_time_ms) for tombstone in after] == [(None, 9_000), ("bob", None)]
    assert b"ann" not in (tmp_path / "erasures" / "partition=0.parquet").read_bytes()
    assert ledger.everybody().covers("ann", LogPosition("old", 0, 10**9))
    assert ledger.erased(0).covers("ann", LogPosition("t", 0, 3))
    assert not ledger.erased(0).covers("ann", LogPosition("t", 0, 4))
    assert not ledger.erased(0).covers("cyd", LogPosition("t", 0, 0))


def test_what_has_no_place_in_the_log_goes_by_its_time(tmp_path: Path) -> None:
    """Impressions and base rows up to the time of acceptance are covered."""
    ledger = ErasureLedger(tmp_path)
    ledger.append([erased("ann", 3, accepted_ms=5_000)], [])
    erasures = ledger.erased(0)

    assert [erasures.covers_time("ann", at_ms) for at_ms in (4_999, 5_000, 5_001)] == [True, True, False]
    assert not erasures.covers_time(None, 0)
    assert erasures.covers_row("ann", LogPosition(BASE_TOPIC, 0, 7), 5_000_999)
    assert not erasures.covers_row("ann", LogPosition(BASE_TOPIC, 0, 7), 5_001_000)


def test_a_ledger_that_cannot_be_read_stops_its_readers(tmp_path: Path) -> None:
    """Reading without the ledger would restore erased users."""
    log = OfflineLog(tmp_path)
    log.append([logged("ann", 1)])
    log.ledger.append([erased("ann", 2)], log.topic_ids(0))
    path = tmp_path / "erasures" / "partition=0.parquet"
    path.write_bytes(b"no table")

    with pytest.raises(OSError, match="partition=0"):
        list(OfflineLog(tmp_path).read(0))
    assert path.exists()


def test_a_file_keeps_its_name_and_time_and_what_a_crash_left_is_removed(tmp_path: Path) -> None:
    """File names, times and positions stay; a fresh scratch file is kept and makes the pass incomplete."""
    log = OfflineLog(tmp_path, wall_clock=lambda: 1e10)
    log.append([logged("ann", 1), logged("bob", 2)])
    log.append([logged("ann", 3)])
    before = {path.name: path.stat().st_mtime for path in tmp_path.rglob("0*.parquet")}
    log.ledger.append([erased("ann", 4)], log.topic_ids(0))
    scratch = next(tmp_path.rglob("0*.parquet")).with_suffix(".7.tmp")
    scratch.write_bytes(b"ann")

    done = log.erase(0)
    log.forget()

    assert (done.num_rewritten, done.is_clean, scratch.exists()) == (2, True, False)
    assert {path.name: path.stat().st_mtime for path in tmp_path.rglob("0*.parquet")} == before
    assert log.last_offset("t", 0) == 3
    scratch.write_bytes(b"ann")
    assert not OfflineLog(tmp_path).erase(0).is_clean
