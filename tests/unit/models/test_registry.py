"""The bundle store: immutable versions, promotion, rollback and withdrawals, and corrupt bundles."""

import json
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from hypothesis import settings

from models.errors import (
    BundleCorrupt,
    BundleError,
    BundleMoved,
    BundleNotFound,
    BundleUntrained,
    BundleWithdrawn,
    CanaryError,
    InvalidRequest,
)
from models.registry.bundle import Bundle
from models.registry.canary import CanaryStage
from models.registry.manifest import decode_manifest
from models.registry.name_record import ReferenceVersion
from models.registry.storage.folder import FolderStorage
from models.registry.storage.port import StoredRecord
from models.registry.store import BundleStore
from models.registry.trainings import lineage_of_addition, lineage_of_variant
from tests.support.release_moves import ANALYSIS, PEOPLE, VERSIONS, Moves, release
from tests.support.wait import wait_for


def source_with(folder: Path, text: str) -> Path:
    """A source folder whose files contain `text`."""
    (folder / "decoder").mkdir(parents=True, exist_ok=True)
    (folder / "decoder" / "config.json").write_text(text)
    (folder / "student.onnx").write_text(text)
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "bundles"


@pytest.fixture
def releasing(store: BundleStore, root: Path) -> BundleStore:
    """A store of v1, v2 and v3, where v2 is live and v3 was live before."""
    publish(store, root, "v3")
    promote(store, "v3", "v2")
    return store


@pytest.fixture
def store(root: Path) -> BundleStore:
    """A store of v1 and v2 without a live version."""
    store = BundleStore(root)
    publish(store, root, "v1", "v2", about={"dataset": "made up"})
    return store


def publish(store: BundleStore, root: Path, *versions: str, about: dict[str, Any] | None = None) -> None:
    """Publish versions whose files contain the version's name, with modification times one second apart."""
    for version in versions:
        store.publish(source_with(root.parent / "source", version), version, about or {})
    for age_s, version in enumerate(store.versions()):
        os.utime(root / version, (1_000 + age_s, 1_000 + age_s))


def change_record(root: Path, **fields: Any) -> None:
    """Change fields of the default name's record behind the store's back."""
    path = root / "names" / "default.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def promote(store: BundleStore, *versions: str) -> None:
    for version in versions:
        store.promote(version)


def test_a_document_reads_the_same_after_it_was_validated() -> None:
    """A process validates a content once, and rejects an invalid content every time."""
    valid, invalid = (json.dumps({"files": {"a": digest}, "data": None}).encode() for digest in ("0" * 64, "no hash"))

    assert [decode_manifest(valid, "v1", "here") for _ in range(3)] == [{"files": {"a": "0" * 64}}] * 3
    for _ in range(2):
        with pytest.raises(BundleCorrupt, match=r"files\.a"):
            decode_manifest(invalid, "v1", "here")


def test_publishing_does_not_promote(store: BundleStore, tmp_path: Path) -> None:
    """Publishing does not promote, and never changes a published version; the manifest has facts and file hashes."""
    again = store.publish(source_with(tmp_path / "source", "changed"), "v1", {})

    assert store.live_version() is None
    with pytest.raises(BundleNotFound, match="tailrace pipeline"):
        store.live()
    assert (again.path / "student.onnx").read_text() == "v1"
    assert (again.manifest["version"], again.manifest["dataset"]) == ("v1", "made up")
    assert set(again.manifest["files"]) == {"decoder/config.json", "student.onnx"}


@pytest.mark.parametrize("harm", ["change", "remove"])
def test_harmed_bundle_is_refused_and_cannot_go_live(store: BundleStore, root: Path, harm: str) -> None:
    """A version with a changed or missing file can be neither opened nor promoted."""
    store.promote("v1")
    victim = root / "v2" / "decoder" / "config.json"
    victim.write_text("other") if harm == "change" else victim.unlink()

    with pytest.raises(BundleCorrupt, match=r"decoder/config\.json"):
        store.promote("v2")

    assert store.live_version() == "v1"


@pytest.mark.parametrize("manifest", [b"[]", b"{}", b'{"files": 1}', b"\xff", b"{"])
def test_unusable_manifest_is_corrupt(store: BundleStore, root: Path, manifest: bytes) -> None:
    """Every unusable manifest raises BundleCorrupt, and a rollback from that version still works."""
    promote(store, "v1", "v2")
    (root / "v2" / "manifest.json").write_bytes(manifest)

    with pytest.raises(BundleCorrupt, match="manifest"):
        store.open("v2")
    assert (store.rollback(), list(store.withdrawals())) == ("v1", ["v2"])


