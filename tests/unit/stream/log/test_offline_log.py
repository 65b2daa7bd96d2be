"""Raw events on disk."""

import errno
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from structlog.testing import capture_logs

from pipelines.data.ingest import IngestSources, key, live_log_files
from services.contracts.erasure import Erasure
from services.contracts.events import Interaction
from services.features.schema import LogPosition
from services.stream.decode import LoggedErasure, LoggedInteraction
from services.stream.log.files import MIN_FILES, Span, current, span_of
from services.stream.log.kinds import INTERACTIONS
from services.stream.log.ledger import Tombstone
from services.stream.log.offline_log import KEEP_PARTS_S, OfflineLog
from tests.support.disk import FullDisk


def events(first: int, last: int, topic: str = "t", partition: int = 0) -> list[LoggedInteraction]:
    """Return the events of an offset range, both ends included."""
    logged = []
    for offset in range(first, last + 1):
        name = f"{topic}{offset}"
        event = Interaction(event_id=name, user_id="u", item_id="i", event_time_ms=offset, accepted_time_ms=None)
        logged.append(LoggedInteraction(event, LogPosition(topic, partition, offset)))
    return logged


def test_the_same_range_gives_the_same_bytes(tmp_path: Path) -> None:
    """A file's bytes depend only on its range; events already on disk are not written again."""
    for name in ("one", "two"):
        for delivered in (events(3, 9), events(5, 9), []):
            OfflineLog(tmp_path / name).append(delivered)

    (first,), (second,) = (list((tmp_path / name).rglob("*.parquet")) for name in ("one", "two"))

    assert first.name == second.name
    assert first.read_bytes() == second.read_bytes()


def test_the_request_of_an_event_is_kept_and_older_files_lack_it(tmp_path: Path) -> None:
    """An event's request id is read back, also from merges with older files without that column."""
    log = OfflineLog(tmp_path)
    for first in range(MIN_FILES):
        log.append(events(first, first))
    for path in sorted(tmp_path.rglob("*.parquet"))[:-1]:
        pq.write_table(pq.read_table(path, partitioning=None).drop_columns(["request_id"]), path)
    named = [
        replace(logged, interaction=msgspec.structs.replace(logged.interaction, request_id="r"))
        for logged in events(MIN_FILES, MIN_FILES)
    ]
    log.append(named)

    num_merged = log.compact(0, time.time())

    assert num_merged >= 2
    assert list(OfflineLog(tmp_path).read(0)) == [*events(0, MIN_FILES - 1), *named]


def test_a_recreated_topic_is_kept_apart(tmp_path: Path) -> None:
    """Offsets of two incarnations of a topic do not collide; both are read, the earlier first."""
    now_s = time.time()
    log = OfflineLog(tmp_path)
    OfflineLog(tmp_path, lambda: now_s - 86_400).append(events(0, 0, topic="zz"))
    log.append(events(1, 2, topic="zz"))
    log.append(events(0, 1, topic="aa"))

    both = events(0, 2, topic="zz") + events(0, 1, topic="aa")
    assert list(log.read(0)) == both
    assert positions_in(live_log_files(tmp_path)) == [event.position for event in both]


def test_a_clock_that_is_set_back_changes_no_order(tmp_path: Path) -> None:
    """After a clock ran two days ahead, the first topic is still read first, with increasing offsets."""
    ahead_s: float = time.time() + 2 * 86_400
    log = OfflineLog(tmp_path, lambda: ahead_s)
    log.append(events(0, 1, topic="zz"))
    log.append(events(0, 1, topic="aa"))
    for file in tmp_path.rglob("*.parquet"):
        os.utime(file, (ahead_s + ("aa" in file.parts), ahead_s + ("aa" in file.parts)))
    log = OfflineLog(tmp_path)
    log.append(events(2, 3, topic="aa"))
    log.append(events(0, 1, topic="00"))

    expected = events(0, 1, topic="zz") + events(0, 3, topic="aa") + events(0, 1, topic="00")
    assert OfflineLog(tmp_path).topic_ids(0) == ["zz", "aa", "00"]
    assert OfflineLog(tmp_path).last_offset("aa", 0) == 3
    assert list(log.read(0)) == expected
    assert positions_in(live_log_files(tmp_path)) == [event.position for event in expected]


def test_readers_drop_positions_that_overlapping_files_repeat(tmp_path: Path) -> None:
    """If two writers ever overlap, each position counts once."""
    OfflineLog(tmp_path).append(events(0, 4))
    OfflineLog(tmp_path / "other").append(events(3, 6))
    stray = next((tmp_path / "other").rglob("*.parquet"))
    stray.rename(tmp_path / "interactions" / "partition=0" / "t" / stray.name)

    assert list(OfflineLog(tmp_path).read(0)) == events(0, 6)


