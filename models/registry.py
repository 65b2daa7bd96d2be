"""The bundle registry: immutable versions of everything that must match, and one pointer to the live version. No torch.

    <root>/<version>/manifest.json      its description, and the SHA-256 of every other file
                     decoder/           Hugging Face layout: config.json, model.safetensors
                     student.onnx
                     catalogue.parquet
                     report.json        the evaluation
    <root>/LIVE                         the version that serves
    <root>/PREVIOUS                     the version that served before it

A bundle is written in a scratch folder and renamed into place. The pointer is replaced by a rename, so a reader sees the
old version or the new one, never a mixture, also after a power loss.
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.catalogue import Catalogue, load_catalogue, load_item_ids
from models.files import file_sha256, rename_durably
from services.errors import BundleCorrupt, BundleNotFound


@dataclass(frozen=True, slots=True)
class Bundle:
    """One published version, verified against its manifest."""

    version: str
    path: Path
    manifest: dict[str, Any]

    @property
    def decoder_dir(self) -> Path:
        """The decoder's checkpoint folder."""
        return self.path / "decoder"

    @property
    def student_path(self) -> Path:
        """The student's ONNX file."""
        return self.path / "student.onnx"

    def catalogue(self) -> Catalogue:
        """Read the catalogue."""
        return load_catalogue(self.path / "catalogue.parquet")

    def item_ids(self) -> tuple[str, ...]:
        """Read the ids of the catalogue's items alone, in index order."""
        return load_item_ids(self.path / "catalogue.parquet")

    def report(self) -> dict[str, Any]:
        """Read the evaluation report."""
        report: dict[str, Any] = json.loads((self.path / "report.json").read_text())
        return report


class BundleStore:
    """The folder of bundles and its pointer."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def publish(self, source: Path, version: str, about: dict[str, Any]) -> Bundle:
        """Copy `source` as `version` with a manifest of hashes. Does not promote. An existing version is kept."""
        target = self._root / version
        if not target.exists():
            scratch = self._root / f".{version}.{os.getpid()}"
            shutil.rmtree(scratch, ignore_errors=True)  # of a killed publication: a container's ids come again
            try:
                shutil.copytree(source, scratch)
                manifest = {"version": version, **about, "files": hashes(scratch)}
                (scratch / "manifest.json").write_text(json.dumps(manifest, indent=1, sort_keys=True))
                rename_durably(scratch, target)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
        return self.open(version)

    def open(self, version: str) -> Bundle:
        """Open one version and verify every hash. Raises BundleNotFound or BundleCorrupt."""
        path = self._root / version
        try:
            manifest = json.loads((path / "manifest.json").read_text())
        except (FileNotFoundError, NotADirectoryError) as error:
            raise BundleNotFound(f"no bundle {version} under {self._root}") from error
        except ValueError as error:
            raise BundleCorrupt(f"{path}/manifest.json: not JSON") from error
        listed = manifest.get("files") if isinstance(manifest, dict) else None
        if not isinstance(listed, dict):
            raise BundleCorrupt(f"{path}/manifest.json: lists no files")
        found = hashes(path)
        for name, expected in listed.items():
            if found.get(name) != expected:
                raise BundleCorrupt(f"{path / name}: {'hash differs' if name in found else 'missing'}")
        return Bundle(version, path, manifest)

    def versions(self) -> list[str]:
        """Return all published versions, oldest first."""
        if not self._root.exists():
            return []
        found = [path for path in self._root.iterdir() if path.is_dir() and not path.name.startswith(".")]
        return [path.name for path in sorted(found, key=lambda path: (path.stat().st_mtime, path.name))]

    def live_version(self) -> str | None:
        """Return the version that the pointer names, or None before the first promotion. One small read."""
        return self._read("LIVE")

    def live(self) -> Bundle:
        """Open the live bundle. Raises BundleNotFound before the first promotion."""
        version = self.live_version()
        if version is None:
            raise BundleNotFound(f"nothing published under {self._root}; run `tailrace pipeline`")
        return self.open(version)

    def promote(self, version: str) -> None:
        """Make this version live by one atomic move, after verifying it."""
        self.open(version)
        before = self.live_version()
        if before == version:
            return
        if before is not None:
            self._write("PREVIOUS", before)
        self._write("LIVE", version)

    def rollback(self) -> str:
        """Make the previously live version live again and return it. Raises BundleNotFound."""
        previous = self._read("PREVIOUS")
        if previous is None or previous == self.live_version():  # equal when a promotion was cut short
            raise BundleNotFound("no earlier version to go back to")
        self.promote(previous)
        return previous

    def prune(self, keep: int) -> list[str]:
        """Remove all but the newest `keep` versions, the live one and the one before it; return the removed versions."""
        versions = self.versions()
        spared = {*versions[-keep:], self.live_version(), self._read("PREVIOUS")}
        removed = [version for version in versions if version not in spared]
        for version in removed:
            going = self._root / f".{version}.{os.getpid()}"
            (self._root / version).rename(going)  # so that no reader opens a part of it
            shutil.rmtree(going)
        return removed

    def _read(self, pointer: str) -> str | None:
        try:
            return (self._root / pointer).read_text().strip() or None
        except FileNotFoundError:
            return None

    def _write(self, pointer: str, version: str) -> None:
        scratch = self._root / f".{pointer}.{os.getpid()}"
        scratch.write_text(version + "\n")
        rename_durably(scratch, self._root / pointer)


def hashes(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file below the folder except the manifest."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json")
    return {path.relative_to(folder).as_posix(): file_sha256(path) for path in files}
