"""The store of bundles: immutable versions of everything that must match, and names, each a pointer to the version that serves under it. No torch.

    <version>/manifest.json          its description, and the SHA-256 of every other file
              decoder/               Hugging Face layout: config.json, safetensors in one file or several with an index
              student.onnx
              student_table/         the student's item rows and how they are searched, where the catalogue is large
              student.safetensors    the same weights
              similar/               each item's neighbours (models.similar)
              catalogue.parquet
              code_book.safetensors  where codes are deeper than 1: how new items get theirs
              teacher/               where codes are deeper than 1 and the decoder had a teacher
              item_text.safetensors  where the decoder's rows are learned from text: those of new items
              judged/                the pair that the gate judged, where another one serves, which learned from all events: decoder/, student.safetensors,
                                     catalogue.parquet, and teacher/ and item_text.safetensors as above. Later starts and comparisons take it alone
              report.json            the evaluation
              report.md              the same for readers, with what the bundle was made from
    names/<name>.json                models.name_record: live and previous version, history, withdrawn versions, reference, canary

A version appears whole or not at all. A name moves by compare-and-swap from the content that its mover saw, so of racing movers one wins and the others are
told so; whoever reads sees the old record or the new one. A file is hashed when it is first needed, so a process reads its own files alone;
promotion hashes all. Where all this is kept, a folder or an object store, is behind models.storage.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import structlog

from models.bundle import Bundle, answers_with, hashes, open_bundle
from models.canary import Canary, Stage, check_stages
from models.documents import is_version
from models.errors import BundleCorrupt, BundleError, BundleNotFound, BundleWithdrawn, InvalidRequest
from models.manifest import MANIFEST, decode_manifest
from models.name_record import DEFAULT_NAME, Candidate, NameRecord, Reference, check_name, decode_record
from models.storage.folder import FolderStorage
from models.storage.port import Storage
from models.trainings import Lineage, Trainings
from models.withdrawals import Withdrawal, content_of, refuse

log = structlog.get_logger()

_NOBODY = "unknown"


class Seen(Enum):
    """What a promotion moves the pointer from, where that is no version that its caller saw live."""

    NOW = "whichever version is live now"


class BundlePlaces(Protocol):
    """Where bundles are: in the object store at a URL, of which the folder then is the cache, or, where that is empty, in the folder."""

    @property
    def bundle_store(self) -> str:
        """The URL of the object store, or nothing."""
        ...

    @property
    def bundle_root(self) -> Path:
        """The folder."""
        ...

    @property
    def bundle_cache_gib(self) -> float:
        """The bound of the cache."""
        ...


class BundleStore:
    """The bundles of a storage, and one of its names."""

    def __init__(self, storage: Path | Storage, name: str = DEFAULT_NAME) -> None:
        """Open a storage, or the folder at a path. Raises InvalidRequest for what is no name."""
        self._storage: Storage = FolderStorage(storage) if isinstance(storage, Path) else storage
        self.name = check_name(name)

    @classmethod
    def of(cls, places: "BundlePlaces", name: str = DEFAULT_NAME) -> "BundleStore":
        """Open the store that the settings name. Raises ConfigError or InvalidRequest."""
        if not places.bundle_store:
            return cls(places.bundle_root, name)
        from models.storage.objects import ObjectStorage

        cache_bytes = int(places.bundle_cache_gib * 2**30)
        return cls(ObjectStorage(places.bundle_store, places.bundle_root, cache_bytes), name)

    @property
    def is_lost(self) -> bool:
        """Whether the storage did not answer when it was last asked, so that what this machine has is served."""
        return self._storage.is_lost

    def publish(
        self, source: Path, version: str, about: dict[str, Any], pages: Mapping[str, str] | None = None
    ) -> Bundle:
        """Copy `source`, and these texts by file name, as `version` with a manifest of hashes. Does not promote. An existing version is kept.

        Raises InvalidRequest for a version that cannot have this name, BundleCorrupt for a manifest that no process would read, StoreUnavailable or OSError.
        """
        if not is_version(version):
            raise InvalidRequest(
                "version", f"{version!r:.100} is not a name of a version", "use letters, digits, . _ -"
            )
        if version not in self.versions():
            scratch = self._storage.scratch(version)
            try:
                shutil.copytree(source, scratch)
                for name, text in (pages or {}).items():
                    (scratch / name).write_text(text)
                manifest = {"version": version, **about, "files": hashes(scratch)}
                text = json.dumps(manifest, indent=1, sort_keys=True)
                decode_manifest(text, version, f"manifest of {version}")
                (scratch / MANIFEST).write_text(text)
                self._storage.add(scratch, version)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
        bundle = self.open(version)
        bundle.verify()
        return bundle

    def open(self, version: str) -> Bundle:
        """Open one version; its files are verified when they are needed. Raises BundleNotFound, BundleCorrupt or StoreUnavailable."""
        try:
            return open_bundle(self._storage.folder_of(_checked(version)))
        except BundleNotFound as error:
            raise BundleNotFound(f"no bundle {version:.200} in {self._storage}{self._nearest(version)}") from error

    def described(self, version: str, *, with_report: bool = False) -> Bundle:
        """Open one version for its manifest, and for its report where asked for: nothing else is brought to this machine. Raises BundleNotFound, BundleCorrupt or StoreUnavailable."""
        return open_bundle(self._storage.manifest_folder_of(_checked(version), with_report))

    def versions(self) -> list[str]:
        """Return all published versions, oldest first."""
        return self._storage.versions()

    def names(self) -> list[str]:
        """Return the names under which a version was ever promoted, in order."""
        return self._storage.names()

    def named(self, name: str) -> "BundleStore":
        """Return the same bundles under another name. Raises InvalidRequest."""
        return BundleStore(self._storage, name)

    def record(self) -> NameRecord:
        """Return the record of this store's name; an empty one before the first promotion. One small read. Raises BundleCorrupt or StoreUnavailable."""
        return self._read()[0]

    def last_valid_record(self) -> NameRecord | None:
        """Return the record of this store's name that this machine read last and could decode; None where it keeps none."""
        content = self._storage.kept_record(self.name)
        try:
            return None if content is None else decode_record(content, f"the kept record of {self.name}")
        except BundleCorrupt:
            return None

    def live_version(self) -> str | None:
        """Return the version that serves under the name, or None before the first promotion. One small read."""
        return self.record().live

    def live(self) -> Bundle:
        """Open the live bundle. Raises BundleNotFound before the first promotion."""
        version = self.live_version()
        if version is None:
            raise BundleNotFound(f"nothing published as {self.name} in {self._storage}; run `tailrace pipeline`")
        return self.open(version)

    def previous_version(self) -> str | None:
        """Return the version that was live before the live one, or None."""
        return self.record().previous

    def reference(self) -> Reference | None:
        """Return the version that a person set, or else the oldest whole training that is not withdrawn; None before the first. Raises BundleCorrupt."""
        record = self.record()
        if record.reference is not None:
            return record.reference
        kept = (version for version in self.versions() if version not in record.withdrawn)
        first = next((version for version in kept if self._is_whole_training(version)), None)
        return Reference(version=first) if first else None

    def set_reference(self, version: str, by: str) -> None:
        """Make this version the reference, after verifying it, in the name of this person. Raises BundleWithdrawn, BundleNotFound, BundleCorrupt or BundleIncomplete."""
        self.open(version).verify()
        self._change(lambda record: record.refer_to(Reference(version=version, by=by, at=_now())))

    def withdrawals(self) -> Mapping[str, Withdrawal]:
        """Return the withdrawn versions, oldest record first; their folders may be gone. Raises BundleCorrupt."""
        return self.record().withdrawn

    def rolled_back(self) -> Withdrawal | None:
        """Return the record of the version that was live before the live one, if it was withdrawn. Raises BundleCorrupt."""
        record = self.record()
        return record.withdrawn.get(record.previous or "")

    def refuse_withdrawn(self, version: str, folder: Path, about: Mapping[str, Any] = {}) -> None:
        """Raise BundleWithdrawn where this folder, as this version with this manifest, may not become live without force."""
        record = self.record()
        if record.withdrawn and version != record.live:
            refuse(record.withdrawn, version, answers_with({**about, "files": hashes(folder)}))

    def promote(
        self,
        version: str,
        seen: str | Seen | None = Seen.NOW,
        *,
        by: str = _NOBODY,
        force: bool = False,
        release: Canary | None = None,
    ) -> None:
        """Make this version live by one atomic move, after verifying it. `seen` is what was live when it was made; None: nothing was.

        `force` promotes a withdrawn version too, and removes its record. `release` is the release, as its mover saw it, that ends with this move.

        Raises BundleMoved if the pointer moved meanwhile, CanaryError if the release did, BundleWithdrawn, BundleNotFound, BundleCorrupt or BundleIncomplete.
        """
        expected = self.live_version() if isinstance(seen, Seen) else seen
        candidate = self._candidate(version, expected)
        self._move_to(
            version,
            lambda record: record.in_release(release).promote(candidate, seen=expected, by=by, at=_now(), force=force),
        )

    def rollback(self, to: str | None = None, *, by: str = _NOBODY, reason: str = "", force: bool = False) -> str:
        """Make `to`, or else the last one that served with other weights, live again and return it; record what is left as withdrawn by this person.

        What is left is the live version with all that has its weights or was made from it; towards an earlier version with the same weights, only what came after.
        Without `to` the target is the version before, or, where that was withdrawn, the newest of the history, else of the store, that was not.
        Where the reference is among what is left, the target becomes that too: nothing is measured against what was withdrawn.

        Raises BundleNotFound, BundleMoved, BundleCorrupt or BundleIncomplete; BundleWithdrawn without `force` if the target was withdrawn itself.
        """
        seen, trainings = self.record(), self._trainings()
        target = to if to is not None else self._rollback_target(seen, trainings, force=force)
        if target is None or seen.live is None:
            raise BundleNotFound("no earlier version to go back to")
        if target == seen.live:
            raise BundleNotFound(f"{seen.live} is live already; name another version to go back to")
        candidate, reference = self._candidate(target, None), self.reference()
        gone = self._left_behind(seen.live, target, trainings)
        left, measured_by = self._withdrawals(gone, by, reason), None if reference is None else reference.version
        try:
            self._move_to(
                target, lambda record: record.roll_back(candidate, left=left, reference=measured_by, force=force)
            )
        except BundleWithdrawn as error:
            raise BundleWithdrawn(f"{error}, and --to VERSION goes back to another one") from error
        return target

    def withdraw(self, version: str, *, by: str = _NOBODY, reason: str = "", release: Canary | None = None) -> None:
        """Record a version that is not live, and all that were made from it, as withdrawn by this person, or by the analysis of this release.

        Raises BundleNotFound for an unknown version and where one of these is live, CanaryError where the release has moved since.
        """
        versions = self.versions()
        if version not in versions:
            self.open(version)
        left = self._withdrawals([version, *self._trainings().descendants(version, versions)], by, reason)
        self._change(lambda record: record.in_release(release).withdraw(left))

    def release(
        self,
        version: str,
        stages: Sequence[Stage],
        since_ms: int,
        *,
        by: str = _NOBODY,
        by_hand: bool = False,
        budgets: Mapping[str, float] = {},
    ) -> Canary:
        """Release this version to a share of the users beside the live one, from `since_ms` (Unix ms) on, after verifying it. See `models.canary`.

        Raises InvalidRequest for stages that `check_stages` refuses, CanaryError, BundleWithdrawn, BundleNotFound, BundleCorrupt or BundleIncomplete.
        """
        checked, live = check_stages(stages), self.live_version()
        candidate, at = self._candidate(version, live), _now()
        canary = Canary(
            version=version,
            salt=f"{self.name} {version} {at} {uuid4().hex[:8]}",
            stages=checked,
            by=by,
            at=at,
            since_ms=since_ms,
            by_hand=by_hand,
            budgets=budgets,
        )
        self._change(lambda record: record.release(canary, candidate, seen=live))
        return canary

    def move_canary(
        self, version: str, stage: int, since_ms: int, *, by: str = _NOBODY, release: Canary | None = None
    ) -> None:
        """Move this canary to another of its stages from `since_ms` (Unix ms) on. Raises CanaryError where it, or `release` as its mover saw it, is not under way, InvalidRequest for a stage that it has not."""
        self._change(lambda record: record.in_release(release).move_canary(version, stage, since_ms, by=by, at=_now()))

    def pause_canary(self, version: str, *, by: str = _NOBODY, release: Canary | None = None) -> None:
        """Leave this canary's stages to people from now on. Raises as `move_canary` does."""
        self._change(lambda record: record.in_release(release).pause_canary(version, by=by, at=_now()))

    def report_canary(self, version: str, report: str, looked_ms: int, release: Canary | None = None) -> None:
        """Record what was found of this canary. Raises as `move_canary` does."""
        self._change(lambda record: record.in_release(release).report_canary(version, report, looked_ms))

    def end_canary(self, version: str, *, by: str = _NOBODY, note: str = "", release: Canary | None = None) -> None:
        """End this canary's release without withdrawing it: all users get the live version. Raises as `move_canary` does."""
        self._change(lambda record: record.in_release(release).end_canary(version, by=by, at=_now(), note=note))

    def prune(self, keep: int) -> list[str]:
        """Remove all but the newest `keep` trainings (see `models.trainings`) and what a name may serve or is measured by, with what killed processes left; return the removed versions.

        The latter are, of each name, the live version, the one that a rollback goes to, what both started from or add items to, and the reference. What is to go is hidden, then the names are read
        again: a version that was promoted between the two looks comes back, and its promoter looks at it again. So does one that a killed process had hidden.
        One process prunes at a time, and none publishes meanwhile. Raises StoreUnavailable, or BundleCorrupt where a name's record cannot be read: nothing is removed then.
        """
        with self._storage.alone():
            versions = self.versions()
            kept = {*self._trainings().kept(versions, keep), *self._spared()}
            for version in versions:
                if version not in kept:
                    self._storage.hide(version)
            while (hidden := set(self._storage.hidden())) and (promoted := self._spared() & hidden):
                for version in promoted:
                    self._storage.show(version)
            self._storage.sweep()
        return [version for version in versions if version in hidden]

    def prune_after_publication(self, keep: int) -> None:
        """Prune, as the last step of a run that has published. A name's record that cannot be read is logged, and ends no run."""
        try:
            self.prune(keep)
        except BundleCorrupt as error:
            log.warning("nothing_pruned", why=str(error))

    def _spared(self) -> set[str]:
        spared, trainings = set[str](), self._trainings()
        for name in self.names():
            named = self.named(name)
            record = named.record()
            target = named._last_served(record, trainings)
            may_serve = record.spared | ({target} if target is not None else set())
            spared |= may_serve | {trainings.weights(one) for one in may_serve}
            spared |= {start for one in may_serve if (start := self._started_from(one)) is not None}
            if reference := named.reference():
                spared.add(reference.version)
        if not self.names() and (reference := self.reference()):
            spared.add(reference.version)
        return spared

    def _rollback_target(self, record: NameRecord, trainings: Trainings, *, force: bool) -> str | None:
        """Return the version that served last with other weights than the live one's; without one, the newest that was published before it, of other weights or else of its own."""
        if force and record.previous is not None:
            return record.previous
        versions = self.versions()
        before = versions[: versions.index(record.live)] if record.live in versions else []
        earlier = [one for one in reversed(before) if one not in record.withdrawn]
        return (
            self._last_served(record, trainings)
            or self._first_kept(earlier, record, trainings)
            or next(iter(earlier), None)
        )

    def _last_served(self, record: NameRecord, trainings: Trainings) -> str | None:
        served = [record.previous, *(move.version for move in reversed(record.history))]
        return self._first_kept([one for one in served if one is not None], record, trainings)

    def _first_kept(self, versions: Sequence[str], record: NameRecord, trainings: Trainings) -> str | None:
        """Return the first of these that is there, not withdrawn, and of other weights than the live version's."""
        live = None if record.live is None else trainings.weights(record.live)
        present = set(self.versions()) - record.withdrawn.keys()
        return next((one for one in versions if one in present and trainings.weights(one) != live), None)

    def _left_behind(self, live: str, target: str, trainings: Trainings) -> list[str]:
        """Return what a rollback from `live` to `target` withdraws, the live version first."""
        versions, first = self.versions(), trainings.weights(live)
        if trainings.weights(target) == first or first in trainings.ancestors(target):
            gone = trainings.descendants(live, versions)
        else:
            gone = [one for one in (first, *trainings.descendants(first, versions)) if one in versions]
        kept = {live, target, *trainings.ancestors(target)}
        return [live, *(one for one in gone if one not in kept)]

    def _withdrawals(self, versions: Sequence[str], by: str, reason: str) -> list[Withdrawal]:
        at = _now()
        return [Withdrawal(version=one, by=by, at=at, reason=reason, content=self._content(one)) for one in versions]

    def _trainings(self) -> Trainings:
        """Return how versions descend from each other, each read when it is asked for."""

        def read(version: str) -> Lineage | None:
            try:
                return self.described(version).lineage
            except (BundleCorrupt, BundleNotFound):
                return None

        return Trainings(read)

    def _candidate(self, version: str, live: str | None) -> Candidate:
        """Verify a version and return what a move to it must know, from this live version."""
        bundle, trainings = self.open(version), self._trainings()
        bundle.verify()
        return Candidate(
            version=version,
            files=answers_with(bundle.manifest),
            ancestors=frozenset(trainings.ancestors(version)),
            continues=live is not None and trainings.weights(version) == trainings.weights(live),
        )

    def _content(self, version: str) -> str:
        """Return what identifies the content of a version; nothing where it cannot be read, which must not hold up its withdrawal."""
        try:
            return content_of(answers_with(self.described(version).manifest))
        except BundleError:
            return ""

    def _nearest(self, name: str) -> str:
        """Return the end of a sentence on the versions whose names are nearest to this one; empty where there are none."""
        near = get_close_matches(name, self.versions(), cutoff=0.0)
        return f"; nearest to it are {', '.join(near)}" if near else ""

    def _started_from(self, version: str) -> str | None:
        try:
            return self.described(version).started_from
        except BundleError:
            return None

    def _is_whole_training(self, version: str) -> bool:
        try:
            return self.described(version).is_whole_training
        except BundleError:
            return False

    def _read(self) -> tuple[NameRecord, str | None]:
        content, mark = self._storage.read_record(self.name)
        if content is None:
            return NameRecord(), mark
        record = decode_record(content, f"names/{self.name}.json in {self._storage}")
        self._storage.keep_record(self.name, content)
        return record, mark

    def _change(self, change: Callable[[NameRecord], NameRecord]) -> tuple[NameRecord, NameRecord]:
        """Replace the record by what `change` makes of it, which is asked again where another process was faster; return the one before and the new one."""
        while True:
            before, mark = self._read()
            after = change(before)
            if after == before or self._storage.swap_record(self.name, mark, after.encode()):
                return before, after

    def _move_to(self, version: str, change: Callable[[NameRecord], NameRecord]) -> None:
        """Move the pointer to a version, and back where it was pruned meanwhile: pruning hides it first and looks at the pointers then. Raises BundleNotFound."""
        before, after = self._change(change)
        if version not in self.versions():
            self._change(lambda record: record.take_back(version, before, after))
            self.open(version)


def _checked(version: str) -> str:
    """Return the name of a version. Raises BundleNotFound for a name that no version can have."""
    if not is_version(version):
        raise BundleNotFound(f"{version!r:.200} is not a name of a version")
    return version


def _now() -> str:
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
