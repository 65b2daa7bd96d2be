"""The bundle store: immutable versions, promotion, rollback and what it withdraws, and damaged bundles."""

import multiprocessing
import os
import shutil
import threading
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest

from models.errors import BundleCorrupt, BundleError, BundleMoved, BundleNotFound, BundleWithdrawn
from models.registry import Bundle, BundleStore


def source_with(folder: Path, text: str) -> Path:
    """A folder to publish."""
    (folder / "decoder").mkdir(parents=True, exist_ok=True)
    (folder / "decoder" / "config.json").write_text(text)
    (folder / "student.onnx").write_text(text)
    return folder


@pytest.fixture
def store(tmp_path: Path) -> BundleStore:
    """Versions v1 and v2, none live."""
    store = BundleStore(tmp_path / "bundles")
    for version in ("v1", "v2"):
        store.publish(source_with(tmp_path / "source", version), version, {"dataset": "made up"})
    return store


def test_publishing_does_not_promote(store: BundleStore) -> None:
    """A new version is live only once it is promoted."""
    assert store.live_version() is None
    with pytest.raises(BundleNotFound, match="tailrace pipeline"):
        store.live()


@pytest.mark.parametrize("harm", ["change", "remove"])
def test_harmed_bundle_is_refused_and_cannot_go_live(store: BundleStore, tmp_path: Path, harm: str) -> None:
    """A file that differs from its hash or is gone: the version does not open and does not go live."""
    store.promote("v1")
    victim = tmp_path / "bundles" / "v2" / "decoder" / "config.json"
    victim.write_text("other") if harm == "change" else victim.unlink()

    with pytest.raises(BundleCorrupt, match=r"decoder/config\.json"):
        store.promote("v2")

    assert store.live_version() == "v1"


def test_version_that_exists_is_kept(store: BundleStore, tmp_path: Path) -> None:
    """Versions are immutable: publishing again changes nothing. The manifest has the facts and a hash per file."""
    again = store.publish(source_with(tmp_path / "source", "changed"), "v1", {})

    assert (again.path / "student.onnx").read_text() == "v1"
    assert (again.manifest["version"], again.manifest["dataset"]) == ("v1", "made up")
    assert set(again.manifest["files"]) == {"decoder/config.json", "student.onnx"}


def test_what_was_rolled_back_stays_withdrawn(store: BundleStore, tmp_path: Path) -> None:
    """Back to the version before; neither a promotion nor a rollback to it brings the one left back, and both name who withdrew it, when and why."""
    store.promote("v1")
    store.promote("v2")

    assert store.rollback(by="ann", reason="bad lists") == "v1"
    assert (store.live_version(), store.previous_version()) == ("v1", "v2")
    for act in (lambda: store.rollback("v2"), lambda: store.promote("v2")):
        with pytest.raises(BundleWithdrawn, match=r"v2 was withdrawn by ann at 2\d+-.*Z \(bad lists\); --force"):
            act()
    assert BundleStore(tmp_path / "bundles").live_version() == "v1"


def test_a_second_rollback_goes_further_back(store: BundleStore, tmp_path: Path) -> None:
    """Not to the version that the first one withdrew, but to the newest before the live one; where none is left it says so."""
    store.publish(source_with(tmp_path / "third", "third"), "v3", {})
    for seconds, version in enumerate(("v1", "v2", "v3")):
        os.utime(tmp_path / "bundles" / version, (seconds, seconds))
        store.promote(version)

    assert [store.rollback(), store.rollback()] == ["v2", "v1"]
    assert list(store.withdrawals()) == ["v3", "v2"]
    with pytest.raises(BundleNotFound, match="no earlier version"):
        store.rollback()


@pytest.mark.parametrize("force", ["promote", "rollback"])
def test_a_forced_move_to_a_withdrawn_version_removes_its_record(store: BundleStore, force: str) -> None:
    """It then goes live like any other; a forced rollback withdraws the one that it leaves."""
    store.promote("v1")
    store.promote("v2")
    store.rollback()

    store.promote("v2", force=True) if force == "promote" else store.rollback(force=True)

    assert store.live_version() == "v2"
    assert list(store.withdrawals()) == ([] if force == "promote" else ["v1"])
    store.promote("v2")