def test_a_full_disk_leaves_no_scratch_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A partly written file is removed, so a retrying worker does not fill the disk further."""
    FullDisk(monkeypatch)

    with pytest.raises(OSError, match="No space"):
        OfflineLog(tmp_path).append(events(0, 1))

    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def spoiled(path: Path, how: str) -> None:
    """Make a file of the log unreadable."""
    content = {"garbage": b"PAR1 no table PAR1", "empty": b"", "cut short": path.read_bytes()[:-30]}
    if how in content:
        path.write_bytes(content[how])
    elif how == "a damaged page":
        whole = path.read_bytes()
        path.write_bytes(whole[:40] + bytes(120) + whole[160:])
    else:
        pq.write_table(pa.table({"another": ["schema"]}), path)


@pytest.mark.parametrize("how", ["garbage", "empty", "cut short", "a damaged page", "another schema"])
def test_an_unreadable_file_is_named_and_left_out(tmp_path: Path, how: str) -> None:
    """The other files are read, the file is logged once and kept, and after a repair it is read again."""
    log = OfflineLog(tmp_path)
    for first in (0, 5, 10):
        log.append(events(first, first + 4))
    bad = sorted(tmp_path.rglob("*.parquet"))[1]
    right = bad.read_bytes()
    spoiled(bad, how)

    with capture_logs() as lines:
        reads = [list(log.read(0)) for _ in range(3)]

    assert reads == [events(0, 4) + events(10, 14)] * 3
    assert [(line["event"], line["path"]) for line in lines] == [("stream.file_unreadable", str(bad))]
    assert log.unreadable == [bad]
    assert bad.exists()
    bad.write_bytes(right)
    assert list(log.read(0)) == events(0, 14)
    assert log.unreadable == []


def test_a_disk_that_does_not_answer_is_not_an_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unavailable volume fails the whole read, since a rebuild without its files would lose their events."""
    log = OfflineLog(tmp_path)
    log.append(events(0, 4))

    def gone(_: Path) -> bytes:
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", gone)
        with pytest.raises(OSError, match="not connected"):
            list(log.read(0))

    assert list(log.read(0)) == events(0, 4)


def test_a_users_events_are_those_of_all_that_are_theirs(tmp_path: Path) -> None:
    """Reading one user equals filtering everything, over files with none, some and only events of the user."""
    log = OfflineLog(tmp_path)
    for first in range(0, 12, 3):
        batch = [
            replace(
                logged,
                interaction=msgspec.structs.replace(
                    logged.interaction, user_id=f"u{logged.position.offset % (2 + first)}"
                ),
            )
            for logged in events(first, first + 2)
        ]
        log.append(batch)
    everything = list(log.read(0))

    by_user = {user: list(log.read(0, user_id=user)) for user in ("u0", "u1", "u5", "nobody")}

    assert by_user == {
        user: [logged for logged in everything if logged.interaction.user_id == user] for user in by_user
    }
    assert by_user["u0"]


def test_files_of_a_day_that_has_ended_become_one(tmp_path: Path) -> None:
    """A few small files stay apart on their day, and are one file on the next; the events stay."""
    today_s = time.time()
    log = OfflineLog(tmp_path)
    for offset in range(5):
        log.append(events(offset, offset))

    on_its_day = log.compact(0, today_s)
    on_the_next = log.compact(0, today_s + 86_400)
    log.compact(0, today_s + 86_400 + LATER_S)

    assert (on_its_day, on_the_next) == (0, 5)
    assert len(list(tmp_path.rglob("*.parquet"))) == 1
    assert list(log.read(0)) == events(0, 4)


def test_merges_leave_an_unreadable_file_out(tmp_path: Path) -> None:
    """Files before and after it are merged separately; after a repair its events are read again."""
    log = OfflineLog(tmp_path)
    for offset in range(2 * MIN_FILES + 1):
        log.append(events(offset, offset))
    bad = sorted(tmp_path.rglob("*.parquet"))[MIN_FILES]
    right = bad.read_bytes()
    spoiled(bad, "garbage")

    num_merged = [log.compact(0, time.time()) for _ in range(4)]
    bad.write_bytes(right)

    assert num_merged == [0, MIN_FILES, MIN_FILES, 0]
    assert list(log.read(0)) == events(0, 2 * MIN_FILES)


