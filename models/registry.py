"""The bundle registry: immutable versions of everything that must match, and one pointer to the live version. No torch.

    <root>/<version>/manifest.json      its description, and the SHA-256 of every other file
                     decoder/           Hugging Face layout: config.json, model.safetensors
                     student.onnx
                     student_table/   the student's item rows and how they are searched, where the catalogue is large
                     student.safetensors   the same weights
                     catalogue.parquet
                     code_book.safetensors   where codes are deeper than 1: how new items get theirs
                     teacher/           where codes are deeper than 1 and the decoder had a teacher
                     item_text.safetensors   where the decoder's rows are learned from text: those of new items
                     judged/            the pair that the gate judged, where another one serves, which learned from all events: decoder/, student.safetensors, catalogue.parquet,
                                        and teacher/ and item_text.safetensors as above. Later starts and comparisons take it alone
                     report.json        the evaluation
                     report.md          the same for readers, with what the bundle was made from
    <root>/LIVE                         the version that serves
    <root>/PREVIOUS                     the version that served before it
    <root>/WITHDRAWN                    which versions were rolled back: they do not go live again without force (models.withdrawals)
    <root>/REFERENCE                    the version below which trainings may not fall, where a person set one (models.reference)

A bundle is written in a scratch folder and renamed into place. The pointer is replaced by a rename, so a reader sees the
old version or the new one, never a mixture, also after a power loss. It moves only from the version that its mover saw (compare
and swap, under a lock on the folder, which all four files are written under). A file is hashed when it is first needed, so a process reads its own files alone;
promotion hashes all.
"""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from typing import Any

from models.catalogue import Catalogue, load_catalogue, load_item_ids
from models.errors import BundleCorrupt, BundleError, BundleIncomplete, BundleMoved, BundleNotFound, BundleWithdrawn
from models.files import file_sha256, rename_durably
from models.reference import FILE as REFERENCE
from models.reference import Reference, read_reference, write_reference
from models.withdrawals import (
    FILE,
    SERVING,
    Withdrawal,
    content_of,
    read_withdrawals,
    refuse,
    without,
    write_withdrawals,
)

JUDGED = "judged"
"""The folder of the judged pair within a bundle."""
_SCRATCH_KEPT_S = 24 * 3_600
"""A scratch folder that is older belongs to no process that still writes it."""


class Seen(Enum):
    """What a promotion moves the pointer from, where that is no version that its caller saw live."""

    NOW = "whichever version is live now"


@dataclass(frozen=True, slots=True)
class Bundle:
    """One published version. Each file is verified against the manifest when it is asked for: BundleCorrupt, BundleIncomplete."""

    version: str
    path: Path
    manifest: dict[str, Any]

    @property
    def decoder_dir(self) -> Path:
        """The decoder's checkpoint folder, verified."""
        return self._verified("decoder")

    @property
    def student_path(self) -> Path:
        """The student's ONNX file, verified with the table beside it, where it has one."""
        self._verified("student_table")
        return self._verified("student.onnx")

    @property
    def student_weights_path(self) -> Path | None:
        """The student's weights, verified; None in a bundle without them."""
        return self._verified("student.safetensors") if "student.safetensors" in self.manifest["files"] else None

    @property
    def judged_dir(self) -> Path:
        """The folder of the pair that the gate judged: the bundle's own, where the judged pair serves. Not verified."""
        return self.path / JUDGED if f"{JUDGED}/catalogue.parquet" in self.manifest["files"] else self.path

    @property
    def started_from(self) -> str | None:
        """The version from whose weights its training started; None where it started from the beginning."""
        found: str | None = self.manifest.get("lineage", {}).get("parents", {}).get("started_from")
        return found

    @property
    def is_whole_training(self) -> bool:
        """Whether its training started from the beginning, and no items were added and nothing was optimised since."""
        lineage = self.manifest.get("lineage", {})
        return self.started_from is None and not lineage.keys() & {"items_added_to", "optimised_from"}

    @property
    def weight_kind(self) -> str:
        """How the decoder's weights are stored where it serves, as the engine's configuration names it; `model`, its dtype, unless an optimisation chose another."""
        found: str = self.manifest.get("serving", {}).get("weight_kind", "model")
        return found

    def catalogue(self) -> Catalogue:
        """Read the catalogue."""
        return load_catalogue(self._verified("catalogue.parquet"))

    def item_ids(self) -> tuple[str, ...]:
        """Read the ids of the catalogue's items alone, in index order."""
        return load_item_ids(self._verified("catalogue.parquet"))

    def report(self) -> dict[str, Any]:
        """Read the evaluation report."""
        report: dict[str, Any] = json.loads(self._verified("report.json").read_text())
        return report

    def verify(self) -> None:
        """Verify every file. Raises BundleCorrupt or BundleIncomplete."""
        for name in self.manifest["files"]:
            self._verified(name)

    def _verified(self, name: str) -> Path:
        """Return a file or folder of the bundle after verifying it."""
        for listed, expected in self.manifest["files"].items():
            if listed == name or listed.startswith(f"{name}/"):
                path = self.path / listed
                if not path.is_file():
                    raise BundleIncomplete(f"{path}: missing")
                if file_sha256(path) != expected:
                    raise BundleCorrupt(f"{path}: hash differs")
        return self.path / name


