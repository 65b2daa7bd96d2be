"""Following the live pointer: when a version that failed is tried again, what is read of it, and a pointer that cannot be read."""

from pathlib import Path

import pytest

from models.bundle import Bundle
from models.bundle_follower import BundleFollower, Serving
from models.errors import BundleCorrupt
from models.registry import BundleStore
from tests.support.clock import Clock
from tests.support.training.bundles import point_to, publish_bundle
from tests.support.wait import until


class Loader:
    """Returns the bundle as it is, or fails while its version is among the broken ones."""

    def __init__(self) -> None:
        self.broken: set[str] = set()
        self.tried: list[str] = []
        self.swapped: list[str | None] = []

    def load(self, bundle: Bundle) -> Bundle:
        """Return the bundle, or fail."""
        self.tried.append(bundle.version)
        if bundle.version in self.broken:
            raise MemoryError(bundle.version)
        return bundle

    def swap(self, serving: Serving[Bundle]) -> None:
        """Record the live version."""
        self.swapped.append(serving.live)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with v1 and v2, of which v2 is live."""
    for version in ("v1", "v2"):
        publish_bundle(tmp_path / "bundles", version)
    return tmp_path / "bundles"


def test_a_version_that_failed_is_tried_again_ever_more_rarely(root: Path) -> None:
    """A full disk at the wrong moment does not keep a process at the old bundle; ten minutes of it cost about fifteen tries."""
    loader, clock = Loader(), Clock()
    follower = BundleFollower(BundleStore(root), 0.1, loader.load, loader.swap, clock)
    follower.refresh()
    BundleStore(root).promote("v1")
    loader.broken = {"v1"}
    for _ in range(600):
        follower.refresh()
        clock.now_s += 1.0
    num_tries = len(loader.tried) - 1
    loader.broken.clear()

    for _ in range(60):
        follower.refresh()
        clock.now_s += 1.0

    assert 10 < num_tries < 20
    assert loader.swapped == ["v2", "v1"]
    assert follower.serving.live == "v1"


@pytest.mark.parametrize("harm", ["change", "remove"])
def test_corrupt_content_is_given_up_and_a_missing_file_is_not(root: Path, harm: str) -> None:
    """A hash that differs stays different, whatever the pointer does meanwhile; a file that is missing may yet come."""
    clock, tried = Clock(), []

    def load(bundle: Bundle) -> Bundle:
        """Read the catalogue."""
        tried.append(bundle.version)
        bundle.catalogue()
        return bundle

    follower = BundleFollower(BundleStore(root), 0.1, load, lambda bundle: None, clock)
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
    """A gateway loads the student and the catalogue of a bundle whose decoder it cannot read."""
    (root / "v2" / "decoder" / "model.safetensors").write_bytes(b"other")
    used = []
    follower = BundleFollower(
        BundleStore(root), 0.1, lambda bundle: (bundle.student_path, bundle.catalogue()), used.append
    )

    follower.refresh()

    assert len(used) == 1
    with pytest.raises(BundleCorrupt, match=r"model\.safetensors"):
        BundleStore(root).live().decoder_dir  # noqa: B018 - verifies


async def test_a_pointer_that_cannot_be_read_ends_nothing(root: Path) -> None:
    """While the pointer cannot be read the loaded version stays, and later versions are followed again."""
    follower, later = (
        BundleFollower(BundleStore(root), 0.1, loader.load, loader.swap) for loader in (Loader(), Loader())
    )
    follower.start()
    pointer = root / "names" / "default.json"
    pointer.unlink()
    pointer.mkdir()
    later.start()
    try:
        follower.refresh()
        assert (follower.serving.live, later.serving.live) == ("v2", None)
        pointer.rmdir()
        point_to(root, "v1")

        await until(lambda: follower.serving.live == later.serving.live == "v1")
        assert follower.is_alive
        assert later.is_alive
    finally:
        follower.stop()
        later.stop()