def test_an_unreadable_merge_gives_way_to_its_parts(tmp_path: Path) -> None:
    """The parts of an unreadable merge are read instead, are not removed, and are merged again."""
    log = OfflineLog(tmp_path)
    for offset in range(MIN_FILES):
        log.append(events(offset, offset))
    log.compact(0, time.time())
    (whole,) = [path for path in tmp_path.rglob("*.parquet") if span_of(path) == Span(0, MIN_FILES - 1)]
    spoiled(whole, "cut short")

    read = list(log.read(0))
    log.compact(0, time.time() + LATER_S)

    assert read == events(0, MIN_FILES - 1)
    assert list(OfflineLog(tmp_path).read(0)) == read


LATER_S = 2 * KEEP_PARTS_S


class LogUnderCompaction(RuleBasedStateMachine):
    """One partition's log against a list of all appended events."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.days = 0
        self.log = self.opened()
        self.oracle: list[LoggedInteraction] = []
        self.next_offset = 0
        self.listed: tuple[tuple[Path, ...], int] = ((), 0)

    def opened(self) -> OfflineLog:
        """Open the log as a process does, on a clock that the rules set."""
        return OfflineLog(self.root, lambda: time.time() + self.days * 86_400)

    def teardown(self) -> None:
        shutil.rmtree(self.root)

    @rule(sizes=st.lists(st.sampled_from([1, 1, 1, 2, 9]), min_size=1, max_size=24), gap=st.sampled_from([0, 0, 3]))
    def append_files(self, sizes: list[int], gap: int) -> None:
        """Write one file per checkpoint, with gaps for undecodable offsets."""
        for size in sizes:
            batch = events(self.next_offset, self.next_offset + size - 1)
            self.log.append(batch)
            self.oracle += batch
            self.next_offset += size + gap

    @rule(num_again=st.integers(1, 30), num_new=st.sampled_from([0, 0, 5]))
    def deliver_again(self, num_again: int, num_new: int) -> None:
        """Deliver old and new events, as the broker does after a crash between log and commit."""
        new = events(self.next_offset, self.next_offset + num_new - 1)
        self.log.append(self.oracle[-num_again:] + new)
        self.oracle += new
        self.next_offset += num_new

    @rule()
    def next_day(self) -> None:
        self.days += 1

    @rule()
    def compact(self) -> None:
        """Run the worker's compaction: merged files appear, their parts stay."""
        self.log.compact(0, time.time())

    @rule()
    def compact_an_hour_later(self) -> None:
        """Remove parts of earlier merges; readers that listed them have finished."""
        self.listed = ((), 0)
        self.log.compact(0, time.time() + LATER_S)

    @rule(num_removed=st.integers(0, 40))
    def crash_while_removing(self, num_removed: int) -> None:
        """Remove only some parts, leave a scratch file, and start the next worker."""
        self.listed = ((), 0)
        files = {span: path for path in self.root.rglob("*.parquet") if (span := span_of(path))}
        for part in sorted(set(files) - set(current(files)))[:num_removed]:
            files[part].unlink()
        if files:
            (next(iter(files.values())).parent / "half.7.tmp").write_bytes(b"half")
        self.log = self.opened()

    @rule()
    def list_for_later(self) -> None:
        self.listed = (live_log_files(self.root), len(self.oracle))

    @invariant()
    def every_reader_sees_each_event_once(self) -> None:
        """The worker's reader, the pipeline, and a pipeline with an earlier listing read each event once."""
        positions = [event.position for event in self.oracle]
        files, num_listed = self.listed

        assert list(self.log.read(0)) == self.oracle
        assert positions_in(live_log_files(self.root)) == positions
        assert positions_in(files) == positions[:num_listed]
        assert self.log.last_offset("t", 0) == (positions[-1].offset if positions else None)


LogUnderCompaction.TestCase.settings = settings(max_examples=5, stateful_step_count=10)
TestLogUnderCompaction = LogUnderCompaction.TestCase


def positions_in(files: tuple[Path, ...]) -> list[LogPosition]:
    """Read files one after the other, without deduplication."""
    rows = [row for path in files for row in pq.ParquetFile(path).read(["topic_id", "partition", "offset"]).to_pylist()]
    return [LogPosition(row["topic_id"], row["partition"], row["offset"]) for row in rows]


def num_files(root: Path) -> int:
    return len(list(root.rglob("*.parquet")))