HASH = "0" * 64
HOSTILE_MANIFESTS: dict[str, str] = {
    **{
        f"file {name!r}": json.dumps({"files": {name: HASH}})
        for name in (
            *("/etc/cron.d/x", "../v1/student.onnx", "decoder/../../x", "decoder/..", ".", "", "a//b", "./a", "a/"),
            *("a\\b", "C:\\x", "a\0b", "a\nb", "manifest.json", "decoder/manifest.json", "x" * 2_000),
        )
    },
    **{
        f"hash {digest!r}": json.dumps({"files": {"a": digest}})
        for digest in ("", "c0de", "../" * 21 + "x", HASH[:-1] + "G", 1)
    },
    "file and folder": json.dumps({"files": {"a": HASH, "a/b": HASH}}),
    "listed twice": f'{{"files": {{"a": "{HASH}", "a": "{HASH}"}}}}',
    "another version": json.dumps({"files": {}, "version": "v1"}),
    **{
        f"{name}: {value!r}": json.dumps({"files": {}, name: value})
        for name, value in (
            *(("lineage", []), ("lineage", None), ("lineage", {"parents": []}), ("lineage", {"stages": 1})),
            *(("lineage", {"parents": {"started_from": "../x"}}), ("lineage", {"items_added_to": 3})),
            *(("lineage", {"options": []}), ("serving", []), ("serving", {"weight_kind": 4}), ("trained", "no")),
            *(("prompt", {"max_items": 0}), ("prompt", {"stride": 0}), ("prompt", {"stride": "50"}), ("prompt", 1)),
            ("prompt", {"head": [-1]}),
            *(("search", {"beam_width": 0}), ("search", {"scores": "raw"}), ("imported", {"seen_until": 1})),
            *(
                ("llm_pays", [1]),
                ("llm_pays", [["a", None]]),
                ("lists", {"of": "v1"}),
                ("lists", {"of": "/", "under": "v2"}),
            ),
            *(("mixer", {}), ("mixer", {"sources": {}, "blends": {"oracle": []}})),
            *(
                ("mixer", {"sources": {name: {"newest": newest, "decay": decay}}, "blends": {}})
                for name, newest, decay in (("../x", 5, 0.5), ("a/b", 5, 0.5), ("text", 0, 0.5), ("text", 5, 1.5))
            ),
            *(
                ("mixer", {"sources": {}, "blends": {"student": [{"history": lengths, "weights": weights}]}})
                for lengths, weights in (([0], {}), ([0, None], {"text": 1.0}), ([0, 9], {"model": -1.0}))
            ),
            *(("metrics", {"decoder": 1}), ("multiply_adds", []), ("data", []), ("num_items", "9"), ("forced", "no")),
        )
    },
}
"""Invalid manifests by defect. Anyone who can write to the store may have written them."""


@pytest.mark.parametrize("wrong", HOSTILE_MANIFESTS)
def test_a_hostile_manifest_is_named_and_ends_no_run(store: BundleStore, root: Path, wrong: str) -> None:
    """A version with a hostile manifest cannot be opened; reference, pruning and listing skip it."""
    promote(store, "v1")
    (root / "v2" / "manifest.json").write_text(HOSTILE_MANIFESTS[wrong])

    for act in (store.open, store.described, store.promote):
        with pytest.raises(BundleCorrupt, match=r"v2/manifest\.json"):
            act("v2")
    assert store.reference() == ReferenceVersion(version="v1")
    publish(store, root, "v3")
    assert store.prune(2) == []
    assert store.versions() == ["v1", "v2", "v3"]


@pytest.mark.parametrize(
    "version", ["../v1", "/tmp/x", "v1/../v2", ".hidden", "", "a\\b", "a\0", "v" * 200, "LIVE", "names"]
)
def test_a_version_is_one_segment_of_a_path(store: BundleStore, tmp_path: Path, version: str) -> None:
    """Names of more than one path segment are neither opened nor published."""
    with pytest.raises(BundleNotFound):
        store.open(version)
    with pytest.raises(InvalidRequest, match="version"):
        store.publish(source_with(tmp_path / "source", "x"), version, {})


def test_a_manifest_that_no_process_would_read_is_not_published(store: BundleStore, tmp_path: Path) -> None:
    """An invalid manifest is rejected at publication."""
    with pytest.raises(BundleCorrupt, match="lineage"):
        store.publish(source_with(tmp_path / "source", "x"), "v3", {"lineage": []})
    assert store.versions() == ["v1", "v2"]


@pytest.mark.parametrize("name", ["v9", "names"])
def test_what_is_no_version_is_not_found(store: BundleStore, name: str) -> None:
    """An unknown version, or a non-version folder of the store, cannot be promoted."""
    store.promote("v1")

    with pytest.raises(BundleNotFound, match=name):
        store.promote(name)


def test_what_was_rolled_back_stays_withdrawn(store: BundleStore, root: Path) -> None:
    """A rolled-back version cannot be promoted or rolled back to; the error names who withdrew it, when and why."""
    promote(store, "v1", "v2")

    assert store.rollback(by="ann", reason="bad lists") == "v1"
    assert (store.live_version(), store.previous_version()) == ("v1", "v2")
    for act in (store.rollback, store.promote):
        with pytest.raises(BundleWithdrawn, match=r"v2 was withdrawn by ann at 2\d+-.*Z \(bad lists\); --force"):
            act("v2")
    assert BundleStore(root).live_version() == "v1"


