"""A bundle: one published version of all files that must match, verified against its manifest. No torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from models.catalogue import Catalogue, load_catalogue, load_item_ids
from models.documents import MAX_BYTES, decode
from models.errors import BundleCorrupt, BundleIncomplete, BundleNotFound, BundleUntrained
from models.files import file_sha256
from models.mixer import SOURCES, Mixer, mixer_of
from models.registry.manifest import MANIFEST, ManifestReport, decode_manifest, parents_of
from models.registry.trainings import Lineage, made_from
from models.registry.withdrawals import SERVING
from models.similar import SIMILAR, SimilarTable, load_similar
from models.wishes.meaning import LoadEncoder
from models.wishes.mixing import WISHES
from models.wishes.reader import Reader

JUDGED = "judged"
"""Folder of the model pair that the quality gate evaluated, within a bundle."""
REPORT, CATALOGUE = "report.json", "catalogue.parquet"
_CATALOGUES: WeakValueDictionary[str, Catalogue] = WeakValueDictionary()
"""The catalogues in use, by the hash of their file."""
_ADAPTER = "decoder/adapter"


@dataclass(frozen=True, slots=True)
class Bundle:
    """One published version.

    Each file is verified on first access, which raises BundleCorrupt or BundleIncomplete. `hold` keeps the files on
    this machine while the bundle is referenced.
    """

    version: str
    path: Path
    manifest: dict[str, Any]
    hold: object = field(default=None, repr=False, compare=False)

    @property
    def is_trained(self) -> bool:
        """Whether the bundle has a decoder and a student; an items-only bundle has neither, as its manifest states."""
        return bool(self.manifest.get("trained", True))

    @property
    def decoder_dir(self) -> Path:
        """The decoder's checkpoint folder, verified. Raises BundleUntrained."""
        self._require_models()
        return self._verified("decoder")

    @property
    def student_path(self) -> Path:
        """The student's ONNX file, verified together with its item table, if any. Raises BundleUntrained."""
        self._require_models()
        self._verified("student_table")
        return self._verified("student.onnx")

    @property
    def student_weights_path(self) -> Path | None:
        """The student's weights, verified; None in a bundle without weights."""
        return self._verified("student.safetensors") if "student.safetensors" in self.manifest["files"] else None

    @property
    def judged_dir(self) -> Path:
        """Folder of the pair that the gate evaluated: the bundle's own folder if that pair serves. Not verified."""
        return self.path / JUDGED if f"{JUDGED}/catalogue.parquet" in self.manifest["files"] else self.path

    @property
    def lineage(self) -> Lineage:
        """The versions that this bundle was made from, by role."""
        lineage: Lineage = self.manifest.get("lineage", {})
        return lineage

    @property
    def started_from(self) -> str | None:
        """The version whose weights initialised the training; None for a training from scratch."""
        return parents_of(self.manifest).get("started_from")

    @property
    def is_whole_training(self) -> bool:
        """Whether the bundle was trained from scratch, without added items or optimisation since."""
        if self.is_imported:
            return False
        return self.is_trained and self.started_from is None and made_from(self.lineage) is None

    @property
    def is_imported(self) -> bool:
        """Whether the decoder was trained elsewhere."""
        return self.manifest.get("imported") is not None

    @property
    def prefix_version(self) -> str:
        """Key of cached prefixes: the decoder's file hashes and weight format.

        A bundle that adds items and keeps the decoder shares the cached prefixes of its parent.
        """
        decoder = self._files_in("decoder")
        return json.dumps([self.weight_kind, decoder], sort_keys=True) if decoder else self.version

    @property
    def base_prefix_version(self) -> str:
        """As `prefix_version`, of the decoder without its adapter: equal for a parent and its adapters."""
        base = {
            name: digest for name, digest in self._files_in("decoder").items() if name not in self._files_in(_ADAPTER)
        }
        return json.dumps([self.weight_kind, base], sort_keys=True) if base else self.version

    @property
    def adapter_version(self) -> str:
        """Key of the content of the decoder's adapter; empty without an adapter."""
        files = self._files_in(_ADAPTER)
        return json.dumps(files, sort_keys=True) if files else ""

    @property
    def adapter_dir(self) -> Path:
        """The folder of the decoder's adapter, verified."""
        return self._verified(_ADAPTER)

    @property
    def weight_kind(self) -> str:
        """Storage format of the decoder's weights in serving, as the engine's configuration names it.

        `model`, the checkpoint's dtype, unless an optimisation chose another format.
        """
        kind: str = self.manifest.get("serving", {}).get("weight_kind", "model")
        return kind

    def catalogue(self) -> Catalogue:
        path, digest = self._verified(CATALOGUE), self.manifest["files"].get(CATALOGUE, self.version)
        catalogue = _CATALOGUES.get(digest)
        if catalogue is None:
            catalogue = _CATALOGUES[digest] = load_catalogue(path)
        return catalogue

    def similar(self, num_items: int) -> SimilarTable:
        """Read the similar items for a catalogue of this size; empty in bundles from before similar items existed."""
        return load_similar(self._verified(SIMILAR), num_items)

    def mixer(self, catalogue: Catalogue) -> Mixer | None:
        """Read the mixer and the tables of its sources for this bundle's catalogue; None in a bundle without one.

        Raises BundleCorrupt, also for a source without a table.
        """
        tables = {}
        for name in self.manifest.get("mixer", {}).get("sources", ()):
            folder = SIMILAR if name == SIMILAR else f"{SOURCES}/{name}"
            if not any(listed.startswith(f"{folder}/") for listed in self.manifest["files"]):
                raise BundleCorrupt(f"{self.path}: mixer.sources.{name}: no table in {folder}/")
            tables[name] = load_similar(self._verified(folder), len(catalogue.item_ids))
        return mixer_of(self.manifest, tables, catalogue.popularity)

    def wish_reader(self, catalogue: Catalogue, load_encoder: LoadEncoder = lambda _: None) -> Reader:
        """Return the reader of wishes for this bundle's catalogue. Raises BundleCorrupt."""
        return Reader.load(self._verified(WISHES), catalogue, self.similar(len(catalogue.item_ids)), load_encoder)

    def item_ids(self) -> tuple[str, ...]:
        """Read only the item ids of the catalogue, in index order."""
        return load_item_ids(self._verified(CATALOGUE))

    def report(self) -> dict[str, Any]:
        """Read the evaluation report. Raises BundleCorrupt."""
        path = self._verified(REPORT)
        try:
            return decode(path.read_bytes(), ManifestReport, str(path))[1]
        except OSError as error:
            raise BundleIncomplete(f"{path}: missing; the version has no report") from error

    def verify(self) -> None:
        """Verify every file. Raises BundleCorrupt or BundleIncomplete."""
        for name in self.manifest["files"]:
            self._verified(name)

    def _require_models(self) -> None:
        if not self.is_trained:
            raise BundleUntrained(self.version)

    def _files_in(self, folder: str) -> dict[str, str]:
        """Return the hashes of a folder's files by name."""
        return {name: digest for name, digest in self.manifest["files"].items() if name.startswith(f"{folder}/")}

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
    """Whether training found that users return to items.

    Then requests show seen items by default, and stored lists contain them.
    """
    return bool(manifest.get("repeats", False))


