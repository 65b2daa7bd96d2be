"""One published version of everything that must match, as a folder whose files are verified against its manifest. No torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.catalogue import Catalogue, load_catalogue, load_item_ids
from models.documents import MAX_BYTES, decode
from models.errors import BundleCorrupt, BundleIncomplete, BundleNotFound, BundleUntrained
from models.files import file_sha256
from models.manifest import MANIFEST, Report, decode_manifest, parents_of
from models.similar import SIMILAR, SimilarTable, load_similar
from models.trainings import Lineage, made_from
from models.withdrawals import SERVING

JUDGED = "judged"
"""The folder of the judged pair within a bundle."""
REPORT = "report.json"


@dataclass(frozen=True, slots=True)
class Bundle:
    """One published version. Each file is verified against the manifest when it is asked for: BundleCorrupt, BundleIncomplete."""

    version: str
    path: Path
    manifest: dict[str, Any]

    @property
    def is_trained(self) -> bool:
        """Whether it has a decoder and a student; one that was made of items alone has neither, and its manifest says so."""
        return bool(self.manifest.get("trained", True))

    @property
    def decoder_dir(self) -> Path:
        """The decoder's checkpoint folder, verified. Raises BundleUntrained."""
        self._require_models()
        return self._verified("decoder")

    @property
    def student_path(self) -> Path:
        """The student's ONNX file, verified with the table beside it, where it has one. Raises BundleUntrained."""
        self._require_models()
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
    def lineage(self) -> Lineage:
        """What it was made from, by name."""
        found: Lineage = self.manifest.get("lineage", {})
        return found

    @property
    def started_from(self) -> str | None:
        """The version from whose weights its training started; None where it started from the beginning."""
        return parents_of(self.manifest).get("started_from")

    @property
    def is_whole_training(self) -> bool:
        """Whether its training started from the beginning, and no items were added and nothing was optimised since."""
        return self.is_trained and self.started_from is None and made_from(self.lineage) is None

    @property
    def prefix_version(self) -> str:
        """What cached prefixes are named by: the decoder's files and how they are served. A bundle that adds items and keeps the decoder finds those of the one before it."""
        decoder = {name: digest for name, digest in self.manifest["files"].items() if name.startswith("decoder/")}
        return json.dumps([self.weight_kind, decoder], sort_keys=True) if decoder else self.version

    @property
    def weight_kind(self) -> str:
        """How the decoder's weights are stored where it serves, as the engine's configuration names it; `model`, its dtype, unless an optimisation chose another."""
        found: str = self.manifest.get("serving", {}).get("weight_kind", "model")
        return found

    def catalogue(self) -> Catalogue:
        """Read the catalogue."""
        return load_catalogue(self._verified("catalogue.parquet"))

    def similar(self, num_items: int) -> SimilarTable:
        """Read the similar items of each of this many items; none in bundles made before there were any."""
        return load_similar(self._verified(SIMILAR), num_items)

    def item_ids(self) -> tuple[str, ...]:
        """Read the ids of the catalogue's items alone, in index order."""
        return load_item_ids(self._verified("catalogue.parquet"))

    def report(self) -> dict[str, Any]:
        """Read the evaluation report. Raises BundleCorrupt."""
        path = self._verified(REPORT)
        try:
            return decode(path.read_bytes(), Report, str(path))[1]
        except OSError as error:
            raise BundleIncomplete(f"{path}: missing; the version has no report") from error

    def verify(self) -> None:
        """Verify every file. Raises BundleCorrupt or BundleIncomplete."""
        for name in self.manifest["files"]:
            self._verified(name)

    def _require_models(self) -> None:
        if not self.is_trained:
            raise BundleUntrained(self.version)

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


def lists_version(manifest: Mapping[str, Any], version: str) -> str:
    """Return the version under whose name a bundle's stored lists are: its own, or that of the bundle to which it only added items.

    `lists` in the manifest names that one, for the version to which it was written: a copy in another bundle's manifest says nothing.
    """
    lists = manifest.get("lists", {})
    return str(lists["of"]) if lists.get("under") == version else version


def llm_pays(manifest: Mapping[str, Any], num_history: int) -> bool:
    """Whether the decoder ranked better than its student for histories of this many known items; where nothing was measured, it counts as better.

    `llm_pays` in the manifest lists ranges of lengths, [first, last], where last None is open.
    """
    ranges = manifest.get("llm_pays")
    if ranges is None:
        return True
    return any(first <= num_history and (last is None or num_history <= last) for first, last in ranges)


def open_bundle(folder: Path) -> Bundle:
    """Open the version in a folder of its name; its files are verified when they are needed. Raises BundleNotFound or BundleCorrupt."""
    path = folder / MANIFEST
    try:
        if path.stat().st_size > MAX_BYTES:
            raise BundleCorrupt(f"{path}: exceeds the maximum of {MAX_BYTES:,} bytes")
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise BundleNotFound(f"no bundle {folder.name} under {folder.parent}") from error
    return Bundle(folder.name, folder, decode_manifest(content, folder.name, str(path)))


def answers_with(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return the hashes of a bundle's files by name and, beside them, how they are served: what tells it from a bundle that answers otherwise."""
    serving: Mapping[str, Any] = manifest.get("serving", {})
    files: dict[str, str] = manifest["files"]
    return files | {f"{SERVING}{name}": str(value) for name, value in serving.items()}


def hashes(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file below the folder except the manifest."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json")
    return {path.relative_to(folder).as_posix(): file_sha256(path) for path in files}