def test_a_second_rollback_goes_further_back(store: BundleStore, root: Path) -> None:
    """A second rollback goes to the next earlier version that is not withdrawn, and fails if all are withdrawn."""
    publish(store, root, "v3")
    promote(store, "v1", "v2", "v3")

    assert [store.rollback(), store.rollback()] == ["v2", "v1"]
    assert list(store.withdrawals()) == ["v3", "v2"]
    with pytest.raises(BundleNotFound, match="no earlier version"):
        store.rollback()


def test_rollback_needs_an_earlier_version(store: BundleStore, root: Path) -> None:
    """Neither a repeated promotion nor a promotion killed between its two writes leaves a version to return to."""
    promote(store, "v1", "v1")
    with pytest.raises(BundleNotFound, match="no earlier version"):
        store.rollback()
    change_record(root, previous="v1")

    with pytest.raises(BundleNotFound, match="no earlier version"):
        store.rollback()


def test_rollback_goes_to_any_kept_version(store: BundleStore, root: Path) -> None:
    """`to` selects the version; the live version and unknown names are rejected without withdrawing a version."""
    publish(store, root, "v3")
    promote(store, "v1", "v2", "v3")

    assert store.rollback(to="v1") == "v1"
    for to, words in (("v1", "v1 is already live"), ("v22", r"no bundle v22 .*; nearest to it are v2, ")):
        with pytest.raises(BundleNotFound, match=words):
            store.rollback(to=to)
    assert list(store.withdrawals()) == ["v3"]


@pytest.mark.parametrize("force", ["promote", "rollback"])
def test_a_forced_move_to_a_withdrawn_version_removes_its_record(store: BundleStore, force: str) -> None:
    """A forced move removes the version's withdrawal; a forced rollback withdraws the version that it leaves."""
    promote(store, "v1", "v2")
    store.rollback()

    store.promote("v2", force=True) if force == "promote" else store.rollback(force=True)

    assert store.live_version() == "v2"
    assert list(store.withdrawals()) == ([] if force == "promote" else ["v1"])
    store.promote("v2")


def test_a_withdrawn_versions_twin_is_refused_too(store: BundleStore, root: Path) -> None:
    """A copy of a withdrawn version is rejected, even after pruning; force promotes it and clears the withdrawal."""
    promote(store, "v1", "v2")
    store.rollback(by="ann")
    for version, text in (("v3", "v2"), ("v4", "other")):
        source = source_with(root.parent / "source", text)
        (source / "report.md").write_text(f"Bundle {version}")
        store.publish(source, version, {})
    promote(store, "v4", "v1")
    store.prune(2)

    assert "v2" not in store.versions()
    with pytest.raises(BundleWithdrawn, match="v3 is identical to v2: v2 was withdrawn by ann"):
        store.promote("v3")
    store.promote("v4")
    store.promote("v3", force=True)
    assert store.withdrawals() == {}


CANARY: dict[str, object] = {
    "version": "v2",
    "salt": "s",
    "stages": [{"share": 0.5, "hold_s": 1.0}],
    "by": "ann",
    "at": "now",
    "stage": 0,
    "since_ms": 0,
    "by_hand": False,
    "budgets": {},
    "report": "",
    "looked_ms": None,
}


@pytest.mark.parametrize(
    "wrong",
    [
        *(
            {"withdrawn": withdrawn}
            for withdrawn in ([], {"v2": {}}, {"v2": 1}, {"../v2": {"by": "", "at": "", "reason": "", "content": ""}})
        ),
        *({"live": version} for version in (1, ["v1"], "../v1", "")),
        *({"reference": reference} for reference in ("v1", {"version": 1}, {"version": "/"})),
        *({"history": history} for history in ({}, [1], [{"act": 1, "version": "v1", "by": "", "at": ""}])),
        *(
            {"canary": {**CANARY, **change}}
            for change in (
                *(
                    {"version": "../v2"},
                    {"salt": 1},
                    {"since_ms": "0"},
                    {"since_ms": 1e300},
                    {"since_ms": -1},
                    {"stage": 1},
                ),
                *(
                    {"stage": True},
                    {"by_hand": "no"},
                    {"budgets": []},
                    {"budgets": {"errors": "x"}},
                    {"looked_ms": "x"},
                ),
                *(
                    {"stages": []},
                    {"stages": [{"share": 2.0, "hold_s": 1.0}]},
                    {"stages": [{"share": 0.5, "hold_s": 1e300}]},
                ),
                *({"stages": [{"share": None, "hold_s": 1.0}]}, {"stages": [{"share": 0.5}]}, {"report": None}),
            )
        ),
    ],
    ids=str,
)
def test_an_unreadable_record_of_a_name_is_named(store: BundleStore, root: Path, wrong: dict[str, object]) -> None:
    """An unreadable record blocks promotion, because its withdrawals are unknown."""
    store.promote("v1")
    change_record(root, **wrong)

    with pytest.raises(BundleCorrupt, match=r"names/default\.json"):
        store.promote("v1")


def test_a_valid_canary_is_read(store: BundleStore, root: Path) -> None:
    """The valid canary that the cases above each change by one field is accepted."""
    store.promote("v1")
    change_record(root, canary=CANARY)

    assert store.record().serving == ("v1", "v2")