def lists_version(manifest: Mapping[str, Any], version: str) -> str:
    """Return the version under which a bundle's stored lists are kept: its own, or that of the bundle it extends.

    The manifest's `lists` holds that version together with the version it was written for; in any other bundle's
    manifest it is ignored.
    """
    lists = manifest.get("lists", {})
    return str(lists["of"]) if lists.get("under") == version else version


def llm_pays(manifest: Mapping[str, Any], num_history: int) -> bool:
    """Whether the decoder ranked better than its student for histories of this length; true if not measured.

    `llm_pays` in the manifest lists ranges of lengths, [first, last]; the range is open if last is None.
    """
    ranges = manifest.get("llm_pays")
    if ranges is None:
        return True
    return any(first <= num_history and (last is None or num_history <= last) for first, last in ranges)


def open_bundle(folder: Path, hold: object = None) -> Bundle:
    """Open a version from its folder; files are verified on first access. Raises BundleNotFound or BundleCorrupt."""
    path = folder / MANIFEST
    try:
        if path.stat().st_size > MAX_BYTES:
            raise BundleCorrupt(f"{path}: exceeds the maximum of {MAX_BYTES:,} bytes")
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise BundleNotFound(f"no bundle {folder.name} under {folder.parent}") from error
    return Bundle(folder.name, folder, decode_manifest(content, folder.name, str(path)), hold)


def answers_with(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return the hashes of a bundle's files and its serving values, by name.

    Bundles with equal results give the same answers to requests.
    """
    serving: Mapping[str, Any] = manifest.get("serving", {})
    files: dict[str, str] = manifest["files"]
    return files | {f"{SERVING}{name}": str(value) for name, value in serving.items()}


def hashes(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file below the folder except the manifest."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json")
    return {path.relative_to(folder).as_posix(): file_sha256(path) for path in files}
