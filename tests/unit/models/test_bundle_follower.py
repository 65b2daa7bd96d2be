"""Following the live pointer: retries of a failed version, the files read, and an unreadable pointer."""

import json
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from models.errors import BundleCorrupt, CanaryError
from models.registry.bundle import Bundle
from models.registry.bundle_follower import BundleFollower, Serving, due_names
from models.registry.canary import CanaryStage
from models.registry.name_record import NameRecord
from models.registry.store import BundleStore
from tests.support.clock import Clock
from tests.support.training.bundles import point_to, publish_bundle

VERSIONS = ("a", "b", "c")


class Loader:
    """Returns the bundle unchanged; fails for versions in `broken`."""

    def __init__(self) -> None:
        self.broken: set[str] = set()
        self.serving: Serving[Bundle] = Serving()
        self.tried: list[str] = []
        self.swapped: list[str | None] = []

    def load(self, bundle: Bundle) -> Bundle:
        """Return the bundle, or fail if its version is broken."""
        self.tried.append(bundle.version)
        if bundle.version in self.broken:
            raise MemoryError(bundle.version)
        return bundle

    def swap(self, serving: Serving[Bundle]) -> None:
        """Record the new serving state and its live version."""
        self.serving = serving
        self.swapped.append(serving.live)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store with v1 and v2, where v2 is live."""
    for version in ("v1", "v2"):
        publish_bundle(tmp_path / "bundles", version)
    return tmp_path / "bundles"


@pytest.mark.parametrize("role", ["live", "candidate"])
def test_a_version_that_failed_is_tried_again_ever_more_rarely(root: Path, role: str) -> None:
    """A failed version is retried with backoff, about 15 times in 10 minutes, while the other keeps serving."""
    store, loader, clock = BundleStore(root), Loader(), Clock()
    follower = BundleFollower(store, loader.load, loader.swap, clock)
    follower.refresh()
    store.promote("v1") if role == "live" else store.release("v1", [CanaryStage(0.5, 0.0)], 0)
    loader.broken = {"v1"}

    for _ in range(600):
        follower.refresh()
        clock.now_s += 1.0

    assert 10 < loader.tried.count("v1") < 20
    assert (loader.serving.live, loader.serving.canary, loader.swapped) == ("v2", None, ["v2"])
    loader.broken.clear()
    for _ in range(60):
        follower.refresh()
        clock.now_s += 1.0
    assert loader.serving.live == ("v1" if role == "live" else "v2")
    assert (loader.serving.canary is not None) == (role == "candidate")


@pytest.mark.parametrize("harm", ["change", "remove"])
def test_corrupt_content_is_given_up_and_a_missing_file_is_not(root: Path, harm: str) -> None:
    """A version with a wrong hash is never retried; a version with a missing file is."""
    clock, tried = Clock(), []

    def load(bundle: Bundle) -> Bundle:
        tried.append(bundle.version)
        bundle.catalogue()
        return bundle

    follower = BundleFollower(BundleStore(root), load, lambda bundle: None, clock)
    victim = root / "v1" / "catalogue.parquet"
    whole = victim.read_bytes()
    victim.write_bytes(b"other") if harm == "change" else victim.unlink()
    for version in ("v1", "v2", "v1"):
        point_to(root, version)
        follower.refresh()
        clock.now_s += 100.0
    victim.write_bytes(whole)
    follower.refresh()

    assert follower.serving.live == ("v2" if harm == "change" else "v1")
    assert tried.count("v1") == (1 if harm == "change" else 3)


def test_a_process_reads_only_the_files_that_it_needs(root: Path) -> None:
    """A gateway loads a bundle's student and catalogue even if the decoder is corrupt."""
    (root / "v2" / "decoder" / "model.safetensors").write_bytes(b"other")
    used = []
    follower = BundleFollower(BundleStore(root), lambda bundle: (bundle.student_path, bundle.catalogue()), used.append)

    follower.refresh()

    assert len(used) == 1
    with pytest.raises(BundleCorrupt, match=r"model\.safetensors"):
        BundleStore(root).live().decoder_dir  # noqa: B018 - verifies