def test_what_lies_beside_the_records_is_no_name(store: BundleStore, root: Path) -> None:
    """Stray files next to the records are not names and do not stop pruning."""
    store.promote("v1")
    for left in ("default (copy).json", ".default.json", "UPPER.json"):
        (root / "names" / left).write_text("{}")

    assert store.names() == ["default"]
    assert store.prune(1) == []


def test_a_store_from_before_names_keeps_its_pointers(store: BundleStore, root: Path) -> None:
    """The four legacy pointer files are the default name's record until the first move writes the new record."""
    withdrawn = {"v9": {"by": "ann", "at": "2026-11-20T08:00:00Z", "reason": "bad", "content": "c0de"}}
    for file, text in (
        ("LIVE", "v2\n"),
        ("PREVIOUS", "v1\n"),
        ("WITHDRAWN", json.dumps(withdrawn)),
        ("REFERENCE", json.dumps({"version": "v1", "by": "bob", "at": "2026-11-21T08:00:00Z"})),
    ):
        (root / file).write_text(text)

    record = store.record()
    assert (record.live, record.previous, list(record.withdrawn)) == ("v2", "v1", ["v9"])
    assert (store.names(), record.reference) == (
        ["default"],
        ReferenceVersion(version="v1", by="bob", at="2026-11-21T08:00:00Z"),
    )
    assert store.rollback() == "v1"
    assert list(BundleStore(root).withdrawals()) == ["v9", "v2"]


def test_names_of_one_store_move_apart(store: BundleStore, root: Path) -> None:
    """Each name has its own pointer, withdrawals and history; pruning spares all their versions; unsafe names fail."""
    mail = BundleStore(root, "mail")
    promote(store, "v1")
    mail.promote("v2", by="ann")
    publish(store, root, "v3")
    mail.promote("v3", by="bob")
    mail.rollback(by="ann", reason="dull")
    store.prune(1)

    assert (store.live_version(), mail.live_version(), store.names()) == ("v1", "v2", ["default", "mail"])
    assert (list(store.withdrawals()), list(mail.withdrawals()), store.versions()) == ([], ["v3"], ["v1", "v2", "v3"])
    record = mail.record()
    assert record.owner == "ann"
    assert [(move.act, move.version, move.by) for move in record.history] == [
        ("promote", "v2", "ann"),
        ("promote", "v3", "bob"),
        ("rollback", "v2", "ann"),
    ]
    for name in ("", "../mail", "Mail", "a" * 64):
        with pytest.raises(InvalidRequest, match="is not a name"):
            BundleStore(root, name)


def test_a_version_is_withdrawn_without_having_been_live(store: BundleStore) -> None:
    """A withdrawn version needs force to be promoted; the live version and unknown versions cannot be withdrawn."""
    store.promote("v1")

    store.withdraw("v2", by="ann", reason="wrong data")

    with pytest.raises(BundleWithdrawn, match=r"v2 was withdrawn by ann .*wrong data"):
        store.promote("v2")
    with pytest.raises(BundleNotFound, match="v1 is live: `tailrace rollback`"):
        store.withdraw("v1")
    with pytest.raises(BundleNotFound, match="no bundle v9"):
        store.withdraw("v9")


def test_a_promotion_of_a_version_that_is_pruned_meanwhile_is_taken_back(store: BundleStore, root: Path) -> None:
    """A promotion is reverted if the version is pruned concurrently, so the pointer never names a missing version."""
    publish(store, root, "v3", "v4")
    promote(store, "v3", "v4")
    other = FolderStorage(root)

    class Overtaken(FolderStorage):
        """A storage where another process hides the version as the pointer moves."""

        def swap_record(self, name: str, seen: str | None, content: bytes) -> bool:
            """Move the pointer, and hide v1 if the pointer now names it."""
            moved = super().swap_record(name, seen, content)
            if b'"live": "v1"' in content:
                other.hide("v1")
            return moved

    with pytest.raises(BundleNotFound, match="no bundle v1"):
        BundleStore(Overtaken(root)).promote("v1")

    assert (store.live_version(), store.previous_version()) == ("v4", "v3")


def test_the_reference_is_the_first_whole_training_until_a_person_moves_it(store: BundleStore, tmp_path: Path) -> None:
    """The reference defaults to the first full training that is valid, and moves only when a person sets it."""
    other = BundleStore(tmp_path / "other")
    assert other.reference() is None
    started, added = {"parents": {"started_from": "v0"}}, {"items_added_to": "a"}
    for version, lineage in (("a", started), ("b", added), ("c", {}), ("d", {})):
        publish(other, tmp_path / "other", version, about={"lineage": lineage})
        other.promote(version)
    (tmp_path / "other" / "c" / "manifest.json").write_text("{")

    assert [reference.version for reference in (store.reference(), other.reference()) if reference] == ["v1", "d"]
    other.set_reference("a", "ann")
    reference = other.reference()
    assert reference is not None
    assert reference.describe().startswith("a is the reference, set by ann at 2")
    for version, error, words in (("c", BundleCorrupt, "not JSON"), ("dd", BundleNotFound, "nearest to it are")):
        with pytest.raises(error, match=words):
            other.set_reference(version, "bob")
    other.rollback("a")
    with pytest.raises(BundleWithdrawn, match=r"d was withdrawn by .*: it cannot be the reference"):
        other.set_reference("d", "bob")
    assert other.reference() == reference