def learned_repeats(manifest: Mapping[str, Any]) -> bool:
    """Whether a bundle learned that users come back to items: requests then show seen items by default, and its stored lists hold them."""
    return bool(manifest.get("repeats", False))


def llm_pays(manifest: Mapping[str, Any], num_history: int) -> bool:
    """Whether the decoder ranked better than its student for histories of this many known items; where nothing was measured, it counts as better.

    `llm_pays` in the manifest lists ranges of lengths, [first, last], where last None is open.
    """
    ranges = manifest.get("llm_pays")
    if ranges is None:
        return True
    return any(first <= num_history and (last is None or num_history <= last) for first, last in ranges)


class BundleStore:
    """The folder of bundles and its pointer."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def publish(
        self, source: Path, version: str, about: dict[str, Any], pages: Mapping[str, str] | None = None
    ) -> Bundle:
        """Copy `source`, and these texts by file name, as `version` with a manifest of hashes. Does not promote. An existing version is kept."""
        target = self._root / version
        if not target.exists():
            scratch = self._scratch(version)
            shutil.rmtree(scratch, ignore_errors=True)  # of a killed publication: a container's ids come again
            try:
                shutil.copytree(source, scratch)
                for name, text in (pages or {}).items():
                    (scratch / name).write_text(text)
                manifest = {"version": version, **about, "files": hashes(scratch)}
                (scratch / "manifest.json").write_text(json.dumps(manifest, indent=1, sort_keys=True))
                rename_durably(scratch, target)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
        bundle = self.open(version)
        bundle.verify()
        return bundle

    def open(self, version: str) -> Bundle:
        """Open one version; its files are verified when they are needed. Raises BundleNotFound or BundleCorrupt."""
        path = self._root / version
        try:
            manifest = json.loads((path / "manifest.json").read_text())
        except (FileNotFoundError, NotADirectoryError) as error:
            raise BundleNotFound(f"no bundle {version} under {self._root}{self._nearest(version)}") from error
        except (ValueError, RecursionError) as error:
            raise BundleCorrupt(f"{path}/manifest.json: not JSON") from error
        listed = manifest.get("files") if isinstance(manifest, dict) else None
        if not isinstance(listed, dict):
            raise BundleCorrupt(f"{path}/manifest.json: lists no files")
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

    def previous_version(self) -> str | None:
        """Return the version that was live before the live one, or None."""
        return self._read("PREVIOUS")

    def reference(self) -> Reference | None:
        """Return the version that a person set, or else the oldest whole training that is not withdrawn; None before the first. Raises BundleCorrupt."""
        if recorded := read_reference(self._root):
            return recorded
        withdrawn = self.withdrawals()
        kept = (version for version in self.versions() if version not in withdrawn)
        first = next((version for version in kept if self._is_whole_training(version)), None)
        return Reference(version=first) if first else None

    def set_reference(self, version: str, by: str) -> None:
        """Make this version the reference, after verifying it, in the name of this person. Raises BundleWithdrawn, BundleNotFound, BundleCorrupt or BundleIncomplete."""
        self.open(version).verify()
        with self._locked():
            if left := self.withdrawals().get(version):
                raise BundleWithdrawn(f"{left.describe()}: it is no reference; name another of `tailrace bundles`")
            self._write_reference(Reference(version=version, by=by, at=_now()))

    def withdrawals(self) -> dict[str, Withdrawal]:
        """Return the withdrawn versions, oldest record first; their folders may be gone. Raises BundleCorrupt."""
        return read_withdrawals(self._root)

    def rolled_back(self) -> Withdrawal | None:
        """Return the record of the version that was live before the live one, if it was withdrawn. Raises BundleCorrupt."""
        return self.withdrawals().get(self.previous_version() or "")

    def refuse_withdrawn(self, version: str, folder: Path, about: Mapping[str, Any] = {}) -> None:
        """Raise BundleWithdrawn where this folder, as this version with this manifest, may not become live without force."""
        if (records := self.withdrawals()) and version != self.live_version():
            refuse(records, version, answers_with({**about, "files": hashes(folder)}))

    def promote(self, version: str, seen: str | Seen | None = Seen.NOW, *, force: bool = False) -> None:
        """Make this version live by one atomic move, after verifying it. `seen` is what was live when it was made; None: nothing was.

        `force` promotes a withdrawn version too, and removes its record.

        Raises BundleMoved if the pointer moved meanwhile, BundleWithdrawn, BundleNotFound, BundleCorrupt or BundleIncomplete.
        """
        self._move(self.live_version() if isinstance(seen, Seen) else seen, version, force=force)

    def rollback(self, to: str | None = None, *, by: str = "unknown", reason: str = "", force: bool = False) -> str:
        """Make `to`, or else the version before the live one, live again and return it; record the one left as withdrawn by this person.

        The version before is the previously live one, or, where that was withdrawn, the newest published before the live one that was not.
        Where the one left is the reference, the target becomes that too: nothing is measured against what was withdrawn.

        Raises BundleNotFound, BundleMoved, BundleCorrupt or BundleIncomplete; BundleWithdrawn without `force` if the target was withdrawn itself.
        """
        with self._locked():  # both pointers of one promotion
            previous, live = self.previous_version(), self.live_version()
            if to is None and not force and previous in self.withdrawals():
                previous = self._kept_before(live)
        target = previous if to is None else to
        if target is None or live is None or (to is None and previous == live):  # equal when a promotion was cut short
            raise BundleNotFound("no earlier version to go back to")
        if target == live:
            raise BundleNotFound(f"{live} is live already; name another version to go back to")
        left = Withdrawal(version=live, by=by, at=_now(), reason=reason, content=self._content(live))
        try:
            self._move(live, target, force=force, left=left)
        except BundleWithdrawn as error:
            raise BundleWithdrawn(f"{error}, and --to VERSION goes back to another one") from error
        return target

    def prune(self, keep: int) -> list[str]:
        """Remove all but the newest `keep` versions, the live one, the one before it, what both started from and the reference, and what killed processes left; return the removed versions."""
        with self._locked():  # nothing is promoted while it goes
            versions = self.versions()
            pointers = self.live_version(), self._read("PREVIOUS")
            may_serve = [version for version in versions if version in pointers]
            spared = {*versions[-keep:], *may_serve, *map(self._started_from, may_serve)}
            if reference := self.reference():
                spared.add(reference.version)
            removed = [version for version in versions if version not in spared]
            for version in removed:
                (self._root / version).rename(self._scratch(version))  # so that no reader opens a part of it
        for folder in (*map(self._scratch, removed), *self._leftovers()):
            shutil.rmtree(folder, ignore_errors=True)  # the next pruning removes what is left
        return removed

    def _kept_before(self, version: str | None) -> str | None:
        """Return the newest version that was published before this one and is not withdrawn."""
        versions, withdrawn = self.versions(), self.withdrawals()
        older = versions[: versions.index(version)] if version in versions else []
        return next((one for one in reversed(older) if one not in withdrawn), None)

    def _content(self, version: str) -> str:
        """Return what identifies the content of a version; nothing where it cannot be read, which must not hold up its withdrawal."""
        try:
            return content_of(answers_with(self.open(version).manifest))
        except BundleError:
            return ""

    def _nearest(self, name: str) -> str:
        """Return the end of a sentence on the versions whose names are nearest to this one; empty where there are none."""
        near = get_close_matches(name, self.versions(), cutoff=0.0)
        return f"; nearest to it are {', '.join(near)}" if near else ""

    def _started_from(self, version: str) -> str | None:
        try:
            return self.open(version).started_from
        except BundleError:
            return None

    def _is_whole_training(self, version: str) -> bool:
        try:
            return self.open(version).is_whole_training
        except BundleError:
            return False

    def _leftovers(self) -> list[Path]:
        """Return the scratch folders that killed publications and prunings left."""
        before_s = time.time() - _SCRATCH_KEPT_S
        folders = [path for path in self._root.glob(".*.*") if path.is_dir()]
        return [folder for folder in folders if folder.stat().st_mtime < before_s]

    def _move(self, expected: str | None, version: str, *, force: bool, left: Withdrawal | None = None) -> None:
        """Move the pointer from the expected version to this one, after verifying it; `left` is the record of a version that is withdrawn by that."""
        self.open(version).verify()
        with self._locked():
            if (live := self.live_version()) != expected:
                raise BundleMoved(expected, live)
            files = answers_with(self.open(version).manifest)  # it may have been pruned
            records = self.withdrawals()
            if not force and version != live:
                refuse(records, version, files)
            kept = without(records, version, files) if force else dict(records)
            if left is not None:
                kept[left.version] = left
                if (reference := self.reference()) and reference.version == left.version:
                    self._write_reference(Reference(version=version, by=left.by, at=left.at))
            if kept != records:
                write_withdrawals(self._root, self._scratch(FILE), kept)
            if live != version:
                if live is not None:
                    self._write("PREVIOUS", live)
                self._write("LIVE", version)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other processes from moving the pointer, also those of other hosts where the file system has locks (NFS 4)."""
        self._root.mkdir(parents=True, exist_ok=True)
        with (self._root / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _scratch(self, version: str) -> Path:
        return self._root / f".{version}.{os.getpid()}"

    def _read(self, pointer: str) -> str | None:
        try:
            return (self._root / pointer).read_text().strip() or None
        except FileNotFoundError:
            return None

    def _write_reference(self, reference: Reference) -> None:
        write_reference(self._root, self._scratch(REFERENCE), reference)

    def _write(self, pointer: str, version: str) -> None:
        scratch = self._scratch(pointer)
        scratch.write_text(version + "\n")
        rename_durably(scratch, self._root / pointer)


def _now() -> str:
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"


def answers_with(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return the hashes of a bundle's files by name and, beside them, how they are served: what tells it from a bundle that answers otherwise."""
    serving: Mapping[str, Any] = manifest.get("serving", {})
    files: dict[str, str] = manifest["files"]
    return files | {f"{SERVING}{name}": str(value) for name, value in serving.items()}


def hashes(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file below the folder except the manifest."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json")
    return {path.relative_to(folder).as_posix(): file_sha256(path) for path in files}
