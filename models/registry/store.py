"""The store of bundles: immutable versions of all files that must match, and names that point to the live version.

No torch.
    <version>/manifest.json          description, and the SHA-256 of every other file
              decoder/               Hugging Face layout: config.json, safetensors in one file or several with an index
              student.onnx
              student_table/         the student's item rows and search index, for large catalogues
              student.safetensors    the same weights
              similar/               each item's neighbours (models.similar)
              wishes/                the reader of wishes (models.wishes.reader)
              catalogue.parquet
              code_book.safetensors  for codes deeper than 1: assigns codes to new items
              teacher/               for codes deeper than 1, if the decoder had a teacher
              item_text.safetensors  if the decoder's rows are learned from text: the rows of new items
              judged/                the pair that the gate evaluated, if the served pair was trained on all events:
              decoder/,
                                     student.safetensors, catalogue.parquet, and teacher/ and item_text.safetensors as
                                     above. Later warm starts and comparisons read only this folder
              report.json            the evaluation
              report.md              the same for readers, with the inputs of the bundle
    names/<name>.json                models.registry.name_record: live and previous version, history,
                                     withdrawn versions, reference, canary

A version appears whole or not at all. A name changes by compare-and-swap on the content that the writer has read, so of
concurrent writers one wins and the others get an error; readers see the old record or the new record. A file is hashed
on first access, so a process reads only the files it needs; promotion hashes all files. The package `storage` hides
where the data is kept: a folder or an object store.
"""

import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import structlog

from models.documents import is_version
from models.errors import BundleCorrupt, BundleError, BundleNotFound, BundleUntrained, BundleWithdrawn, InvalidRequest
from models.registry.bundle import Bundle, answers_with, hashes, open_bundle
from models.registry.canary import Canary, CanaryStage, check_stages
from models.registry.manifest import MANIFEST, decode_manifest
from models.registry.name_record import (
    DEFAULT_NAME,
    NameRecord,
    PromotionCandidate,
    ReferenceVersion,
    check_name,
    decode_record,
)
from models.registry.popular import popular_items
from models.registry.storage.folder import FolderStorage
from models.registry.storage.port import Storage
from models.registry.trainings import Lineage, Trainings
from models.registry.withdrawals import Withdrawal, content_of, refuse

log = structlog.get_logger()

_NOBODY = "unknown"


class Seen(Enum):
    """Default of `seen` for a promotion whose caller has not read the live version."""

    NOW = "the version that is live now"


class BundlePlaces(Protocol):
    """Location of bundles: the object store at a URL with the folder as cache, or the folder if the URL is empty."""

    @property
    def bundle_store(self) -> str:
        """URL of the object store, or empty."""
        ...

    @property
    def bundle_root(self) -> Path: ...

    @property
    def bundle_cache_gib(self) -> float: ...