def test_a_rollback_from_the_reference_moves_it_to_what_is_live_again(store: BundleStore) -> None:
    """A rollback from the reference moves it to the version that is live again; other rollbacks keep it."""
    promote(store, "v2", "v1")

    store.rollback(by="ann")
    moved = store.reference()
    store.promote("v1", force=True)
    store.rollback(to="v2", by="bob")

    assert moved is not None
    assert (moved.version, moved.by) == ("v2", "ann")
    assert store.reference() == moved


def test_a_bundle_without_models_is_no_reference(store: BundleStore, root: Path) -> None:
    """A rollback to the items of a first start does not make them the reference, and nobody can set them."""
    publish(store, root, "v0", about={"trained": False})
    promote(store, "v0", "v2")
    store.set_reference("v2", "ann")

    store.rollback(to="v0", by="ann")

    assert store.live_version() == "v0"
    assert store.reference() == ReferenceVersion(version="v1")
    with pytest.raises(BundleUntrained):
        store.set_reference("v0", "ann")


def test_pruning_spares_the_reference(store: BundleStore, root: Path) -> None:
    """Pruning keeps the reference, however old, and may remove it once another version is the reference."""
    publish(store, root, "v3", "v4", "v5")

    store.prune(2)
    assert store.versions() == ["v1", "v4", "v5"]
    store.set_reference("v4", "ann")
    publish(store, root, "v6")
    store.prune(1)

    assert store.versions() == ["v4", "v6"]


def test_old_versions_are_pruned_and_what_may_serve_is_not(store: BundleStore, root: Path) -> None:
    """Pruning keeps the newest, live and previous versions, and the parent of the live version's training."""
    publish(store, root, "v3", about={"lineage": {"parents": {"started_from": "v2"}}})
    publish(store, root, "v4", "v5", "v6", "v7")
    promote(store, "v1", "v3")

    removed = store.prune(2)

    assert removed == ["v4", "v5"]
    assert store.versions() == ["v1", "v2", "v3", "v6", "v7"]
    assert store.rollback() == "v1"
    assert sorted(path.name for path in root.iterdir() if path.name[0] == ".") == [".lock", ".prune.lock"]


def test_what_is_promoted_while_it_is_pruned_comes_back(store: BundleStore, root: Path) -> None:
    """A version promoted during pruning is restored, along with the version its training started from."""
    publish(store, root, "v3")
    publish(store, root, "v4", about={"lineage": {"parents": {"started_from": "v3"}}})
    publish(store, root, "v5", "v6", "v7")
    promote(store, "v7")
    other = BundleStore(root)

    class Overtaken(FolderStorage):
        """A storage where another process promotes v4 just before v4 is hidden; counts record reads."""

        num_read = 0

        def hide(self, version: str) -> None:
            """Promote v4 if it is about to be hidden, then hide the version."""
            if version == "v4":
                other.promote("v4")
            super().hide(version)

        def read_record(self, name: str) -> StoredRecord:
            """Read a record and count the read."""
            self.num_read += 1
            return super().read_record(name)

    storage = Overtaken(root)
    removed = BundleStore(storage).prune(1)

    assert removed == ["v2", "v5", "v6"]
    assert (store.versions(), store.live().version) == (["v1", "v3", "v4", "v7"], "v4")
    assert storage.num_read <= 2 * 4  # each pass reads a record and its reference, and repeats after a restore


def test_what_a_killed_process_had_hidden_comes_back_where_a_name_needs_it(store: BundleStore, root: Path) -> None:
    """Pruning restores a hidden version that a name needs; versions that no name needs stay hidden."""
    publish(store, root, "v3", "v4")
    promote(store, "v2", "v4")
    for version in ("v2", "v3"):
        (root / version).rename(root / f".{version}.11.removed")

    assert store.versions() == ["v1", "v4"]
    assert store.prune(1) == []
    assert store.versions() == ["v1", "v2", "v4"]


def test_what_two_prunings_overtake_is_published_whole(store: BundleStore, root: Path) -> None:
    """A version removed by one pruner and published again is not hidden by another pruner."""
    publish(store, root, "v3")

    def prune_and_publish() -> None:
        """Prune all but the newest version and the reference, then publish v2 again as the newest."""
        BundleStore(root).prune(1)
        BundleStore(root).publish(source_with(root.parent / "again", "x"), "v2", {})

    others = Thread(target=prune_and_publish)

    class Overtaken(FolderStorage):
        """A storage that hides v2 only after the other thread had a second."""

        def hide(self, version: str) -> None:
            """Wait for the other thread before hiding v2, then hide the version."""
            if version == "v2":
                others.start()
                others.join(1.0)
            super().hide(version)

    BundleStore(Overtaken(root)).prune(1)
    others.join(60)

    assert store.versions()[-1] == "v2"
    store.open("v2").verify()


def prune_until(root: Path, stop: Event) -> None:
    """Prune all but the newest version repeatedly until stopped."""
    store = BundleStore(root)
    while not stop.is_set():
        store.prune(1)


