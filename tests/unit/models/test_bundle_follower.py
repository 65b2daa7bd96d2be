"""Following the live pointer: when a version that failed is tried again, and a pointer that cannot be read."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from models.bundle_follower import BundleFollower
from models.registry import Bundle, BundleStore
from tests.support.bundles import publish_bundle
from tests.support.wait import until


class Loader:
    """Returns the bundle as it is, or fails while its version is among the broken ones."""

    def __init__(self) -> None:
        self.broken: set[str] = set()
        self.tried: list[str] = []
        self.swapped: list[str] = []

    def load(self, bundle: Bundle) -> Bundle:
        """Return the bundle, or fail."""
        self.tried.append(bundle.version)
        if bundle.version in self.broken:
            raise MemoryError(bundle.version)
        return bundle

    def swap(self, bundle: Bundle) -> None:
        """Record the version."""
        self.swapped.append(bundle.version)


Start = Callable[[Loader], BundleFollower[Bundle]]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with v1 and v2, of which v2 is live."""
    for version in ("v1", "v2"):
        publish_bundle(tmp_path / "bundles", version)
    return tmp_path / "bundles"


@pytest.fixture
def start(root: Path) -> Iterator[Start]:
    """A function that starts a follower with a short poll; it is stopped afterwards."""
    started: list[BundleFollower[Bundle]] = []

    def start_one(loader: Loader) -> BundleFollower[Bundle]:
        started.append(BundleFollower(BundleStore(root), 0.1, loader.load, loader.swap))
        started[-1].start()
        return started[-1]

    yield start_one
    for follower in started:
        follower.stop()


async def test_a_version_that_failed_is_tried_again_once_the_pointer_has_moved(start: Start, root: Path) -> None:
    """After a rollback the same version can be promoted again: the cause may be gone. Until then it is tried once."""
    loader, store = Loader(), BundleStore(root)
    loader.broken = {"v1"}
    follower = start(loader)
    store.promote("v1")
    await until(lambda: loader.tried == ["v2", "v1"])
    store.rollback()
    loader.broken.clear()
    await until(lambda: follower.tried is None)

    store.promote("v1")

    await until(lambda: follower.loaded == "v1")
    assert loader.tried == ["v2", "v1", "v1"]
    assert loader.swapped == ["v2", "v1"]


async def test_with_nothing_loaded_a_version_that_failed_is_tried_until_it_loads(start: Start) -> None:
    """A replica that started while a bundle could not be loaded does not stay empty."""
    loader = Loader()
    loader.broken = {"v2"}
    follower = start(loader)
    await until(lambda: len(loader.tried) > 2)

    loader.broken.clear()

    await until(lambda: follower.loaded == "v2")


async def test_a_pointer_that_cannot_be_read_ends_nothing(start: Start, root: Path) -> None:
    """While the pointer cannot be read the loaded version stays, and later versions are followed again."""
    follower, pointer = start(Loader()), root / "LIVE"
    pointer.unlink()
    pointer.mkdir()
    later = start(Loader())
    follower.refresh()
    assert (follower.loaded, later.loaded) == ("v2", None)

    pointer.rmdir()
    pointer.write_text("v1\n")

    await until(lambda: follower.loaded == later.loaded == "v1")
    assert follower.is_alive
    assert later.is_alive
