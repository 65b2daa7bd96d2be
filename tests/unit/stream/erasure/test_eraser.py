"""The eraser on real files and a store in memory: when stores count as done."""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from filelock import FileLock

from models.files import each_file
from services.contracts.erasure import Erasure, ErasureStore
from services.contracts.events import Impression
from services.contracts.tenant import scoped
from services.features.erasing import FileRewrite
from services.features.schema import LogPosition
from services.stream.decode import LoggedErasure, LoggedImpression
from services.stream.erasure.eraser import Eraser, ErasingFiles
from services.stream.erasure.tables import SCRATCH, STAGES_LOCK
from services.stream.log.kinds import IMPRESSIONS
from services.stream.log.ledger import ErasureLedger
from services.stream.log.offline_log import OfflineLog
from tests.support.wait import wait_for


@dataclass
class Store:
    """Redis' part: explanations by user and time, and the receipts."""

    explanations: list[tuple[str, int]] = field(default_factory=list)
    done: set[str] = field(default_factory=set)

    def remove_base_rows(self, user_ids: Sequence[str]) -> None:
        """Do nothing."""

    def remove_lists(self, user_ids: Sequence[str], versions: Collection[str]) -> None:
        """Do nothing."""

    def remove_shown(self, until_ms: Mapping[str, int], now_ms: int) -> None:
        """Do nothing."""

    def remove_leftover_lists(self, user_ids: Collection[str]) -> None:
        """Do nothing."""

    def remove_explanations(self, is_gone: Callable[[str, int], bool]) -> None:
        self.explanations = [explanation for explanation in self.explanations if not is_gone(*explanation)]

    def remove_restored(self, is_gone: Callable[[str, LogPosition, int], bool]) -> None:
        """Do nothing."""

    rewrites: list[FileRewrite] = field(default_factory=list)
    """The store's answers to `begin_rewrite` and `rewrite_state` in turn, then `NO_FILE`."""

    def begin_rewrite(self) -> FileRewrite:
        return self.rewrites.pop(0) if self.rewrites else FileRewrite.NO_FILE

    def rewrite_state(self) -> FileRewrite:
        return self.rewrites.pop(0)

    def mark(self, receipts: Iterable[tuple[str, int]], stores: Iterable[ErasureStore], now_ms: int) -> None:
        self.done |= {str(store) for store in stores}

    def lacking(self, erasure_ids: Sequence[str]) -> set[str]:
        return set()

    def close(self) -> None:
        """Do nothing."""


class Scene:
    """A worker's folders, with one user erased a second ago. `step_s` is how far its clock was set since."""

    def __init__(self, folder: Path, settle_s: float = 0.0) -> None:
        self.step_s = 0.0
        self.log = OfflineLog(folder / "log", self.clock)
        self.impressions = OfflineLog(folder / "log", self.clock, IMPRESSIONS, self.log.ledger)
        self.files = ErasingFiles(
            logs={ErasureStore.INTERACTIONS: self.log, ErasureStore.IMPRESSIONS: self.impressions},
            offline_log_dir=folder / "log",
            base_histories=folder / "log" / "base_histories.parquet",
            offline_features=folder / "features" / "data" / "user_history.parquet",
            stages_dir=folder / "pipeline",
        )
        self.store = Store()
        self.eraser = Eraser(self.log.ledger, self.store, self.files, tuple, settle_s, 0.0, self.clock)
        self.accepted_ms = time.time_ns() // 1_000_000 - 1_000
        erasure = Erasure(erasure_id="x", user_id="ann", accepted_time_ms=self.accepted_ms)
        self.log.ledger.append([LoggedErasure(erasure, LogPosition("t", 0, 0))], ["t"])

    def clock(self) -> float:
        return time.time() + self.step_s

    def work(self) -> set[str]:
        """Run a round, ignoring its errors, and return the open stores."""
        with suppress(OSError):
            self.eraser.work([0])
        return set(ErasureStore) - self.store.done

    @property
    def is_forgotten(self) -> bool:
        return self.log.ledger.tombstones(0)[0].user_id is None


def impression(offset: int, user_id: str, at_ms: int) -> LoggedImpression:
    """Return an impression of one item at this time."""
    shown = Impression(
        request_id=f"r{offset}",
        user_id=user_id,
        shown_time_ms=at_ms,
        item_ids=("i",),
        tier="llm",
        reason="llm_in_time",
        bundle_version="v1",
        history_len=1,
        history_digest="d",
    )
    return LoggedImpression(shown, LogPosition("i", 0, offset))