def test_a_withdrawn_versions_twin_is_refused_too(store: BundleStore, tmp_path: Path) -> None:
    """The same content under another name, with another report, also when the withdrawn version was pruned; other content is not. By force it goes live, and no record is left."""
    store.promote("v1")
    store.promote("v2")
    store.rollback(by="ann")
    for version, text in (("v3", "v2"), ("v4", "other")):
        source = source_with(tmp_path / "source", text)
        (source / "report.md").write_text(f"Bundle {version}")
        store.publish(source, version, {})
    os.utime(tmp_path / "bundles" / "v2", (1_000, 1_000))
    store.promote("v4")
    store.promote("v1")
    store.prune(2)

    assert "v2" not in store.versions()
    with pytest.raises(BundleWithdrawn, match="v3 is identical to v2: v2 was withdrawn by ann"):
        store.promote("v3")
    store.promote("v4")
    store.promote("v3", force=True)
    assert store.withdrawals() == {}


def test_rollback_goes_to_any_kept_version(store: BundleStore, tmp_path: Path) -> None:
    """`to` names it. The live one is none, an unknown name is answered with the nearest ones, and what fails withdraws nothing."""
    store.publish(source_with(tmp_path / "source", "v3"), "v3", {})
    for version in ("v1", "v2", "v3"):
        store.promote(version)

    assert store.rollback(to="v1") == "v1"
    assert list(store.withdrawals()) == ["v3"]
    with pytest.raises(BundleNotFound, match="v1 is live already"):
        store.rollback(to="v1")
    with pytest.raises(BundleNotFound, match=r"no bundle v22 .*; nearest to it are v2, "):
        store.rollback(to="v22")
    assert list(store.withdrawals()) == ["v3"]


def test_the_reference_is_the_first_whole_training_until_a_person_moves_it(store: BundleStore, tmp_path: Path) -> None:
    """Neither a promotion nor a newer whole training moves it; no warm start, bundle with added items or damaged one is it by default, and a person may set any that is whole and not withdrawn."""
    started = {"lineage": {"parents": {"started_from": "v0"}}}
    other = BundleStore(tmp_path / "other")
    assert other.reference() is None
    for version, about in (("a", started), ("b", {"lineage": {"items_added_to": "a"}}), ("c", {}), ("d", {})):
        other.publish(source_with(tmp_path / "source", version), version, about)
        other.promote(version)
    (tmp_path / "other" / "c" / "manifest.json").write_text("{")

    assert [one.version for one in (store.reference(), other.reference()) if one] == ["v1", "d"]
    other.set_reference("a", "ann")
    found = other.reference()
    assert found is not None
    assert found.describe().startswith("a is the reference, set by ann at 2")
    for version, error, words in (("c", BundleCorrupt, "not JSON"), ("dd", BundleNotFound, "nearest to it are")):
        with pytest.raises(error, match=words):
            other.set_reference(version, "bob")
    other.rollback("a")
    with pytest.raises(BundleWithdrawn, match=r"d was withdrawn by .*: it is no reference"):
        other.set_reference("d", "bob")
    assert other.reference() == found


def test_pruning_spares_the_reference(store: BundleStore, tmp_path: Path) -> None:
    """However old it is, by default or by a person's word; once another is, it goes."""
    for version in ("v3", "v4", "v5"):
        store.publish(source_with(tmp_path / "source", version), version, {})
    for age, version in enumerate(store.versions()):
        os.utime(tmp_path / "bundles" / version, (1_000 + age, 1_000 + age))

    store.prune(2)
    assert store.versions() == ["v1", "v4", "v5"]
    store.set_reference("v4", "ann")
    store.publish(source_with(tmp_path / "source", "v6"), "v6", {})
    store.prune(1)

    assert store.versions() == ["v4", "v6"]


def test_a_rollback_from_the_reference_moves_it_to_what_is_live_again(store: BundleStore) -> None:
    """By the person who withdrew it, also where it was the reference by default; a rollback from another bundle leaves it."""
    store.promote("v2")
    store.promote("v1")

    store.rollback(by="ann")
    moved = store.reference()
    store.promote("v1", force=True)
    store.rollback(to="v2", by="bob")

    assert moved is not None
    assert (moved.version, moved.by) == ("v2", "ann")
    assert store.reference() == moved


def test_a_damaged_bundle_can_be_withdrawn(store: BundleStore, tmp_path: Path) -> None:
    """Also when its manifest cannot be read, which is when one rolls back."""
    store.promote("v1")
    store.promote("v2")
    (tmp_path / "bundles" / "v2" / "manifest.json").write_text("{")

    assert store.rollback() == "v1"
    assert list(store.withdrawals()) == ["v2"]