def test_a_record_of_wrong_types_leaves_what_serves(root: Path) -> None:
    """With an invalid canary record, the follower keeps the last valid record and reports the corruption."""
    loader = Loader()
    follower = BundleFollower(BundleStore(root), loader.load, loader.swap)
    follower.refresh()
    path = root / "names" / "default.json"
    valid = path.read_text()
    canary = {
        "version": "v1",
        "salt": "s",
        "stages": [{"share": 0.5, "hold_s": 1}],
        "by": "",
        "at": "",
        "since_ms": "x",
    }
    path.write_text(json.dumps(json.loads(valid) | {"canary": canary}))

    follower.refresh()

    assert (follower.serving.live, follower.serving.canary, follower.is_record_corrupt) == ("v2", None, True)
    path.write_text(valid)
    follower.refresh()
    assert not follower.is_record_corrupt


def test_a_pointer_that_cannot_be_read_ends_nothing(root: Path) -> None:
    """While the pointer is unreadable the loaded version keeps serving; the follower resumes once it is readable."""
    follower, later = (BundleFollower(BundleStore(root), loader.load, loader.swap) for loader in (Loader(), Loader()))
    follower.refresh()
    pointer = root / "names" / "default.json"
    pointer.unlink()
    pointer.mkdir()

    for replica in (follower, later):
        replica.refresh()

    assert (follower.serving.live, later.serving.live) == ("v2", None)
    pointer.rmdir()
    point_to(root, "v1")
    for replica in (follower, later):
        replica.refresh()
    assert follower.serving.live == later.serving.live == "v1"


def model_of(looks: Sequence[tuple[NameRecord, frozenset[str]]]) -> tuple[str | None, str | None, set[str], list[str]]:
    """Return the expected live version, canary version, loaded versions and load attempts after a series of refreshes.

    Each refresh has a record and the versions that fail at that time. A version stays loaded between refreshes only
    while it serves, or while it replaces a live version that fails.
    """
    live, loaded, tried = None, set[str](), list[str]()
    for record, broken in looks:
        named = [version for version in (record.live, record.canary and record.canary.version) if version is not None]
        live = record.live if record.live in loaded else live
        loaded &= {live, *named}
        for version in named:
            if version not in loaded:
                tried.append(version)
                if version not in broken:
                    loaded.add(version)
        live = record.live if record.live in loaded else live
        loaded &= {live, *named}
    canary = looks[-1][0].canary if looks else None
    return live, canary.version if canary is not None and canary.version in loaded else None, loaded, tried


