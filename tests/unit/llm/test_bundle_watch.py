"""Following the live pointer without Ray: what broke is tried again when it should be, and a pointer that cannot be read ends nothing."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from models.registry import Bundle, BundleStore
from services.llm.ranking.bundle_watch import BundleWatch
from tests.support.bundles import publish_bundle
from tests.support.until import until


class Loader:
    """Loads nothing: a bundle is itself, and breaks while its version is among the broken ones."""

    def __init__(self) -> None:
        self.broken: set[str] = set()
        self.tried: list[str] = []

    def load(self, bundle: Bundle) -> Any:
        """Return the bundle, or break."""
        self.tried.append(bundle.version)
        if bundle.version in self.broken:
            raise MemoryError(bundle.version)
        return bundle


class IdleThread:
    """What runs an engine that has nothing to do."""

    is_alive = True

    def stop(self) -> None:
        """End at once."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with v1 and v2, of which v2 is live."""
    for version in ("v1", "v2"):
        publish_bundle(tmp_path / "bundles", version)
    return tmp_path / "bundles"


@pytest.fixture
def loader() -> Loader:
    """A loader at which nothing breaks yet."""
    return Loader()


@pytest.fixture
def watch_of(root: Path, loader: Loader) -> Iterator[Callable[[], BundleWatch]]:
    """The starter of a watch that polls quickly; it is stopped afterwards."""
    started: list[BundleWatch] = []

    def start() -> BundleWatch:
        started.append(BundleWatch(BundleStore(root), 0.01, loader.load, lambda _bundle: IdleThread()))  # type: ignore[arg-type,return-value]
        return started[-1]

    yield start
    for watch in started:
        watch.stop()


def version_of(watch: BundleWatch) -> str:
    """Name what serves."""
    return watch.current().bundle.version


async def test_a_version_that_broke_is_tried_again_once_the_pointer_has_moved(watch_of, loader, root) -> None:
    """After a rollback the same version can be promoted again: what it broke at may be gone. Until then it is tried once."""
    loader.broken = {"v1"}
    watch, store = watch_of(), BundleStore(root)
    store.promote("v1")
    await until(lambda: loader.tried == ["v2", "v1"])
    store.rollback()
    loader.broken.clear()
    await until(lambda: watch._news.tried is None)

    store.promote("v1")

    await until(lambda: version_of(watch) == "v1")
    assert loader.tried == ["v2", "v1", "v1"]


async def test_with_nothing_else_to_serve_a_version_that_broke_is_tried_until_it_loads(watch_of, loader) -> None:
    """A replica that came up in a bad moment does not stay empty for good."""
    loader.broken = {"v2"}
    watch = watch_of()
    await until(lambda: len(loader.tried) > 2)

    loader.broken.clear()

    await until(lambda: watch._serving is not None)
    assert version_of(watch) == "v2"


async def test_a_pointer_that_cannot_be_read_ends_nothing(watch_of, root) -> None:
    """While its disk fails the version before goes on, the replica stays healthy, and later news are followed."""
    watch, pointer = watch_of(), root / "LIVE"
    pointer.unlink()
    pointer.mkdir()
    later = watch_of()
    watch._refresh()

    pointer.rmdir()
    pointer.write_text("v1\n")

    await until(lambda: version_of(watch) == "v1")
    await until(lambda: later._serving is not None)
    for one in (watch, later):
        one.check_health()