def test_what_is_published_while_two_processes_prune_it_is_not_lost(store: BundleStore, root: Path) -> None:
    """A version published again while it is being removed stays complete until a newer version exists."""
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    pruners = [context.Process(target=prune_until, args=(root, stop), daemon=True) for _ in range(2)]
    for pruner in pruners:
        pruner.start()
    source, lost = source_with(root.parent / "source", "x" * 100_000), []
    try:
        for number in range(60):
            version = f"v{8 + number % 2}"
            wait_for(lambda wanted=version: wanted not in store.versions())
            store.publish(source, version, {"lineage": {"parents": {"started_from": "v1"}}})
            if version not in store.versions():
                lost.append(version)
    finally:
        stop.set()
        for pruner in pruners:
            pruner.join(60)

    assert lost == []
    assert [pruner.exitcode for pruner in pruners] == [0, 0]


def test_scratch_folders_of_killed_processes_are_removed_after_a_day(store: BundleStore, root: Path) -> None:
    """Old scratch folders are removed and recent ones kept, except for a folder with this process's own ID."""
    old, young, own = (source_with(root / name, "x") for name in (".v8.11", ".v9.12", f".v3.{os.getpid()}"))
    (own / "half").touch()
    os.utime(old, (1_000, 1_000))

    publish(store, root, "v3")
    store.prune(3)

    assert (old.exists(), young.exists()) == (False, True)
    assert set(store.open("v3").manifest["files"]) == {"decoder/config.json", "student.onnx"}


def test_failed_publication_leaves_nothing(store: BundleStore, root: Path, tmp_path: Path) -> None:
    """A failed publication leaves no files behind."""
    source = source_with(tmp_path / "source", "v3")
    (source / "dangling").symlink_to(tmp_path / "nowhere")

    with pytest.raises(shutil.Error):
        store.publish(source, "v3", {})

    assert sorted(path.name for path in root.iterdir()) == [".prune.lock", "v1", "v2"]


def test_a_promotion_from_a_version_that_is_no_longer_live_is_refused(store: BundleStore, monkeypatch) -> None:
    """A promotion fails if the live version changed during verification; `seen=None` means that no version was live."""
    store.promote("v1")
    verify = Bundle.verify

    def overtaken(bundle: Bundle) -> None:
        verify(bundle)
        monkeypatch.setattr(Bundle, "verify", verify)
        BundleStore(bundle.path.parent).promote("v2")

    monkeypatch.setattr(Bundle, "verify", overtaken)

    with pytest.raises(BundleMoved, match="the live version is v2 and no longer v1"):
        store.promote("v1")
    with pytest.raises(BundleMoved, match="the live version is v2 and no longer None"):
        store.promote("v1", None)
    assert store.live_version() == "v2"


def race(root: Path, moves: Barrier, outcomes: "Queue[tuple[str, str]]", rounds: int, act: str) -> None:
    """Make a move each round at the same time as the other processes, and report its outcome."""
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
    store: BundleStore, root: Path
) -> None:
    """Among concurrent moves, at most one promoter wins, and a rollback withdraws exactly the version it replaced."""
    publish(store, root, "v3")
    store.promote("v2")
    acts, rounds, context = ("rollback", "v1", "v3"), 8, multiprocessing.get_context("spawn")
    moves, outcomes = context.Barrier(len(acts) + 1), context.Queue()
    racers = [context.Process(target=race, args=(root, moves, outcomes, rounds, act), daemon=True) for act in acts]
    for racer in racers:
        racer.start()

    for _ in range(rounds):
        for _ in range(3):
            moves.wait(60)
        results: dict[str, Any] = dict(outcomes.get(timeout=60) for _ in acts)
        moved = {act for act, outcome in results.items() if outcome == "moved"}
        promoted = moved - {"rollback"}
        left = "".join(promoted) or "v2"
        assert moved
        assert len(promoted) <= 1
        assert set(results.values()) <= {"moved", "BundleMoved", "BundleNotFound"}
        wanted = ("v1", left, [left]) if "rollback" in moved else (left, "v2", [])
        assert (store.live_version(), store.previous_version(), list(store.withdrawals())) == wanted
        store.promote("v3", force=True)  # clears its withdrawal
        store.promote("v2", force=True)
    for racer in racers:
        racer.join(60)
    assert [racer.exitcode for racer in racers] == [0] * len(acts)