class FollowedName(RuleBasedStateMachine):
    """Moves a name arbitrarily while versions break and recover; the follower refreshes now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        root = Path(self.folder.name) / "bundles"
        self.store = BundleStore(root)
        for version in VERSIONS:
            source = Path(self.folder.name) / version
            source.mkdir()
            (source / "report.json").write_text(version)
            self.store.publish(source, version, {})
        self.loader, self.clock = Loader(), Clock()
        self.follower = BundleFollower(self.store, self.loader.load, self.loader.swap, self.clock)
        self.eager, self.sparing = Loader(), Loader()
        self.eager.broken = self.sparing.broken = self.loader.broken
        self.polled = [
            BundleFollower(self.store, loader.load, loader.swap, self.clock) for loader in (self.eager, self.sparing)
        ]
        self.looks: list[tuple[NameRecord, frozenset[str]]] = []

    def teardown(self) -> None:
        self.folder.cleanup()

    @rule(version=st.sampled_from(VERSIONS))
    def promote(self, version: str) -> None:
        self.store.promote(version, force=True)

    @rule(version=st.sampled_from(VERSIONS))
    def release(self, version: str) -> None:
        with suppress(CanaryError):
            self.store.release(version, [CanaryStage(0.1, 0.0), CanaryStage(1.0, 0.0)], 0)

    @rule()
    def move(self) -> None:
        """Move a release to its second stage, or end it in its last stage."""
        if (canary := self.store.record().canary) is not None:
            if canary.is_last_stage:
                self.store.end_canary(canary.version)
            else:
                self.store.move_canary(canary.version, 1, 0, 0)

    @rule(version=st.sampled_from(VERSIONS))
    def break_or_mend(self, version: str) -> None:
        """Toggle whether a version fails to load."""
        self.loader.broken ^= {version}

    @rule()
    def look(self) -> None:
        """Refresh after every retry is due."""
        self.clock.now_s += 100.0
        self.looks.append((self.store.record(), frozenset(self.loader.broken)))
        self.follower.refresh()

    @rule(pause_s=st.floats(0.1, 5.0))
    def poll(self, pause_s: float) -> None:
        """Refresh one follower always, the other if it is due by the marks."""
        self.clock.now_s += pause_s
        always, if_due = self.polled
        always.refresh()
        for _ in due_names({"default": if_due}):
            if_due.refresh()
        assert (self.eager.serving, self.eager.tried) == (self.sparing.serving, self.sparing.tried)

    @invariant()
    def it_serves_what_the_model_serves(self) -> None:
        """The follower serves what the model serves, with the same load attempts and the canary of the record."""
        live, canary, loaded, tried = model_of(self.looks)
        serving = self.loader.serving
        assert (serving.live, serving.canary and serving.canary.version, set(serving.loaded)) == (live, canary, loaded)
        assert self.loader.tried == tried
        assert all(bundle.version == version for version, bundle in serving.loaded.items())
        if self.looks and canary is not None:
            assert serving.canary == self.looks[-1][0].canary


FollowedName.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestFollowedName = FollowedName.TestCase


def test_the_live_version_does_not_wait_for_the_candidate(root: Path) -> None:
    """The live version is handed over before the candidate is opened."""
    store, seen = BundleStore(root), list[tuple[str, str | None]]()
    store.release("v1", [CanaryStage(0.5, 0.0)], 0)
    loader = Loader()

    def load(bundle: Bundle) -> Bundle:
        """Record the live version at the time of this load."""
        seen.append((bundle.version, loader.serving.live))
        return bundle

    BundleFollower(store, load, loader.swap, Clock()).refresh()

    assert seen == [("v2", None), ("v1", "v2")]


class Names:
    """Followers of three names of a folder, with a clock; v1 is live under the first two names."""

    def __init__(self, root: Path) -> None:
        self.stores = {name: BundleStore(root, name) for name in ("default", "mail", "none")}
        for name in ("default", "mail"):
            self.stores[name].promote("v1")
        self.loaders = {name: Loader() for name in self.stores}
        self.clock = Clock()
        self.followers = {
            name: BundleFollower(store, self.loaders[name].load, self.loaders[name].swap, self.clock)
            for name, store in self.stores.items()
        }

    def poll(self) -> list[str]:
        """Refresh the due followers, and return the refreshed names that have a record."""
        due = due_names(self.followers)
        for name in due:
            self.followers[name].refresh()
        return [name for name in due if name != "none"]


@pytest.fixture
def names(root: Path) -> Names:
    """Names that were read once."""
    names = Names(root)
    assert names.poll() == ["default", "mail"]
    return names


def test_an_unchanged_record_is_not_read(names: Names) -> None:
    """Only the name whose record has changed is due, also a name whose first version is promoted."""
    assert names.poll() == []
    names.stores["mail"].promote("v2")
    names.stores["none"].promote("v2")
    assert names.poll() == ["mail"]

    assert names.loaders["mail"].serving.live == names.loaders["none"].serving.live == "v2"
    assert due_names(names.followers) == []


def test_an_unchanged_record_is_read_again_after_a_minute(names: Names) -> None:
    """A read that a faulty store answered with another valid record does not last."""
    names.clock.now_s += 59.0
    assert names.poll() == []
    names.clock.now_s += 1.0
    assert names.poll() == ["default", "mail"]


def test_a_name_with_a_failed_version_is_due_when_the_version_is(names: Names) -> None:
    """The record has not changed, but the version is tried again after its pause."""
    names.loaders["mail"].broken = {"v2"}
    names.stores["mail"].promote("v2")
    assert names.poll() == ["mail"]

    assert names.poll() == []
    names.clock.now_s += 1.0
    assert names.poll() == ["mail"]
    assert names.loaders["mail"].tried == ["v1", "v2", "v2"]


def test_a_record_that_cannot_be_read_delays_no_other_name(names: Names, root: Path) -> None:
    """An unreadable record is due at each poll; the others are due only after a change."""
    path = root / "names" / "mail.json"
    path.rename(root / "kept")
    path.mkdir()
    assert [names.poll(), names.poll()] == [["mail"]] * 2
    names.stores["default"].promote("v2")
    assert names.poll() == ["default", "mail"]

    path.rmdir()
    path.write_text("{")
    assert [names.poll(), names.poll()] == [["mail"]] * 2
    (root / "kept").rename(path)
    assert [names.poll(), names.poll()] == [["mail"], []]
    assert names.loaders["mail"].serving.live == "v1"