class BundleStore:
    """The bundles of a storage, and one of its names."""

    def __init__(self, storage: Path | Storage, name: str = DEFAULT_NAME) -> None:
        """Open a storage, or the folder at a path. Raises InvalidRequest for an invalid name."""
        self._storage: Storage = FolderStorage(storage) if isinstance(storage, Path) else storage
        self.name = check_name(name)

    @classmethod
    def of(cls, places: "BundlePlaces", name: str = DEFAULT_NAME) -> "BundleStore":
        """Open the store that the settings name. Raises ConfigError or InvalidRequest."""
        if not places.bundle_store:
            return cls(places.bundle_root, name)
        from models.registry.storage.objects import ObjectStorage

        cache_bytes = int(places.bundle_cache_gib * 2**30)
        return cls(ObjectStorage(places.bundle_store, places.bundle_root, cache_bytes), name)

    @property
    def is_lost(self) -> bool:
        """Whether the storage did not answer the last request, so that the data of this machine is served."""
        return self._storage.is_lost

    def publish(
        self, source: Path, version: str, about: dict[str, Any], pages: Mapping[str, str] | None = None
    ) -> Bundle:
        """Copy `source`, and these texts by file name, as `version` with a manifest of hashes.

        Does not promote; an existing version is kept. Raises InvalidRequest for an invalid version name, BundleCorrupt
        for a manifest that readers would reject, StoreUnavailable or OSError.
        """
        if not is_version(version):
            raise InvalidRequest("version", f"{version!r:.100} is not a version name", "use letters, digits, . _ -")
        if version not in self.versions():
            scratch = self._storage.scratch(version)
            try:
                shutil.copytree(source, scratch)
                for name, text in (pages or {}).items():
                    (scratch / name).write_text(text)
                files = hashes(scratch)
                if (parent := about.get("adapter", {}).get("of")) is not None:
                    self._share(scratch, files, parent)
                manifest = {"version": version, **about, "popular": popular_items(scratch), "files": files}
                content = json.dumps(manifest, indent=1, sort_keys=True).encode()
                decode_manifest(content, version, f"manifest of {version}")
                (scratch / MANIFEST).write_bytes(content)
                self._storage.add(scratch, version)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
        bundle = self.open(version)
        bundle.verify()
        return bundle

    def _share(self, scratch: Path, files: Mapping[str, str], version: str) -> None:
        """Replace the files that a version also has by hard links to its own, where the file system permits."""
        parent = self.open(version)
        own = {digest: parent.path / name for name, digest in parent.manifest["files"].items()}
        for name, digest in files.items():
            if digest in own:
                with suppress(OSError):
                    os.link(own[digest], scratch / f"{name}.shared")
                    (scratch / f"{name}.shared").replace(scratch / name)

    def open(self, version: str) -> Bundle:
        """Open a version; its files are verified on first access.

        Raises BundleNotFound, BundleCorrupt or StoreUnavailable.
        """
        with self._naming_nearest(version):
            return open_bundle(*self._storage.folder_of(_checked(version)))

    def described(self, version: str, *, with_report: bool = False) -> Bundle:
        """Open a version for its manifest and, on request, its report; no other file is downloaded.

        Raises BundleNotFound, BundleCorrupt or StoreUnavailable.
        """
        with self._naming_nearest(version):
            return open_bundle(self._storage.manifest_folder_of(_checked(version), with_report))

    @contextmanager
    def _naming_nearest(self, version: str) -> Iterator[None]:
        try:
            yield
        except BundleNotFound as error:
            raise BundleNotFound(f"no bundle {version:.200} in {self._storage}{self._nearest(version)}") from error

    def versions(self) -> list[str]:
        """Return all published versions, oldest first."""
        return self._storage.versions()

    def names(self) -> list[str]:
        """Return the names that have had a promoted version, in order."""
        return self._storage.names()

    def named(self, name: str) -> "BundleStore":
        """Return the same bundles under another name. Raises InvalidRequest."""
        return BundleStore(self._storage, name)

    def record(self) -> NameRecord:
        """Return the record of this store's name; an empty record before the first promotion.

        One small read. Raises BundleCorrupt or StoreUnavailable.
        """
        return self.marked_record()[0]

    def marked_record(self) -> tuple[NameRecord, str | None]:
        """Return the record as `record` does, and its mark; None without a record, or while the store is unavailable.

        Records with equal marks are equal.
        """
        content, mark = self._storage.read_record(self.name)
        if content is None:
            return NameRecord(), mark
        record = decode_record(content, f"names/{self.name}.json in {self._storage}")
        self._storage.keep_record(self.name, content)
        return record, mark

    def marks(self, names: Collection[str]) -> Mapping[str, str]:
        """Return the marks of these names, except of a name without a readable record.

        Costs less than reading the records. Raises StoreUnavailable.
        """
        return self._storage.marks(names)

    def last_valid_record(self) -> NameRecord | None:
        """Return the last valid record of this store's name on this machine, or None."""
        content = self._storage.kept_record(self.name)
        try:
            return None if content is None else decode_record(content, f"the kept record of {self.name}")
        except BundleCorrupt:
            return None

    def live_version(self) -> str | None:
        """Return the live version of the name, or None before the first promotion. One small read."""
        return self.record().live

    def live(self) -> Bundle:
        """Open the live bundle. Raises BundleNotFound before the first promotion."""
        version = self.live_version()
        if version is None:
            raise BundleNotFound(f"nothing published as {self.name} in {self._storage}; run `tailrace pipeline`")
        return self.open(version)

    def previous_version(self) -> str | None:
        """Return the version that was live before the current live version, or None."""
        return self.record().previous

    def reference(self) -> ReferenceVersion | None:
        """Return the reference: the version that a person set, or else the oldest whole training that is not withdrawn.

        None before the first training. Raises BundleCorrupt.
        """
        record = self.record()
        if record.reference is not None:
            return record.reference
        kept = (version for version in self.versions() if version not in record.withdrawn)
        first = next((version for version in kept if self._is_whole_training(version)), None)
        return ReferenceVersion(version=first) if first else None

    def set_reference(self, version: str, by: str) -> None:
        """Make this version the reference, set by this person, after verifying it.

        Raises BundleWithdrawn, BundleNotFound, BundleUntrained, BundleCorrupt or BundleIncomplete.
        """
        bundle = self.open(version)
        bundle.verify()
        if not bundle.is_trained:
            raise BundleUntrained(version)
        self._change(lambda record: record.refer_to(ReferenceVersion(version=version, by=by, at=_now())))

    def withdrawals(self) -> Mapping[str, Withdrawal]:
        """Return the withdrawals, oldest first; the folders of the versions may be deleted. Raises BundleCorrupt."""
        return self.record().withdrawn

    def rolled_back(self) -> Withdrawal | None:
        """Return the withdrawal of the previous live version, if it was withdrawn. Raises BundleCorrupt."""
        record = self.record()
        return record.withdrawn.get(record.previous or "")

    def refuse_withdrawn(self, version: str, folder: Path, about: Mapping[str, Any] = {}) -> None:
        """Raise BundleWithdrawn if this folder, as this version with this manifest, needs force to be promoted."""
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
        """Promote this version by one atomic move, after verifying it.

        `seen` is the live version at the time the bundle was made; None if no version was live. `force` also promotes a
        withdrawn version and deletes its withdrawal. `release` is the release that ends with this promotion, as the
        caller has read it.

        Raises BundleMoved if the pointer changed meanwhile, CanaryError if the release did, BundleWithdrawn,
        BundleNotFound, BundleCorrupt or BundleIncomplete.
        """
        expected = self.live_version() if isinstance(seen, Seen) else seen
        candidate = self._candidate(version, expected)
        self._move_to(
            version,
            lambda record: record.in_release(release).promote(candidate, seen=expected, by=by, at=_now(), force=force),
        )

    def rollback(self, to: str | None = None, *, by: str = _NOBODY, reason: str = "", force: bool = False) -> str:
        """Make `to` live again, by default the last version with other weights, and withdraw newer versions.

        Returns the target. Withdrawn are the live version and all versions that have its weights or descend from it; if
        the target has the same weights, only the versions made after the target. Without `to` the target is the
        previous version, or, if that was withdrawn, the newest version of the history, else of the store, that was not.
        If the reference is withdrawn, a target with models becomes the reference.

        Raises BundleNotFound, BundleMoved, BundleCorrupt or BundleIncomplete; BundleWithdrawn without `force` if the
        target itself was withdrawn.
        """
        seen, trainings = self.record(), self._trainings()
        target = to if to is not None else self._rollback_target(seen, trainings, force=force)
        if seen.live is None:
            raise BundleNotFound(
                f"nothing is live as {self.name}; names with a version: {', '.join(self.names()) or 'none'}"
            )
        if target is None:
            raise BundleNotFound(
                "no earlier version to go back to; `tailrace bundles` lists all, --to VERSION names one"
            )
        if target == seen.live:
            raise BundleNotFound(f"{seen.live} is already live; name another version to go back to")
        candidate, reference = self._candidate(target, None), self.reference()
        affected = self._left_behind(seen.live, target, trainings)
        left, measured_by = self._withdrawals(affected, by, reason), None if reference is None else reference.version
        try:
            self._move_to(
                target, lambda record: record.roll_back(candidate, left=left, reference=measured_by, force=force)
            )
        except BundleWithdrawn as error:
            raise BundleWithdrawn(f"{error}; --to VERSION goes back to another version") from error
        return target

    def reject_canary(self, release: Canary, *, by: str, reason: str) -> None:
        """End this release, and withdraw its version and all descendants unless the live version is one of them.

        Also ends the release of a version that is missing or unreadable. Raises CanaryError if the release has changed
        since.
        """
        descendants = self._trainings().descendants(release.version, self.versions())
        left = self._withdrawals([release.version, *descendants], by, reason)
        self._change(lambda record: record.in_release(release).reject_canary(left))

    def withdraw(self, version: str, *, by: str = _NOBODY, reason: str = "", release: Canary | None = None) -> None:
        """Withdraw a non-live version and all its descendants, if `release` is still in progress.

        The release of an identical version ends, since its promotion would be refused.

        Raises BundleNotFound for an unknown version or if one of these is live, CanaryError if the release has changed
        since.
        """
        versions = self.versions()
        if version not in versions:
            self.open(version)
        left = self._withdrawals([version, *self._trainings().descendants(version, versions)], by, reason)
        contents = {withdrawal.content for withdrawal in left if withdrawal.content}

        def change(record: NameRecord) -> NameRecord:
            after = record.in_release(release).withdraw(left)
            if after.canary is None or self._content(after.canary.version) not in contents:
                return after
            note = f"identical to {version}, which was withdrawn"
            return after.end_canary(after.canary.version, by=by, at=left[0].at, note=note)

        self._change(change)

    def release(
        self,
        version: str,
        stages: Sequence[CanaryStage],
        since_ms: int,
        *,
        by: str = _NOBODY,
        by_hand: bool = False,
        budgets: Mapping[str, float] = {},
    ) -> Canary:
        """Release this version to a traffic fraction from `since_ms` (Unix ms), after verifying it.

        See `models.registry.canary`. Raises InvalidRequest for stages that `check_stages` rejects, CanaryError,
        BundleWithdrawn, BundleNotFound, BundleCorrupt or BundleIncomplete.
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
        self,
        version: str,
        stage: int,
        since_ms: int,
        now_ms: int,
        *,
        by: str = _NOBODY,
        release: Canary | None = None,
    ) -> None:
        """Move this canary to another of its stages from `since_ms` (Unix ms); the share of `now_ms` holds until then.

        Raises CanaryError if the canary, or `release` as the caller has read it, is not in progress; InvalidRequest for
        an unknown stage.
        """
        self._change(
            lambda record: record.in_release(release).move_canary(version, stage, since_ms, now_ms, by=by, at=_now())
        )

    def pause_canary(self, version: str, *, by: str = _NOBODY, release: Canary | None = None) -> None:
        """Advance this canary's stages only manually from now on. Raises as `move_canary` does."""
        self._change(lambda record: record.in_release(release).pause_canary(version, by=by, at=_now()))

    def report_canary(self, version: str, report: str, looked_ms: int, release: Canary | None = None) -> None:
        """Record the analysis report of this canary. Raises as `move_canary` does."""
        self._change(lambda record: record.in_release(release).report_canary(version, report, looked_ms))

    def end_canary(self, version: str, *, by: str = _NOBODY, note: str = "", release: Canary | None = None) -> None:
        """End this canary's release without withdrawing it: all users get the live version.

        Raises as `move_canary` does.
        """
        self._change(lambda record: record.in_release(release).end_canary(version, by=by, at=_now(), note=note))

    def prune(self, keep: int) -> list[str]:
        """Delete old versions, and leftovers of killed processes; return the deleted versions.

        Kept are the newest `keep` trainings (see `trainings`) and, for each name, the live version, the canary, the
        rollback target, the versions that these started from or add items to, and the reference. Versions are first
        hidden, then the names are read again: a version that was promoted meanwhile, or hidden by a killed process, is
        shown again if a name needs it, and its promoter checks for it again. Only one process prunes at a time, and no
        process publishes then. Raises StoreUnavailable, or BundleCorrupt if a name's record cannot be read; then
        all versions stay.
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
        """Prune as the last step of a run that has published.

        An unreadable name record is logged and does not fail the run.
        """
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
            spared |= may_serve | {trainings.weights(version) for version in may_serve}
            spared |= {start for version in may_serve if (start := self._started_from(version)) is not None}
            if reference := named.reference():
                spared.add(reference.version)
        if not self.names() and (reference := self.reference()):
            spared.add(reference.version)
        return spared

    def _rollback_target(self, record: NameRecord, trainings: Trainings, *, force: bool) -> str | None:
        """Return the default rollback target: the last served version with weights other than the live version's.

        If there is none, the newest version published before the live version, preferably with other weights.
        """
        if force and record.previous is not None:
            return record.previous
        versions = self.versions()
        before = versions[: versions.index(record.live)] if record.live in versions else []
        earlier = [version for version in reversed(before) if version not in record.withdrawn]
        return (
            self._last_served(record, trainings)
            or self._first_kept(earlier, record, trainings)
            or next(iter(earlier), None)
        )

    def _last_served(self, record: NameRecord, trainings: Trainings) -> str | None:
        served = [record.previous, *(move.version for move in reversed(record.history))]
        return self._first_kept([version for version in served if version is not None], record, trainings)

    def _first_kept(self, versions: Sequence[str], record: NameRecord, trainings: Trainings) -> str | None:
        """Return the first version that exists, is not withdrawn, and has weights other than the live version's."""
        live = None if record.live is None else trainings.weights(record.live)
        present = set(self.versions()) - record.withdrawn.keys()
        return next(
            (version for version in versions if version in present and trainings.weights(version) != live), None
        )

    def _left_behind(self, live: str, target: str, trainings: Trainings) -> list[str]:
        """Return the versions that a rollback from `live` to `target` withdraws, the live version first."""
        versions, first = self.versions(), trainings.weights(live)
        if trainings.weights(target) == first or first in trainings.ancestors(target):
            affected = trainings.descendants(live, versions)
        else:
            affected = [version for version in (first, *trainings.descendants(first, versions)) if version in versions]
        kept = {live, target, *trainings.ancestors(target)}
        return [live, *(version for version in affected if version not in kept)]

    def _withdrawals(self, versions: Sequence[str], by: str, reason: str) -> list[Withdrawal]:
        at = _now()
        return [
            Withdrawal(version=version, by=by, at=at, reason=reason, content=self._content(version))
            for version in versions
        ]

    def _trainings(self) -> Trainings:
        """Return the descent of versions; manifests are read lazily."""

        def read(version: str) -> Lineage | None:
            try:
                return self.described(version).lineage
            except (BundleCorrupt, BundleNotFound):
                return None

        return Trainings(read)

    def _candidate(self, version: str, live: str | None) -> PromotionCandidate:
        """Verify a version and return the facts that a move to it from this live version needs."""
        bundle, trainings = self.open(version), self._trainings()
        bundle.verify()
        return PromotionCandidate(
            version=version,
            files=answers_with(bundle.manifest),
            ancestors=frozenset(trainings.ancestors(version)),
            continues=live is not None and trainings.weights(version) == trainings.weights(live),
            is_trained=bundle.is_trained,
        )

    def _content(self, version: str) -> str:
        """Return the hash of a version's content; empty if unreadable, which must not block its withdrawal."""
        try:
            return content_of(answers_with(self.described(version).manifest))
        except BundleError:
            return ""

    def _nearest(self, name: str) -> str:
        """Return a sentence ending with the most similar version names; empty without versions."""
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

    def _change(self, change: Callable[[NameRecord], NameRecord]) -> tuple[NameRecord, NameRecord]:
        """Replace the record by `change(record)`, retried after a concurrent change; return the old and new record."""
        while True:
            before, mark = self.marked_record()
            after = change(before)
            if after == before or self._storage.swap_record(self.name, mark, after.encode()):
                return before, after

    def _move_to(self, version: str, change: Callable[[NameRecord], NameRecord]) -> None:
        """Move the pointer to a version, and revert if the version was pruned meanwhile. Raises BundleNotFound.

        Pruning hides a version first and reads the pointers afterwards, so one of the two notices a conflict.
        """
        before, after = self._change(change)
        if version not in self.versions():
            self._change(lambda record: record.take_back(version, before, after))
            self.open(version)


def _checked(version: str) -> str:
    """Return the name of a version. Raises BundleNotFound for an invalid name."""
    if not is_version(version):
        raise BundleNotFound(f"{version!r:.200} is not a version name")
    return version


def _now() -> str:
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