@pytest.mark.parametrize("content", ["{", "[]", '{"v2": {}}', '{"v2": 1}'])
def test_an_unreadable_record_of_withdrawals_is_named(store: BundleStore, tmp_path: Path, content: str) -> None:
    """What cannot be read forbids a promotion: what it withdrew is not known."""
    (tmp_path / "bundles" / "WITHDRAWN").write_text(content)

    with pytest.raises(BundleCorrupt, match="WITHDRAWN"):
        store.promote("v1")


def test_rollback_needs_an_earlier_version(store: BundleStore, tmp_path: Path) -> None:
    """Neither a repeated promotion nor one killed between its two pointers leaves a version to return to."""
    store.promote("v1")
    store.promote("v1")
    with pytest.raises(BundleNotFound, match="no earlier version"):
        store.rollback()
    (tmp_path / "bundles" / "PREVIOUS").write_text("v1\n")

    with pytest.raises(BundleNotFound, match="no earlier version"):
        store.rollback()


@pytest.mark.parametrize("name", ["v9", "LIVE"])
def test_what_is_no_version_is_not_found(store: BundleStore, name: str) -> None:
    """An unknown version, and a file of the store that is no folder, cannot be promoted."""
    store.promote("v1")

    with pytest.raises(BundleNotFound, match=name):
        store.promote(name)


def test_left_over_scratch_of_a_killed_publication_is_not_in_the_way(store: BundleStore, tmp_path: Path) -> None:
    """In a container the next process has the same id, and so the same scratch folder."""
    (tmp_path / "bundles" / f".v3.{os.getpid()}" / "decoder").mkdir(parents=True)
    (tmp_path / "bundles" / f".v3.{os.getpid()}" / "half").touch()

    bundle = store.publish(source_with(tmp_path / "source", "v3"), "v3", {})

    assert set(bundle.manifest["files"]) == {"decoder/config.json", "student.onnx"}


def test_failed_publication_leaves_nothing(store: BundleStore, tmp_path: Path) -> None:
    """What cannot be written whole takes no room on a disk that may be full."""
    source = source_with(tmp_path / "source", "v3")
    (source / "dangling").symlink_to(tmp_path / "nowhere")

    with pytest.raises(shutil.Error):
        store.publish(source, "v3", {})

    assert sorted(path.name for path in (tmp_path / "bundles").iterdir()) == ["v1", "v2"]


@pytest.mark.parametrize("manifest", [b"[]", b"{}", b'{"files": 1}', b"\xff", b"{"])
def test_unusable_manifest_is_corrupt(store: BundleStore, tmp_path: Path, manifest: bytes) -> None:
    """Whatever the manifest holds, the error is BundleCorrupt."""
    (tmp_path / "bundles" / "v1" / "manifest.json").write_bytes(manifest)

    with pytest.raises(BundleCorrupt, match="manifest"):
        store.open("v1")


def test_old_versions_are_pruned_and_what_may_serve_is_not(store: BundleStore, tmp_path: Path) -> None:
    """The newest stay, and the live one, the one before it and the one that its training started from, however old."""
    for number in range(3, 8):
        about = {"lineage": {"parents": {"started_from": "v2"}}} if number == 3 else {}
        store.publish(source_with(tmp_path / "source", "x"), f"v{number}", about)
    for age_s, version in enumerate(store.versions()):
        os.utime(tmp_path / "bundles" / version, (1_000 + age_s, 1_000 + age_s))
    store.promote("v1")
    store.promote("v3")

    removed = store.prune(2)

    assert removed == ["v4", "v5"]
    assert store.versions() == ["v1", "v2", "v3", "v6", "v7"]
    assert store.rollback() == "v1"
    assert [path.name for path in (tmp_path / "bundles").iterdir() if path.name[0] == "."] == [".lock"]


def test_scratch_folders_of_killed_processes_are_removed_after_a_day(store: BundleStore, tmp_path: Path) -> None:
    """One that may still be written stays."""
    old, young = (source_with(tmp_path / "bundles" / name, "x") for name in (".v8.11", ".v9.12"))
    os.utime(old, (1_000, 1_000))

    store.prune(2)

    assert (old.exists(), young.exists()) == (False, True)