def write_table(path: Path, row_time_us: int = 1) -> None:
    """Write a table of histories of two users."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"user_id": ["ann", "bob"], "row_time_us": [row_time_us] * 2}), path)


@pytest.mark.parametrize(
    ("present", "is_open"),
    [
        ((), {"stage_cache", "offline_features"}),
        (("stages",), {"offline_features"}),
        (("stages", "features"), set()),
        (("features",), {"stage_cache"}),
        (("stages", "features", "base"), {"offline_features"}),
        (("stages", "features", "base", "table"), set()),
    ],
    ids=lambda value: "-".join(sorted(value)) or "none",
)
def test_a_store_is_done_only_after_it_was_searched(
    present: tuple[str, ...], is_open: set[str], tmp_path: Path
) -> None:
    """A missing folder may be an unmounted volume: the receipt stays open, and the ledger keeps the id."""
    scene = Scene(tmp_path)
    files = scene.files
    make: dict[str, Callable[[], object]] = {
        "stages": files.stages_dir.mkdir,
        "features": lambda: files.offline_features.parent.mkdir(parents=True),
        "base": lambda: write_table(files.base_histories),
        "table": lambda: write_table(files.offline_features),
    }
    for name in present:
        make[name]()

    assert scene.work() == is_open
    assert scene.is_forgotten == (not is_open)
    for table in (files.base_histories, files.offline_features):
        assert not table.exists() or pq.read_table(table)["user_id"].to_pylist() == ["bob"]
    files.stages_dir.mkdir(exist_ok=True)
    write_table(files.offline_features)
    assert scene.work() == set()
    assert scene.is_forgotten


@pytest.mark.parametrize("has_table", [False, True], ids=["the first copy", "a later copy"])
def test_a_copy_that_a_killed_writer_left_is_removed(has_table: bool, tmp_path: Path) -> None:
    """A table without the user may have an unfinished copy with the user's rows."""
    scene = Scene(tmp_path)
    table = scene.files.base_histories
    left = table.with_suffix(".tmp")
    write_table(left)
    if has_table:
        pq.write_table(pq.read_table(left).slice(1), table)

    scene.work()

    assert not left.exists()
    assert not has_table or pq.read_table(table)["user_id"].to_pylist() == ["bob"]


def test_the_outputs_of_a_tenants_training_are_searched_for_the_ids_of_its_callers(tmp_path: Path) -> None:
    """The stages of a tenant's name hold its users without the tenant."""
    scene = Scene(tmp_path)
    erasure = Erasure(erasure_id="y", user_id=scoped("acme", "bob"), accepted_time_ms=scene.accepted_ms)
    scene.log.ledger.append([LoggedErasure(erasure, LogPosition("t", 0, 1))], ["t"])
    output = scene.files.stages_dir / "ingest" / "0123"
    output.mkdir(parents=True)
    pq.write_table(pa.table({"user_id": ["bob"]}), output / "events.parquet")
    other = output.with_name("4567")
    other.mkdir()
    pq.write_table(pa.table({"user_id": ["eve"]}), other / "events.parquet")
    scene.work()

    assert not output.exists()
    assert other.exists()


@pytest.mark.parametrize("run", ["imports", "search"])
def test_copies_that_killed_runs_left_are_removed(run: str, tmp_path: Path) -> None:
    """An import's or search's copy of any format may hold the user; while such a run lasts, the store is open."""
    scene = Scene(tmp_path)
    folder = scene.files.stages_dir / run
    table, progress = folder / SCRATCH / "downloads" / "events.csv.gz", folder / "events-1.json"
    table.parent.mkdir(parents=True)
    for path in (table, progress):
        path.touch()
    write_table(folder / SCRATCH / "ordered" / "000000.parquet")

    with FileLock(folder / STAGES_LOCK):
        assert "stage_cache" in scene.work()
        assert len(list(each_file(folder / SCRATCH))) == 2
    assert "stage_cache" not in scene.work()
    assert (progress.exists(), list(each_file(folder / SCRATCH))) == (True, [])