def test_a_release_goes_through_its_stages_and_ends_where_the_candidate_goes_live(releasing: BundleStore) -> None:
    """A stage applies from its recorded start; other promotions fail; promoting the candidate ends the release."""
    stages = [CanaryStage(0.05, 60.0), CanaryStage(0.5, 60.0)]
    canary = releasing.release("v1", stages, since_ms=1_000, by="ann", budgets={"latency": 0.1})
    releasing.report_canary("v1", "too few users", 1_500)
    with pytest.raises(CanaryError, match="a release of v1 is under way"):
        releasing.promote("v3")
    with pytest.raises(CanaryError, match="a release of v1 is under way"):
        releasing.release("v3", stages, since_ms=0)

    assert [canary.share_at(now_ms) for now_ms in (999, 1_000)] == [0.0, 0.05]
    assert releasing.record().canary == replace(canary, report="too few users", looked_ms=1_500)
    assert releasing.record().serving == ("v2", "v1")
    releasing.move_canary("v1", 1, 2_000, 1_500, by="bob")
    moved = releasing.record().canary
    assert [moved.share_at(now_ms) for now_ms in (1_999, 2_000)] == [0.05, 0.5]
    assert [moved.takes(position, 2_000) for position in (0.0, 0.499, 0.5)] == [True, True, False]
    assert (moved.report, moved.is_last_stage) == ("", True)
    releasing.promote("v1", by="cat")
    assert (releasing.live_version(), releasing.record().canary) == ("v1", None)
    notes = [(move.act, move.by, move.note) for move in releasing.record().history[-3:]]
    assert notes == [
        ("release", "ann", "v1 at 0.05 of users"),
        ("share", "bob", "v1 at 0.5 of users"),
        ("promote", "cat", ""),
    ]


@pytest.mark.parametrize(
    ("end", "is_withdrawn"),
    [
        (lambda store: store.withdraw("v1", by="judge", reason="latency"), True),
        (lambda store: store.withdraw("twin", by="ann", reason="bad data"), False),
        (lambda store: store.end_canary("v1", by="ann", note="later"), False),
        (lambda store: store.rollback("v3"), False),
        (lambda store: store.promote("v3", force=True), False),
    ],
)
def test_a_release_ends_with_its_version_or_with_what_it_is_compared_with(
    releasing: BundleStore, root: Path, end, is_withdrawn
) -> None:
    """A release ends with its candidate, with a withdrawn version of the same content, or with its baseline."""
    releasing.publish(source_with(root.parent / "source", "v1"), "twin", {})
    releasing.release("v1", [CanaryStage(0.5, 0.0)], since_ms=0)
    end(releasing)
    assert releasing.record().canary is None
    assert ("v1" in releasing.withdrawals()) == is_withdrawn
    with pytest.raises(CanaryError, match="no release of v1 is under way; none is"):
        releasing.report_canary("v1", "", 0)


def test_what_may_not_be_released(releasing: BundleStore) -> None:
    """A live or withdrawn version, a name without a live version, and invalid stages cannot be released."""
    releasing.withdraw("v3")
    before = releasing.record()
    for version, wrong in (("v2", "is already live"), ("v3", "was withdrawn")):
        with pytest.raises(BundleError, match=wrong):
            releasing.release(version, [CanaryStage(0.1, 0.0)], since_ms=0)
    with pytest.raises(CanaryError, match="no version is live yet"):
        releasing.named("mail").release("v1", [CanaryStage(0.1, 0.0)], since_ms=0)
    for stages in ([CanaryStage(1.0, 0.0)], [CanaryStage(0.2, 0.0), CanaryStage(0.1, 0.0)]):
        with pytest.raises(InvalidRequest, match=r"stages\[\d\].share: "):
            releasing.release("v1", stages, since_ms=0)
    assert releasing.record() == before


def add_items(store: BundleStore, root: Path, version: str) -> None:
    """Publish and promote a bundle that adds items to the live bundle, as `add-items` does."""
    live = store.live()
    publish(store, root, version, about={"lineage": lineage_of_addition(live.manifest, live.version)})
    store.promote(version, live.version)


@pytest.fixture
def trained(store: BundleStore, root: Path) -> BundleStore:
    """Trainings v1 and v2; items were added once to v1 and twenty times to v2, with pruning after each."""
    store.promote("v1")
    add_items(store, root, "v1-a")
    store.promote("v2")
    for number in range(20):
        add_items(store, root, f"v2-{number:02d}")
        store.prune(2)
    return store


def test_additions_do_not_take_the_way_back_away(trained: BundleStore) -> None:
    """Pruning counts trainings, and a rollback leaves a training together with all its additions."""
    assert trained.versions() == ["v1", "v2", "v1-a", "v2-18", "v2-19"]
    assert (trained.live_version(), trained.previous_version()) == ("v2-19", "v1-a")

    assert trained.rollback(by="ann", reason="bad") == "v1-a"
    assert set(trained.withdrawals()) == {"v2", "v2-18", "v2-19"}
    with pytest.raises(BundleWithdrawn):
        trained.promote("v2")


def test_the_way_back_is_kept_however_few_trainings_are(trained: BundleStore, root: Path) -> None:
    """Rollback targets survive pruning, even after more additions than the history holds."""
    publish(trained, root, "v3")
    trained.promote("v3")
    for number in range(102):
        add_items(trained, root, f"v3-{number:03d}")
    trained.prune(1)

    assert trained.versions() == ["v1", "v2", "v2-19", "v3", "v3-100", "v3-101"]  # v1 is the reference
    assert [trained.rollback(), trained.rollback()] == ["v2-19", "v1"]


def test_a_rollback_within_a_training_leaves_its_earlier_versions(trained: BundleStore) -> None:
    """A rollback to an earlier addition by name withdraws only the later additions."""
    assert trained.rollback("v2-18") == "v2-18"
    assert set(trained.withdrawals()) == {"v2-19"}
    assert trained.rollback() == "v1-a"
    assert set(trained.withdrawals()) == {"v2", "v2-18", "v2-19"}