def test_a_merge_keeps_what_readers_need(tmp_path: Path) -> None:
    """Old events are still skipped by age, a merge does not change the pipeline's key, and parts are removed later."""
    log = OfflineLog(tmp_path)
    for offset in range(MIN_FILES):
        log.append(events(offset, offset))
    key_before = key(IngestSources(None, None, live_log_files(tmp_path)))
    after_appending_ms = int(time.time() * 1_000) + 1

    num_merged = log.compact(0, time.time())
    log.compact(0, time.time())
    num_beside = num_files(tmp_path)

    assert list(log.read(0, not_before_ms=after_appending_ms)) == []
    assert key(IngestSources(None, None, live_log_files(tmp_path))) == key_before
    log.compact(0, time.time() + LATER_S)
    assert (num_merged, num_beside, num_files(tmp_path)) == (MIN_FILES, MIN_FILES + 1, 1)


def test_a_forgotten_scratch_file_is_removed(tmp_path: Path) -> None:
    """A scratch file is removed after an hour; a fresh file may belong to another writer."""
    log = OfflineLog(tmp_path)
    log.append(events(0, 1))
    scratch = next(tmp_path.rglob("*.parquet")).with_suffix(".9.tmp")
    scratch.write_bytes(b"half")

    log.compact(0, time.time())
    was_kept = scratch.exists()
    log.compact(0, time.time() + LATER_S)

    assert was_kept
    assert not scratch.exists()


def erase_u(log: OfflineLog) -> None:
    """Write the erasure of the user of `events` to the ledger."""
    erasure = Erasure(erasure_id="x", user_id="u", accepted_time_ms=1_000)
    log.ledger.append([LoggedErasure(erasure, LogPosition("t", 0, 100))], ["t"])


def test_an_erasure_searches_a_file_that_another_process_completes_meanwhile(tmp_path: Path) -> None:
    """A scratch file that gets its final name after the listing is rewritten too."""

    def is_erased(tombstone: Tombstone, row: Mapping[str, Any]) -> bool:
        if scratch.exists():
            scratch.rename(whole)
        return INTERACTIONS.is_erased(tombstone, row)

    log = OfflineLog(tmp_path, kind=replace(INTERACTIONS, is_erased=is_erased))
    for first in (0, 2):
        log.append(events(first, first + 1))
    whole = next(tmp_path.rglob(Span(2, 3).name))
    scratch = whole.rename(whole.with_suffix(".9.tmp"))
    erase_u(log)

    result = log.erase(0)

    assert (result.num_rewritten, result.is_clean) == (2, True)
    assert not scratch.exists()
    assert positions_in(tuple(tmp_path.rglob("interactions/**/*.parquet"))) == []


def test_an_erasure_waits_for_an_append_that_has_read_the_ledger_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The append was not filtered by this erasure, so its file must be searched."""
    log = OfflineLog(tmp_path)
    erasing = threading.Thread(target=log.erase, args=[0])
    write = pq.write_table

    def write_late(table: pa.Table, path: Path, **options: Any) -> None:
        monkeypatch.setattr(pq, "write_table", write)
        erase_u(log)
        erasing.start()
        erasing.join(0.5)
        write(table, path, **options)

    monkeypatch.setattr(pq, "write_table", write_late)
    log.append(events(0, 1))
    erasing.join()

    assert positions_in(tuple(tmp_path.rglob("interactions/**/*.parquet"))) == []


def test_files_that_vanish_after_a_listing_are_absent(tmp_path: Path) -> None:
    """Upkeep and readers continue without a file that another process has renamed or removed."""
    log = OfflineLog(tmp_path)
    log.append(events(2, 3))
    folder = next(tmp_path.rglob("*.parquet")).parent
    for name in (Span(0, 1).name, Span(4, 5).name, f"{Span(6, 6).name}.9.tmp"):
        (folder / name).symlink_to(folder / "gone")

    log.compact(0, time.time())
    log.append(events(0, 0, topic="later"))

    assert log.erase(0).is_clean
    assert log.topic_ids(0) == ["t", "later"]
    assert list(log.read(0)) == events(2, 3) + events(0, 0, topic="later")
    assert len(positions_in(live_log_files(tmp_path))) == 3


def test_days_are_removed_whole_when_they_are_old(tmp_path: Path) -> None:
    """With seven days kept, older days are removed; later days, and files without a day, stay."""
    now_s = time.time()
    for number, days_ago in enumerate((9, 8, 7, 0)):
        OfflineLog(tmp_path, lambda ago=days_ago: now_s - ago * 86_400).append(events(number, number))
    log = OfflineLog(tmp_path)
    undated = tmp_path / "interactions" / "partition=0" / "t"
    (undated / Span(100, 100).name).write_bytes(next(undated.rglob("*.parquet")).read_bytes())

    removed = log.remove_days(0, 7, now_s)

    assert len(removed) == 2
    assert num_files(tmp_path) == 3
    assert log.remove_days(0, 7, now_s) == []
