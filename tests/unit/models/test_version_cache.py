"""The cached versions of an object store on this machine's disk."""

import json
from pathlib import Path

from models.files import file_sha256
from models.registry.storage.cache import VersionCache

_MAX_BYTES, _FILE_BYTES = 40_000, 1_000


def keep(cache: VersionCache, scratch: Path, version: str) -> None:
    """Keep a version of one file, which is linked as after a download."""
    scratch.mkdir()
    (scratch / "data").write_bytes(version.encode().ljust(_FILE_BYTES))
    (scratch / "manifest.json").write_text(json.dumps({"version": version}))
    cache.keep(scratch, version, {"data": file_sha256(scratch / "data")})


def test_two_processes_keep_the_bound_of_their_cache(tmp_path: Path) -> None:
    """Two processes that add versions in turn exceed the bound by no more than the version that is being added."""
    caches = [VersionCache(tmp_path / "cache", _MAX_BYTES) for _ in range(2)]
    sizes = []
    for number in range(150):
        keep(caches[number % 2], tmp_path / f"scratch-{number}", f"v{number}")
        sizes.append(sum(path.stat().st_size for path in caches[0].files.iterdir()))

    assert max(sizes) <= _MAX_BYTES + 2 * _FILE_BYTES
    assert min(sizes[50:]) > _MAX_BYTES / 2
    assert caches[1].has("v149")
    assert not caches[1].has("v0")