@pytest.mark.parametrize(
    "answers",
    [
        (FileRewrite.REFUSED,),
        (FileRewrite.BUSY, FileRewrite.BUSY),
        (FileRewrite.RUNNING, FileRewrite.RUNNING),
        (FileRewrite.RUNNING, FileRewrite.FAILED),
        (FileRewrite.REFUSED, FileRewrite.RUNNING, FileRewrite.FAILED, FileRewrite.REFUSED),
    ],
    ids=lambda answers: "-".join(answer.name for answer in answers),
)
def test_a_file_is_done_only_after_a_rewrite(answers: tuple[FileRewrite, ...], tmp_path: Path) -> None:
    """While Redis refuses the rewrite, or it runs or failed, the store is open and asked again."""
    scene = Scene(tmp_path)
    scene.files.stages_dir.mkdir()
    scene.files.offline_features.parent.mkdir(parents=True)
    ends = {FileRewrite.RUNNING: [FileRewrite.DONE]}.get(answers[-1], [FileRewrite.RUNNING, FileRewrite.DONE])
    scene.store.rewrites = [*answers, *ends]

    for _ in answers:
        assert scene.work() == {"store_files"}
        assert not scene.is_forgotten
    while scene.store.rewrites:
        left = scene.work()
    assert left == set()
    assert scene.is_forgotten


def test_an_absent_folder_is_an_error_that_names_it(tmp_path: Path) -> None:
    """The worker reports the error, so an alert fires."""
    with pytest.raises(FileNotFoundError) as refused:
        Scene(tmp_path).eraser.work([0])

    assert refused.value.filename in {str(tmp_path / "features" / "data"), str(tmp_path / "pipeline")}


def test_an_explanation_answered_after_the_acceptance_leaves_too(tmp_path: Path) -> None:
    """Answers to the user are covered until the row has left Redis plus the settling time; other users' stay."""
    scene = Scene(tmp_path, settle_s=0.2)
    now_ms = time.time_ns() // 1_000_000
    scene.store.explanations = [("ann", scene.accepted_ms + 500), ("ann", now_ms + 100), ("bob", now_ms)]
    assert "explanations" in scene.work()
    wait_for(lambda: "explanations" not in scene.work(), what="the end of answers under way")

    assert scene.store.explanations == [("bob", now_ms)]


@pytest.mark.parametrize("step_s", [0.0, 3_600.0, -3_600.0], ids=["kept", "set ahead", "set back"])
@pytest.mark.parametrize("is_set_before", [False, True], ids=["after the request", "before the request"])
def test_a_clock_that_is_set_by_an_hour_keeps_nothing_of_the_user(
    is_set_before: bool, step_s: float, tmp_path: Path
) -> None:
    """Records of the hour before and of answers under way leave every store; another user's stay."""
    scene = Scene(tmp_path, settle_s=0.1)
    request_ms = scene.accepted_ms
    if is_set_before:
        scene.step_s = step_s
        request_ms += int(step_s * 1_000)
        erasure = Erasure(erasure_id="y", user_id="ann", accepted_time_ms=request_ms)
        scene.log.ledger.append([LoggedErasure(erasure, LogPosition("t", 0, 1))], ["t"])
    past_ms = [scene.accepted_ms - seconds * 1_000 for seconds in (3_500, 600, 1)]
    scene.store.explanations = [(user_id, at_ms) for user_id in ("ann", "bob") for at_ms in past_ms]
    unfiltered = OfflineLog(tmp_path / "log", kind=IMPRESSIONS, ledger=ErasureLedger(tmp_path / "none"))
    unfiltered.append([impression(offset, *explanation) for offset, explanation in enumerate(scene.store.explanations)])
    for path in (scene.files.base_histories, scene.files.offline_features):
        write_table(path, past_ms[-1] * 1_000)

    answered_s = time.time()
    scene.work()
    scene.step_s = step_s
    scene.store.explanations.append(("ann", int((answered_s + step_s) * 1_000)))  # of an answer under way
    wait_for(lambda: "explanations" not in scene.work(), what="the end of answers under way")

    assert scene.store.explanations == [("bob", at_ms) for at_ms in past_ms]
    assert [logged.impression.user_id for logged in scene.impressions.read(0)] == ["bob"] * 3
    for path in (scene.files.base_histories, scene.files.offline_features):
        assert pq.read_table(path)["user_id"].to_pylist() == ["bob"]
