"""Raw events on disk. Run: pytest tests/unit/stream/test_offline_log.py."""

import errno
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from services.contracts.events import Interaction
from services.features.schema import LogPosition
from services.stream.decode import LoggedInteraction
from services.stream.offline_log import OfflineLog


def events(first: int, last: int, topic: str = "t", partition: int = 0) -> list[LoggedInteraction]:
    """Build the events of an offset range, both ends included."""
    return [
        LoggedInteraction(
            Interaction(
                event_id=f"{topic}{offset}", user_id="u", item_id="i", event_time_ms=offset, accepted_time_ms=None
            ),
            LogPosition(topic, partition, offset),
        )
        for offset in range(first, last + 1)
    ]


def names(root: Path) -> list[str]:
    """List all files of the log, relative to its folder."""
    return sorted(
        str(path.relative_to(root / "interactions")) for path in (root / "interactions").rglob("*") if path.is_file()
    )


def test_what_was_appended_is_read_back(tmp_path: Path) -> None:
    """Events come back whole and in order, from a log opened anew."""
    log = OfflineLog(tmp_path)
    log.append(events(0, 4))
    log.append(events(5, 6))

    assert list(OfflineLog(tmp_path).read(0)) == events(0, 6)
    assert OfflineLog(tmp_path).last_offset("t", 0) == 6
    assert OfflineLog(tmp_path).last_offset("other", 0) is None


def test_a_replay_writes_only_what_is_missing(tmp_path: Path) -> None:
    """After a crash between log and commit the range comes again, longer: files never overlap."""
    OfflineLog(tmp_path).append(events(0, 4))
    log = OfflineLog(tmp_path)
    log.append(events(2, 7))
    log.append(events(0, 7))

    assert [name.rsplit("/", 1)[1] for name in names(tmp_path)] == [
        f"{0:020d}-{4:020d}.parquet",
        f"{5:020d}-{7:020d}.parquet",
    ]
    assert list(log.read(0)) == events(0, 7)


def test_the_same_range_gives_the_same_bytes(tmp_path: Path) -> None:
    """A file is a function of its range."""
    for name in ("one", "two"):
        OfflineLog(tmp_path / name).append(events(3, 9))

    one, two = (next((tmp_path / name).rglob("*.parquet")) for name in ("one", "two"))

    assert one.name == two.name
    assert one.read_bytes() == two.read_bytes()


def test_a_topic_made_anew_is_kept_apart(tmp_path: Path) -> None:
    """Offsets of two lives of a topic do not meet; both are read, the first life first."""
    log = OfflineLog(tmp_path)
    log.append(events(0, 2, topic="zz"))
    log.append(events(0, 1, topic="aa"))

    assert list(log.read(0)) == events(0, 2, topic="zz") + events(0, 1, topic="aa")


def test_readers_drop_positions_that_overlapping_files_repeat(tmp_path: Path) -> None:
    """Should two writers ever have met, each position still counts once."""
    OfflineLog(tmp_path).append(events(0, 4))
    OfflineLog(tmp_path / "other").append(events(3, 6))
    stray = next((tmp_path / "other").rglob("*.parquet"))
    stray.rename(tmp_path / "interactions" / "partition=0" / "t" / stray.name)

    assert list(OfflineLog(tmp_path).read(0)) == events(0, 6)


def test_no_scratch_file_is_left_or_read(tmp_path: Path) -> None:
    """A file that a crash left half written is no part of the log."""
    log = OfflineLog(tmp_path)
    log.append(events(0, 1))
    (tmp_path / "interactions" / "partition=0" / "t" / f"{2:020d}-{9:020d}.1.tmp").write_bytes(b"half")

    assert list(OfflineLog(tmp_path).read(0)) == events(0, 1)
    assert OfflineLog(tmp_path).last_offset("t", 0) == 1


def test_a_full_disk_leaves_no_scratch_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What could not be written whole is removed: a worker that starts again and again must not fill the disk further."""

    def full(_table: object, where: Path, **_: object) -> None:
        where.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pq, "write_table", full)

    with pytest.raises(OSError, match="No space"):
        OfflineLog(tmp_path).append(events(0, 1))

    assert names(tmp_path) == []
