"""Bundles in a real object store: racing moves, broken transfers, outages, wrong credentials, and modified objects."""

import itertools
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from obstore.store import from_url

from models.errors import BundleCorrupt, BundleError, BundleNotFound, ConfigError, StoreUnavailable
from models.registry.bundle_follower import BundleFollower, due_names
from models.registry.storage.objects import ObjectStorage
from models.registry.store import BundleStore
from tests.support.release_moves import VERSIONS, Moves
from tests.support.servers import Server, object_environment

GIB = 2**30


@pytest.fixture
def url(object_store: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """This test's own prefix in the bucket, with the credentials in the environment."""
    object_store.ensure_running()
    for name, value in object_environment(object_store).items():
        monkeypatch.setenv(name, value)
    return f"s3://bundles/{tmp_path.name}"


def open_at(url: str, cache: Path, cache_bytes: int = GIB, name: str = "default") -> BundleStore:
    """A process's view of the store, with its own cache."""
    return BundleStore(ObjectStorage(url, cache, cache_bytes), name)


def publish(store: BundleStore, tmp_path: Path, *versions: str, size: int = 1_000) -> None:
    """Publish versions that share one file and have one of their own."""
    for version in versions:
        source = tmp_path / f"source-{version}"
        (source / "decoder").mkdir(parents=True)
        (source / "decoder" / "model.safetensors").write_bytes(version.encode() * size)
        (source / "student.onnx").write_bytes(b"common" * 100)
        store.publish(source, version, {"dataset": "made up"})


def bucket_of(url: str) -> Any:
    """The object store without Tailrace."""
    return from_url(url, client_options={"allow_http": True})


def follower_of(store: BundleStore) -> BundleFollower[str]:
    """A follower that has read nothing yet, and loads only the versions' names."""
    return BundleFollower(store, lambda bundle: bundle.version, lambda _serving: None)


def poll(followers: dict[str, BundleFollower[str]]) -> list[str]:
    """Refresh the due followers, and return their names."""
    due = due_names(followers)
    for name in due:
        followers[name].refresh()
    return due


def objects(url: str, prefix: str) -> list[str]:
    return [entry["path"] for chunk in bucket_of(url).list(prefix) for entry in chunk]


def test_a_bundle_published_here_serves_there(url: str, tmp_path: Path) -> None:
    """Another machine lists, downloads, verifies, follows and rolls back; shared files are stored once."""
    here, there = open_at(url, tmp_path / "here"), open_at(url, tmp_path / "there")
    with pytest.raises(BundleNotFound, match="tailrace pipeline"):
        there.live()
    publish(here, tmp_path, "v1", "v2")
    here.promote("v1", by="ann")
    here.promote("v2", by="ann")
    here.named("mail").promote("v1", by="bob")

    assert there.versions() == ["v1", "v2"]
    assert there.live().decoder_dir.joinpath("model.safetensors").read_bytes() == b"v2" * 1_000
    assert there.rollback(by="eve", reason="bad lists") == "v1"
    assert (here.live_version(), here.previous_version(), list(here.withdrawals())) == ("v1", "v2", ["v2"])
    assert (here.names(), there.named("mail").record().owner) == (["default", "mail"], "bob")
    assert len(objects(url, "files/")) == 3
    with pytest.raises(BundleNotFound, match=r"no bundle v9 in s3://.*; nearest to it are v"):
        there.open("v9")


def test_what_a_manifest_says_brings_no_files_here(url: str, tmp_path: Path) -> None:
    """Setting the reference, withdrawing and pruning read descriptions; they download no weights."""
    here, there = open_at(url, tmp_path / "here"), open_at(url, tmp_path / "there")
    publish(here, tmp_path, "v1", "v2", "v3")
    here.promote("v3")

    reference = there.reference()
    assert reference is not None
    assert reference.version == "v1"
    there.withdraw("v2")
    assert there.prune(1) == ["v2"]
    assert not (tmp_path / "there" / "files").exists()


def test_a_report_comes_without_the_bundle(url: str, tmp_path: Path) -> None:
    """Reading a version's report downloads only the report, once and verified; a bundle without a report has none."""
    here, there = open_at(url, tmp_path / "here"), open_at(url, tmp_path / "there")
    publish(here, tmp_path, "v1")
    source = tmp_path / "reported"
    source.mkdir()
    (source / "student.onnx").write_bytes(b"weights" * 1_000)
    here.publish(source, "v2", {}, pages={"report.json": '{"dataset": "made up"}'})

    reports = [there.described("v2", with_report=True).report() for _ in range(2)]

    assert reports == [{"dataset": "made up"}] * 2
    assert there.described("v1", with_report=True).manifest["version"] == "v1"
    assert [path.stat().st_size for path in (tmp_path / "there" / "files").iterdir()] == [22]
    digest = there.described("v2").manifest["files"]["report.json"]
    bucket_of(url).put(f"files/{digest}", b"another report")
    with pytest.raises(BundleCorrupt, match="its content has another hash"):
        open_at(url, tmp_path / "third").described("v2", with_report=True)


def test_a_version_that_comes_back_keeps_its_place(url: str, tmp_path: Path) -> None:
    """A version keeps its publication order when shown or published again; while hidden it neither opens nor counts."""
    store = open_at(url, tmp_path / "cache")
    for version in ("b", "a"):
        publish(store, tmp_path, version)
        time.sleep(1.1)  # S3 reports publication times in seconds
    publish(store, tmp_path, "c")
    storage = ObjectStorage(url, tmp_path / "other", GIB)
    storage.hide("b")

    assert (store.versions(), storage.hidden()) == (["a", "c"], ["b"])
    with pytest.raises(BundleNotFound, match="no bundle b"):
        open_at(url, tmp_path / "other").open("b")
    storage.show("b")
    assert store.versions() == ["b", "a", "c"]

    storage.hide("b")
    publish(store, tmp_path / "again", "b")
    assert (store.versions(), storage.hidden()) == (["b", "a", "c"], [])
    assert store.prune(1) == ["a"]  # b is the reference
    assert objects(url, "versions/") == ["versions/b.json", "versions/c.json"]
    assert objects(url, "hidden/") == []


@pytest.mark.parametrize("step", ["hide", "_delete"])
def test_what_is_published_while_it_is_pruned_is_not_lost(url: str, tmp_path: Path, step: str) -> None:
    """A publication that races a hide or a removal by another process stays complete."""
    store, there = open_at(url, tmp_path / "cache"), open_at(url, tmp_path / "there")
    publish(store, tmp_path, "v1", "v2", "v3")

    def prune_and_publish() -> None:
        """Publish v2 again, after another pruning if it is not hidden yet."""
        if step == "hide":
            there.prune(1)
        publish(there, tmp_path / "again", "v2")

    others = Thread(target=prune_and_publish)

    class Overtaken(ObjectStorage):
        """A storage that lets the other process run for up to two seconds before each step for v2."""

        def hide(self, version: str) -> None:
            if step == "hide" and version == "v2":
                others.start()
                others.join(2.0)
            super().hide(version)

        def _delete(self, paths: list[str]) -> None:
            if step == "_delete" and "versions/v2.json" in paths:
                others.start()
                others.join(2.0)
            super()._delete(paths)

    BundleStore(Overtaken(url, tmp_path / "slow", GIB)).prune(1)
    others.join(60)

    assert "v2" in store.versions()
    open_at(url, tmp_path / "fresh").open("v2").verify()


def test_the_lock_of_a_killed_process_is_taken_and_who_lost_it_removes_nothing(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A publication waits for the lock until it expires; a slow holder detects the loss before it removes anything."""
    store = open_at(url, tmp_path / "cache")
    publish(store, tmp_path, "v1", "v2", "v3")
    bucket_of(url).put("lock", b"a process that was killed")
    monkeypatch.setattr("models.registry.storage.objects._LOCK_KEPT_S", 2)
    publish(store, tmp_path, "v4")
    assert store.versions() == ["v1", "v2", "v3", "v4"]

    class Slow(ObjectStorage):
        """A storage whose lock another process takes before anything is removed."""

        def sweep(self) -> None:
            """Remove hidden versions, after the other process took the lock."""
            bucket_of(url).put("lock", b"another process")
            super().sweep()

    with pytest.raises(StoreUnavailable, match="lock: another process took the lock; prune again"):
        BundleStore(Slow(url, tmp_path / "slow", GIB)).prune(1)
    assert len(objects(url, "versions/")) == 4
    assert bytes(bucket_of(url).get("lock").bytes()) == b"another process"
    assert store.prune(1) == []  # hidden by the process that lost the lock, and removed now
    assert objects(url, "versions/") == ["versions/v1.json", "versions/v4.json"]


RACE = """
import sys
from pathlib import Path
from models.errors import BundleMoved
from models.registry.store import BundleStore
from models.registry.storage.objects import ObjectStorage

url, cache, version = sys.argv[1:]
store = BundleStore(ObjectStorage(url, Path(cache), 2**30))
print("ready", flush=True)
sys.stdin.readline()
try:
    store.promote(version, "v0", by=version)
    print("moved")
except BundleMoved as error:
    print(error)
"""


def test_of_racing_promoters_one_wins_and_all_are_told(url: str, tmp_path: Path) -> None:
    """Each process saw v0 live; one wins and is recorded, and the loser's error names the winner."""
    store, racers = open_at(url, tmp_path / "cache"), [f"v{number}" for number in range(1, 7)]
    publish(store, tmp_path, "v0", *racers)
    store.promote("v0")
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, url, str(tmp_path / "cache"), version],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for version in racers
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"

    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    outputs = dict(zip(racers, (process.communicate(timeout=60)[0].strip() for process in processes), strict=True))

    (winner,) = [version for version, line in outputs.items() if line == "moved"]
    assert store.live_version() == winner
    assert [move.version for move in store.record().history] == ["v0", winner]
    assert all(
        f"the live version is {winner} and no longer v0" in outputs[version] for version in racers if version != winner
    )


def test_while_the_store_is_lost_what_was_loaded_serves_on(url: str, object_store: Server, tmp_path: Path) -> None:
    """In an outage a new process serves from this machine's cache, without a cache it is refused; all follow later."""
    store = open_at(url, tmp_path / "cache")
    publish(store, tmp_path, "v1", "v2")
    store.promote("v1")
    assert store.live().version == "v1"
    followers = {"default": follower_of(store)}
    assert poll(followers) == ["default"]
    store.named("mail").promote("v1")
    assert store.named("mail").live_version() == "v1"
    followers["mail"] = follower_of(store.named("mail"))
    object_store.kill()

    assert [poll(followers), store.is_lost, followers["mail"].serving.live] == [["mail"], True, "v1"]
    assert poll(followers) == []
    later, elsewhere = open_at(url, tmp_path / "cache"), open_at(url, tmp_path / "elsewhere")
    assert (later.live_version(), later.live().student_path.read_bytes()) == ("v1", b"common" * 100)
    for act in (elsewhere.live_version, lambda: later.promote("v2"), lambda: publish(later, tmp_path / "more", "v3")):
        with pytest.raises(StoreUnavailable, match=f"{url} cannot be used"):
            act()
    object_store.start()

    later.promote("v2")
    assert elsewhere.live().version == "v2"
    assert [poll(followers), poll(followers), store.is_lost] == [["default", "mail"], [], False]
    assert followers["default"].serving.live == "v2"


@pytest.mark.parametrize("num_names", [3, 30])
def test_one_look_at_the_records_finds_the_changed_names(url: str, tmp_path: Path, num_names: int) -> None:
    """The store checks the records of few names one by one, and lists the records of many names."""
    here, there = open_at(url, tmp_path / "here"), open_at(url, tmp_path / "there")
    publish(here, tmp_path, "v1", "v2")
    names = [f"name-{number}" for number in range(num_names)]
    for name in names:
        here.named(name).promote("v1")
    bucket_of(url).put("names/nested/name-0.json", b"{}")
    followers = {name: follower_of(there.named(name)) for name in names}

    assert [poll(followers), poll(followers)] == [names, []]
    here.named("name-0").promote("v2")
    assert [poll(followers), poll(followers)] == [["name-0"], []]

    assert followers["name-0"].serving.live == "v2"
    assert there.marks([*names, "absent"]) == {name: there.named(name).marked_record()[1] for name in names}


def test_a_download_goes_on_where_it_broke(url: str, tmp_path: Path) -> None:
    """A killed process's partial download is resumed; other content at its path is not used."""
    publish(open_at(url, tmp_path / "here"), tmp_path, "v1", size=500_000)
    digest = open_at(url, tmp_path / "here").open("v1").manifest["files"]["decoder/model.safetensors"]
    for kind, content in (("half", b"v1" * 200_000), ("other", b"x" * 300_000)):
        part = tmp_path / kind / "parts" / f"{digest}.1.1"
        part.parent.mkdir(parents=True)
        part.write_bytes(content)
        os.utime(part, (time.time() - 100, time.time() - 100))

        bundle = open_at(url, tmp_path / kind).open("v1")

        assert bundle.decoder_dir.joinpath("model.safetensors").read_bytes() == b"v1" * 500_000
        assert not list(part.parent.iterdir())


def test_versions_that_share_a_file_load_at_the_same_time(url: str, tmp_path: Path) -> None:
    """One process downloads several versions in threads; their shared file is not damaged by two writers."""
    versions = [f"v{number}" for number in range(6)]
    publish(open_at(url, tmp_path / "here"), tmp_path, *versions)
    for cache in range(10):
        there = open_at(url, tmp_path / f"cache-{cache}")
        with ThreadPoolExecutor(len(versions)) as pool:
            opened = list(pool.map(there.open, versions))

        assert [bundle.version for bundle in opened] == versions
        assert not list((tmp_path / f"cache-{cache}" / "parts").iterdir())


def test_deleted_files_of_a_cached_version_are_downloaded_again(url: str, tmp_path: Path) -> None:
    """A version opens, as it was published, after files of it were deleted from the cache, while it is in use too."""
    publish(open_at(url, tmp_path / "here"), tmp_path, "v1")
    there = tmp_path / "there"
    in_use = open_at(url, there).open("v1")
    for path in (*(there / "files").iterdir(), in_use.path / "student.onnx", in_use.path / "decoder/model.safetensors"):
        path.unlink()

    again = open_at(url, there).open("v1")

    assert (again.path / "student.onnx").read_bytes() == b"common" * 100
    assert (again.path / "decoder/model.safetensors").read_bytes() == b"v1" * 1_000


def test_files_that_vanish_while_the_cache_is_measured_are_not_counted(url: str, tmp_path: Path) -> None:
    """Other processes add files to the cache and delete them while a version makes room in it."""
    versions = [f"v{number}" for number in range(6)]
    publish(open_at(url, tmp_path / "here"), tmp_path, *versions)
    files = tmp_path / "there" / "files"
    files.mkdir(parents=True)
    stopped = Event()

    def other_processes() -> None:
        while not stopped.is_set():
            for path in [files / str(number) for number in range(100)]:
                path.touch()
            for path in [files / str(number) for number in range(100)]:
                path.unlink(missing_ok=True)

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(other_processes)
        try:
            opened = [open_at(url, tmp_path / "there").open(version) for version in versions]
        finally:
            stopped.set()
        other.result()

    assert [bundle.version for bundle in opened] == versions


@pytest.mark.parametrize("what", ["changed", "gone", "manifest"])
def test_what_changed_in_the_store_is_refused(url: str, tmp_path: Path, what: str) -> None:
    """A version with a changed or missing file or an unreadable manifest does not open; the live version stays."""
    here, there = open_at(url, tmp_path / "here"), open_at(url, tmp_path / "there")
    publish(here, tmp_path, "v1", "v2")
    here.promote("v1")
    digest = here.open("v2").manifest["files"]["decoder/model.safetensors"]
    bucket = bucket_of(url)
    if what == "changed":
        bucket.put(f"files/{digest}", b"other")
    elif what == "gone":
        bucket.delete(f"files/{digest}")
    else:
        bucket.put("versions/v2.json", b"{")

    with pytest.raises(BundleError) as refused:
        there.promote("v2")

    assert isinstance(refused.value, BundleNotFound if what == "gone" else BundleCorrupt)
    assert there.live_version() == "v1"
    assert not list((tmp_path / "there").glob(".v2.*"))


def test_a_hostile_manifest_writes_and_links_nowhere(url: str, tmp_path: Path) -> None:
    """Manifest names that lead out of the cache are refused before a download; other versions work as before."""
    here, there = open_at(url, tmp_path / "here"), open_at(url, tmp_path / "there")
    publish(here, tmp_path, "v1", "v2")
    here.promote("v1")
    digest = here.open("v2").manifest["files"]["student.onnx"]
    for number, name in enumerate((str(tmp_path / "x"), "../../../x", "a/../../x", "manifest.json")):
        body = json.dumps({"version": f"bad{number}", "files": {name: digest}})
        bucket_of(url).put(f"versions/bad{number}.json", body.encode())
    bucket_of(url).put("versions/bad4.json", json.dumps({"files": {"a": "../../secret"}}).encode())
    bucket_of(url).put("versions/bad5.json", b'{"files": {"a": ')
    bucket_of(url).put("versions/..json", b"{}")
    bucket_of(url).put("versions/a/b.json", b"{}")
    bucket_of(url).put("names/Not A Name.json", b"{}")

    for number in range(6):
        for act in (there.open, there.described, there.promote):
            with pytest.raises(BundleCorrupt, match=f"versions/bad{number}"):
                act(f"bad{number}")

    assert not (tmp_path / "x").exists()
    assert not (tmp_path / "there" / "files").exists()
    assert there.reference() is not None
    assert [version for version in there.versions() if version[:3] != "bad"] == ["v1", "v2"]
    assert there.names() == ["default"]
    there.prune(20)
    there.open("v2").verify()


def test_a_record_that_cannot_be_decoded_leaves_the_last_valid_one(url: str, tmp_path: Path) -> None:
    """With such a record in the store, a new process serves its machine's kept record; moves are refused."""
    here = open_at(url, tmp_path / "here")
    publish(here, tmp_path, "v1")
    here.promote("v1")
    assert open_at(url, tmp_path / "there").live_version() == "v1"
    bucket_of(url).put("names/default.json", b'{"live": ["v1"]}')
    there = open_at(url, tmp_path / "there")

    with pytest.raises(BundleCorrupt, match="names/default"):
        there.promote("v1")
    follower = follower_of(there)
    follower.refresh()
    assert (follower.serving.live, follower.is_record_corrupt) == ("v1", True)


def test_a_killed_upload_is_invisible_and_collected(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A day later the files of a killed upload are gone, kept versions' are not; publishing again restores them."""
    store = open_at(url, tmp_path / "cache")
    publish(store, tmp_path, "v1")
    store.promote("v1")
    bucket_of(url).put("files/" + "0" * 64, b"half a publication")

    store.prune(1)
    assert len(objects(url, "files/")) == 3
    monkeypatch.setattr("models.registry.storage.objects._KEPT_S", -1)
    store.prune(1)

    assert (store.versions(), len(objects(url, "files/"))) == (["v1"], 2)
    publish(store, tmp_path, "v2", "v3")
    assert store.prune(1) == ["v2"]
    assert open_at(url, tmp_path / "other").open("v3").student_path.read_bytes() == b"common" * 100


def test_a_report_that_is_evicted_before_its_link_is_downloaded_again(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may make room in the cache between the download and the link."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "student.onnx").write_bytes(b"student")
    open_at(url, tmp_path / "here").publish(source, "v1", {}, pages={"report.json": '{"dataset": "made up"}'})
    file, evictions = ObjectStorage._file, iter([True])

    def evicted(storage: ObjectStorage, digest: str) -> Path:
        path = file(storage, digest)
        if next(evictions, False):
            path.unlink()
        return path

    monkeypatch.setattr(ObjectStorage, "_file", evicted)
    assert open_at(url, tmp_path / "there").described("v1", with_report=True).report() == {"dataset": "made up"}


def test_the_cache_is_bounded(url: str, tmp_path: Path) -> None:
    """The least recently opened version is evicted from the cache, and downloaded again on demand."""
    publish(open_at(url, tmp_path / "here"), tmp_path, "v1", "v2", "v3", size=100_000)
    cache = tmp_path / "small"
    store = open_at(url, cache, cache_bytes=500_000)

    for version in ("v1", "v2", "v1", "v3"):
        store.open(version).verify()
        time.sleep(0.02)  # longer than a tick of the file system's clock

    assert sorted(path.name for path in (cache / "versions").iterdir()) == ["v1", "v3"]
    store.open("v2").verify()
    assert sum(path.stat().st_size for path in (cache / "files").iterdir()) < 500_000


_HOLD_V6 = """
import sys
from pathlib import Path
from models.registry.storage.objects import ObjectStorage
from models.registry.store import BundleStore
bundle = BundleStore(ObjectStorage(sys.argv[1], Path(sys.argv[2]), 1)).open("v6")
print("opened", flush=True)
input()
"""


def test_a_version_in_use_is_not_evicted(url: str, tmp_path: Path) -> None:
    """Threads and another process that open more versions than fit read each of them; unused versions are evicted."""
    versions = [f"v{number}" for number in range(7)]
    publish(open_at(url, tmp_path / "here"), tmp_path, *versions, size=100_000)
    cache = tmp_path / "small"
    store = open_at(url, cache, cache_bytes=250_000)
    with ThreadPoolExecutor(6) as pool:
        opened = list(pool.map(store.open, versions[:6]))

    arguments = (sys.executable, "-c", _HOLD_V6, url, str(cache))
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert "opened\n" in iter(other.stdout.readline, "")
        for bundle in opened:
            bundle.verify()
        opened.clear()
        del bundle
        publish(store, tmp_path, "v7", size=100_000)
        kept = sorted(path.name for path in (cache / "versions").iterdir())
        other.communicate("\n", timeout=30.0)

    assert kept == ["v6", "v7"]


def test_wrong_credentials_and_no_bucket_are_named(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the store's answer and the address setting; an unsupported URL is refused at once."""
    with pytest.raises(StoreUnavailable, match=r"bucket does not exist; .* TAILRACE_BUNDLE_STORE"):
        open_at("s3://nowhere/x", tmp_path).live_version()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(StoreUnavailable, match=r"SignatureDoesNotMatch.*s3:GetObject"):
        open_at(url, tmp_path).live_version()
    for wrong in ("ftp://host/x", "s3://", "bundles"):
        with pytest.raises(ConfigError, match="TAILRACE_BUNDLE_STORE"):
            open_at(wrong, tmp_path)


def test_the_analysis_does_not_overrule_people(object_store: Server, url: str, tmp_path: Path) -> None:
    """People and analysis may move the name in any order, as with a folder."""
    numbers = itertools.count()

    class ObjectMoves(Moves):
        """A new prefix for each run."""

        @staticmethod
        def open_store() -> BundleStore:
            """Versions of one small file each."""
            number = next(numbers)
            store = open_at(f"{url}/{number}", tmp_path / f"cache-{number}")
            for version in VERSIONS:
                source = tmp_path / f"source-{number}-{version}"
                source.mkdir()
                (source / "student.onnx").write_text(version)
                store.publish(source, version, {})
            for version in ("old", "live"):
                store.promote(version)
            return store

    run_state_machine_as_test(ObjectMoves, settings=settings(max_examples=4, stateful_step_count=15, database=None))