def test_of_two_promoters_at_once_one_wins_and_the_other_is_told(store: BundleStore, tmp_path: Path) -> None:
    """Processes that saw the same live version promote another each, again and again: what was live before is always recorded."""
    store.publish(source_with(tmp_path / "source", "v3"), "v3", {})
    store.promote("v1")
    start, outcomes = threading.Barrier(2), []

    def promote(version: str) -> None:
        start.wait()
        try:
            BundleStore(tmp_path / "bundles").promote(version)
            outcomes.append(version)
        except BundleMoved:
            outcomes.append(None)

    for _ in range(20):
        outcomes.clear()
        before = store.live_version()
        racers = [threading.Thread(target=promote, args=(one,)) for one in {"v1", "v2", "v3"} - {before}]
        for racer in racers:
            racer.start()
        for racer in racers:
            racer.join()
        won = {version for version in outcomes if version is not None}
        assert won
        assert store.live_version() in won
        assert {(tmp_path / "bundles" / "PREVIOUS").read_text().strip()} == (won - {store.live_version()} or {before})


def test_a_promotion_from_a_version_that_is_no_longer_live_is_refused(store: BundleStore, monkeypatch) -> None:
    """While one promoter verifies its version, another moves the pointer."""
    store.promote("v1")
    verify = Bundle.verify

    def overtaken(bundle: Bundle) -> None:
        verify(bundle)
        monkeypatch.setattr(Bundle, "verify", verify)
        BundleStore(bundle.path.parent).promote("v2")

    monkeypatch.setattr(Bundle, "verify", overtaken)

    with pytest.raises(BundleMoved, match="the live version is v2 and no longer v1"):
        store.promote("v1")
    assert store.live_version() == "v2"


def race(root: Path, moves: Barrier, outcomes: "Queue[tuple[str, str]]", rounds: int, act: str) -> None:
    """Make a move each round, at the same moment as the other processes, and report how it ended."""
    store = BundleStore(root)
    for _ in range(rounds):
        moves.wait()
        seen = store.live_version()
        moves.wait()
        try:
            store.rollback(to="v1", by=act) if act == "rollback" else store.promote(act, seen)
            outcomes.put((act, "moved"))
        except BundleError as error:
            outcomes.put((act, type(error).__name__))
        moves.wait()


def test_of_processes_that_roll_back_and_promote_at_once_each_records_what_it_left(
    store: BundleStore, tmp_path: Path
) -> None:
    """Of the promoters, who all saw v2 live, at most one moves the pointer. A rollback withdraws the version that it left, and only that; a loser changes nothing."""
    store.publish(source_with(tmp_path / "source", "v3"), "v3", {})
    store.promote("v2")
    acts, rounds = ("rollback", "v1", "v3"), 8
    context = multiprocessing.get_context("spawn")
    moves, outcomes = context.Barrier(len(acts) + 1), context.Queue()
    racers = [
        context.Process(target=race, args=(tmp_path / "bundles", moves, outcomes, rounds, act), daemon=True)
        for act in acts
    ]
    for racer in racers:
        racer.start()

    for _ in range(rounds):
        for _ in range(3):
            moves.wait(60)
        found: dict[str, Any] = dict(outcomes.get(timeout=60) for _ in acts)
        moved = {act for act, outcome in found.items() if outcome == "moved"}
        promoted = moved - {"rollback"}
        left = "".join(promoted) or "v2"
        assert moved
        assert len(promoted) <= 1
        assert set(found.values()) <= {"moved", "BundleMoved", "BundleNotFound"}
        if "rollback" in moved:
            assert (store.live_version(), store.previous_version(), list(store.withdrawals())) == ("v1", left, [left])
        else:
            assert (store.live_version(), store.previous_version(), list(store.withdrawals())) == (left, "v2", [])
        store.promote("v3", force=True)  # so that its record is gone
        store.promote("v2", force=True)
    for racer in racers:
        racer.join(60)
    assert [racer.exitcode for racer in racers] == [0] * len(acts)


def test_a_version_published_before_anything_was_live_moves_only_from_nothing(store: BundleStore) -> None:
    """`seen` None is that nothing was live, not whatever is."""
    store.promote("v1", None)

    with pytest.raises(BundleMoved, match="the live version is v1 and no longer None"):
        store.promote("v2", None)
    store.promote("v2")