def test_the_only_training_goes_back_to_fewer_items(store: BundleStore, root: Path) -> None:
    """If no other weights have served, a rollback goes to the previous addition."""
    store.promote("v1")
    shutil.rmtree(root / "v2")
    add_items(store, root, "v1-a")

    assert store.rollback() == "v1"
    assert set(store.withdrawals()) == {"v1-a"}


def test_a_variant_is_of_its_parents_training_and_has_weights_of_its_own(trained: BundleStore, root: Path) -> None:
    """A rollback from a variant goes to its parent and withdraws its additions; pruning keeps unpromoted variants."""
    parent = trained.open("v2")
    for name in ("int8", "int4"):
        publish(trained, root, name, about={"lineage": lineage_of_variant(parent.manifest, "v2")})
    trained.promote("int8")
    add_items(trained, root, "int8-a")
    trained.prune(1)

    assert {"int4", "int8", "int8-a", "v2"} <= set(trained.versions())
    assert trained.rollback() == "v2-19"
    assert set(trained.withdrawals()) == {"int8", "int8-a"}


def test_withdrawing_a_training_withdraws_what_was_made_from_it(trained: BundleStore, root: Path) -> None:
    """Withdrawing a training withdraws existing and future derived versions; it fails if one of these is live."""
    with pytest.raises(BundleNotFound, match="v2-19, which is live, was made from"):
        trained.withdraw("v2")
    trained.promote("v1-a")
    trained.withdraw("v2", by="ann")

    assert set(trained.withdrawals()) == {"v2", "v2-18", "v2-19"}
    publish(trained, root, "int8", about={"lineage": lineage_of_variant({}, "v2")})
    with pytest.raises(BundleWithdrawn, match="int8 was made from v2: v2 was withdrawn by ann"):
        trained.promote("int8")
    trained.promote("int8", force=True)
    add_items(trained, root, "int8-a")


def test_a_name_that_cannot_be_read_ends_no_run(trained: BundleStore, root: Path) -> None:
    """An unreadable name prevents pruning; a run that prunes after publication still succeeds."""
    trained.named("mail").promote("v1")
    (root / "names" / "mail.json").write_text("{}")
    before = trained.versions()

    trained.prune_after_publication(1)
    assert trained.versions() == before
    with pytest.raises(BundleCorrupt, match=r"names/mail\.json"):
        trained.prune(1)


class Interrupted(FolderStorage):
    """A folder where another actor moves the name just before the next swap."""

    def __init__(self, root: Path, moves: Callable[[], object]) -> None:
        super().__init__(root)
        self.moves = [moves]

    def swap_record(self, name: str, seen: str | None, content: bytes) -> bool:
        """Run the interfering move once, then swap."""
        if self.moves:
            self.moves.pop()()
        return super().swap_record(name, seen, content)


def moved_store(root: Path) -> BundleStore:
    """A store of small versions where `live` replaced `old`."""
    store = BundleStore(root)
    publish(store, root, *VERSIONS)
    promote(store, "old", "live")
    return store


@pytest.mark.parametrize("act", ANALYSIS)
@pytest.mark.parametrize("person", PEOPLE)
def test_the_analysis_does_not_overrule_people(root: Path, person: str, act: str) -> None:
    """If a person moved the name between the analysis's read and its swap, the analysis changes nothing."""
    store = moved_store(root)
    seen = release(store)
    analysis = BundleStore(Interrupted(root, lambda: PEOPLE[person](store)))

    with pytest.raises(CanaryError, match="no longer under way"):
        ANALYSIS[act](analysis, seen)

    record = store.record()
    assert "release" not in {move.by for move in record.history} | {
        withdrawal.by for withdrawal in record.withdrawn.values()
    }
    assert (record.live == "new") == (person == "promote by hand")


class FolderMoves(Moves):
    """The same moves in any order, over a folder."""

    @staticmethod
    def open_store() -> BundleStore:
        return moved_store(Path(tempfile.mkdtemp()) / "bundles")


FolderMoves.TestCase.settings = settings(max_examples=10, stateful_step_count=20)
TestFolderMoves = FolderMoves.TestCase


def test_a_promotion_that_is_taken_back_leaves_what_others_moved_meanwhile(store: BundleStore, root: Path) -> None:
    """Reverting a promotion of a pruned version keeps a withdrawal that happened in between."""
    publish(store, root, "v3")
    promote(store, "v1")

    class Pruned(FolderStorage):
        """Removes the version right after the swap that promoted it."""

        def swap_record(self, name: str, seen: str | None, content: bytes) -> bool:
            """Swap, remove v2, and withdraw v3."""
            swapped = super().swap_record(name, seen, content)
            if (root / "v2").exists():
                shutil.rmtree(root / "v2")
                store.withdraw("v3", by="ann")
            return swapped

    with pytest.raises(BundleNotFound):
        BundleStore(Pruned(root)).promote("v2")
    assert (store.live_version(), store.previous_version(), list(store.withdrawals())) == ("v1", None, ["v3"])
