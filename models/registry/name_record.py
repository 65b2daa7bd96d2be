"""The record of a model name: live and previous version, canary, history, withdrawn versions and reference.

Pure: no files, no clock. A name (`default`, `mail`) is one small JSON document in the store of bundles. Writers replace
the whole document by compare-and-swap, so all its fields change together or not at all. Each method here returns the
record after a move, or raises the reason that forbids the move.
"""

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from models.documents import Schema, Version, decode
from models.errors import BundleCorrupt, BundleMoved, BundleNotFound, BundleWithdrawn, CanaryError, InvalidRequest
from models.registry.canary import Canary
from models.registry.withdrawals import StoredWithdrawal, Withdrawal, refuse, without

DEFAULT_NAME = "default"
_NAME = re.compile(r"([a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?\.)?[a-z0-9][a-z0-9-]{0,62}")
"""A name, after its tenant and a dot if it belongs to one."""
_MAX_HISTORY = 100
_SAME_WEIGHTS = "same weights, more items"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceVersion:
    """The bundle that bounds gradual decay of trainings: its version, who set it, and when (UTC, ISO 8601).

    The live bundle changes every night, so small losses that each night's gate allows would add up; the reference stays
    until a person changes it. `by` and `at` are None for a default reference.
    """

    version: Version
    by: str | None = None
    at: str | None = None

    def describe(self) -> str:
        """Return a sentence that names the version and the reason."""
        why = f"set by {self.by} at {self.at}" if self.by else "the first whole training that is kept"
        return f"{self.version} is the reference, {why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One move of a name.

    `act` is promote, rollback, withdraw, release, share or end; `version` is the live version after the move, None for
    none. `at` is UTC, ISO 8601. `note` has the details: the candidate of a release, its traffic fraction, why it ended.
    """

    act: str
    version: Version | None
    by: str
    at: str
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromotionCandidate:
    """A version that a name may move to.

    Holds the hashes of the files that determine its answers, its ancestors, whether it shares the live version's
    weights, and whether it has models.
    """

    version: str
    files: Mapping[str, str]
    ancestors: frozenset[str] = frozenset()
    continues: bool = False
    is_trained: bool = True

    def refuse_withdrawn(self, records: Mapping[str, Withdrawal]) -> None:
        """Raise BundleWithdrawn if the version, an identical version, or one of its ancestors is withdrawn.

        Ancestors are ignored for a version with the live version's weights.
        """
        refuse(records, self.version, self.files, () if self.continues else self.ancestors)


@dataclass(frozen=True, slots=True, kw_only=True)
class NameRecord:
    """The state of a name. `history` has the newest moves, oldest first; `withdrawn` is by version, oldest first."""

    live: str | None = None
    previous: str | None = None
    owner: str | None = None
    reference: ReferenceVersion | None = None
    canary: Canary | None = None
    withdrawn: Mapping[str, Withdrawal] = field(default_factory=dict)
    history: tuple[Move, ...] = ()

    def in_release(self, canary: Canary | None) -> "NameRecord":
        """Return the record if this release is in progress in this same stage, or if `canary` is None.

        Raises CanaryError. A caller decides from the release it has read; meanwhile a person may have ended it, changed
        its stage or started another release.
        """
        if canary is not None and (self.canary is None or self.canary.identity != canary.identity):
            now = (
                "no release is" if self.canary is None else f"{self.canary.version} in stage {self.canary.stage + 1} is"
            )
            raise CanaryError(
                f"the release of {canary.version} in stage {canary.stage + 1} is no longer under way: {now} as of now"
            )
        return self

    def promote(
        self, candidate: "PromotionCandidate", *, seen: str | None, by: str, at: str, force: bool
    ) -> "NameRecord":
        """Return the record with this version live. `seen` is the live version that the caller has read.

        A version that only adds items to the live version keeps `previous`: a rollback goes to different weights.

        Promoting the canary ends its release. `force` ends any other release, also promotes a withdrawn version, and
        deletes its withdrawal.

        Raises BundleMoved, BundleWithdrawn, or CanaryError if another version has a release in progress.
        """
        if self.canary is not None and candidate.version not in (self.canary.version, self.live) and not force:
            raise CanaryError(
                f"a release of {self.canary.version} is under way, compared with {self.live}; end it with "
                "`tailrace release --stop`, or give --force"
            )
        return self._move(candidate, seen=seen, force=force, move=("promote", by, at))

    def roll_back(
        self, candidate: "PromotionCandidate", *, left: Sequence[Withdrawal], reference: str | None, force: bool
    ) -> "NameRecord":
        """Return the record with this earlier version live and the versions in `left` withdrawn, the live one first.

        A release in progress ends, since its analysis compares with the withdrawn version. If `reference`, the current
        reference, is among the withdrawn versions, a target with models becomes the reference.

        Raises BundleMoved or BundleWithdrawn.
        """
        live, by, at = left[0].version, left[0].by, left[0].at
        moved = self._move(candidate, seen=live, force=force, move=("rollback", by, at))
        withdrawn = {withdrawal.version: withdrawal for withdrawal in left if withdrawal.version not in self.withdrawn}
        instead = self.reference
        if reference in withdrawn:
            instead = ReferenceVersion(version=candidate.version, by=by, at=at) if candidate.is_trained else None
        return replace(moved, withdrawn={**moved.withdrawn, **withdrawn}, reference=instead)

    def withdraw(self, left: Sequence[Withdrawal]) -> "NameRecord":
        """Return the record with a version and its descendants withdrawn.

        Raises BundleNotFound if one of them is live; a rollback withdraws a live version.
        """
        first, withdrawn = left[0], {withdrawal.version: withdrawal for withdrawal in left}
        if self.live in withdrawn:
            what = "is live" if first.version == self.live else f"is what {self.live}, which is live, was made from"
            raise BundleNotFound(f"{first.version} {what}: `tailrace rollback` withdraws it and makes another live")
        reference = self.reference if self.reference is None or self.reference.version not in withdrawn else None
        note = ": ".join(filter(None, (first.version, first.reason)))
        return replace(
            self,
            withdrawn={**self.withdrawn, **withdrawn},
            reference=reference,
            canary=None if self.canary is not None and self.canary.version in withdrawn else self.canary,
            history=self._with(Move(act="withdraw", version=self.live, by=first.by, at=first.at, note=note)),
        )

    def reject_canary(self, left: Sequence[Withdrawal]) -> "NameRecord":
        """Return the record without the canary, the first in `left`, which is withdrawn with its descendants.

        If the live version is a descendant, the release only ends: a withdrawal would block the live version's
        successors. Raises CanaryError if it is not in progress.
        """
        if self.live not in {withdrawal.version for withdrawal in left}:
            return self.withdraw(left)
        first, kept = left[0], f"not withdrawn, since {self.live} was made from it"
        note = "; ".join(filter(None, (first.reason, kept)))
        return self.end_canary(first.version, by=first.by, at=first.at, note=note)

    def release(self, canary: Canary, candidate: "PromotionCandidate", *, seen: str | None) -> "NameRecord":
        """Return the record with this canary of the candidate. `seen` is the live version that the caller has read.

        Raises BundleMoved, BundleWithdrawn, or CanaryError if no version or this version is live, or another release is
        in progress.
        """
        if self.live is None:
            raise CanaryError("no version is live yet; `tailrace bundles promote` makes the first version live")
        if self.canary is not None:
            raise CanaryError(f"a release of {self.canary.version} is under way; end it with `tailrace release --stop`")
        if canary.version == self.live:
            raise CanaryError(f"{canary.version} is already live; name another version")
        if self.live != seen:
            raise BundleMoved(seen, self.live)
        candidate.refuse_withdrawn(self.withdrawn)
        note = f"{canary.version} at {canary.stages[canary.stage].share:.3g} of users"
        return replace(
            self,
            canary=canary,
            history=self._with(Move(act="release", version=self.live, by=canary.by, at=canary.at, note=note)),
        )

    def move_canary(self, version: str, stage: int, since_ms: int, now_ms: int, *, by: str, at: str) -> "NameRecord":
        """Return the record with this canary in another stage from `since_ms` on, as `Canary.moved` does.

        Raises CanaryError if it is not in progress, InvalidRequest for an unknown stage.
        """
        canary = self._canary_of(version).moved(stage, since_ms, now_ms)
        note = f"{version} at {canary.stages[stage].share:.3g} of users"
        move = Move(act="share", version=self.live, by=by, at=at, note=note)
        return replace(self, canary=canary, history=self._with(move))

    def pause_canary(self, version: str, *, by: str, at: str) -> "NameRecord":
        """Return the record with this canary's stages advanced only manually.

        Raises CanaryError if it is not in progress.
        """
        canary = replace(self._canary_of(version), by_hand=True)
        move = Move(act="share", version=self.live, by=by, at=at, note=f"{version} advances only by hand from now on")
        return replace(self, canary=canary, history=self._with(move))

    def take_back(self, version: str, before: "NameRecord", after: "NameRecord") -> "NameRecord":
        """Return the record without the promotion of a version that was pruned meanwhile; later moves are kept."""
        if self == after:
            return before
        if self.live != version:
            return self
        return replace(self, live=before.live, previous=before.previous)

    def report_canary(self, version: str, report: str, looked_ms: int) -> "NameRecord":
        """Return the record with this canary's analysis report. Raises CanaryError if it is not in progress."""
        return replace(self, canary=replace(self._canary_of(version), report=report, looked_ms=looked_ms))

    def end_canary(self, version: str, *, by: str, at: str, note: str) -> "NameRecord":
        """Return the record without this canary, which is not withdrawn.

        Raises CanaryError if it is not in progress.
        """
        self._canary_of(version)
        move = Move(act="end", version=self.live, by=by, at=at, note=": ".join(filter(None, (version, note))))
        return replace(self, canary=None, history=self._with(move))

    def _canary_of(self, version: str) -> Canary:
        if self.canary is None or self.canary.version != version:
            now = "none is" if self.canary is None else f"that of {self.canary.version} is"
            raise CanaryError(f"no release of {version} is under way; {now}")
        return self.canary

    def refer_to(self, reference: ReferenceVersion) -> "NameRecord":
        """Return the record with this reference. Raises BundleWithdrawn."""
        if left := self.withdrawn.get(reference.version):
            raise BundleWithdrawn(
                f"{left.describe()}: it cannot be the reference; name another version of `tailrace bundles`"
            )
        return replace(self, reference=reference)

    @property
    def spared(self) -> set[str]:
        """The versions that may serve next; pruning must keep them."""
        candidate = None if self.canary is None else self.canary.version
        return {version for version in (self.live, self.previous, candidate) if version is not None}

    @property
    def serving(self) -> tuple[str, ...]:
        """The serving versions: the live version, then the canary."""
        candidate = None if self.canary is None else self.canary.version
        return tuple(version for version in (self.live, candidate) if version is not None)

    def encode(self) -> bytes:
        """Return the document. A nonce gives documents with equal fields different hashes.

        Raises BundleCorrupt for a record that readers would reject.
        """
        withdrawn = {version: _without_version(withdrawal) for version, withdrawal in self.withdrawn.items()}
        fields = asdict(replace(self, withdrawn={})) | {"withdrawn": withdrawn, "nonce": uuid.uuid4().hex}
        content = json.dumps(fields, indent=1).encode() + b"\n"
        decode(content, _StoredRecord, "record")
        return content

    def _move(
        self, candidate: "PromotionCandidate", *, seen: str | None, force: bool, move: tuple[str, str, str]
    ) -> "NameRecord":
        if self.live != seen:
            raise BundleMoved(seen, self.live)
        (act, by, at), version = move, candidate.version
        if not force and version != self.live:
            candidate.refuse_withdrawn(self.withdrawn)
        withdrawn = without(self.withdrawn, version, candidate.files) if force else self.withdrawn
        if version == self.live:
            return replace(self, withdrawn=withdrawn)
        moved = Move(act=act, version=version, by=by, at=at, note=_SAME_WEIGHTS if candidate.continues else "")
        repeats = candidate.continues and self.history and self.history[-1].note == _SAME_WEIGHTS
        before = replace(self, history=self.history[:-1]) if repeats else self  # keep earlier trainings listed
        return replace(
            self,
            live=version,
            previous=self.previous if candidate.continues else self.live or self.previous,
            owner=self.owner or by,
            canary=None,
            withdrawn=withdrawn,
            history=before._with(moved),
        )

    def _with(self, move: Move) -> tuple[Move, ...]:
        return (*self.history, move)[-_MAX_HISTORY:]


class _StoredRecord(Schema):
    live: Version | None
    previous: Version | None
    owner: str | None
    reference: ReferenceVersion | None
    canary: Canary | None = None
    withdrawn: dict[Version, StoredWithdrawal]
    history: list[Move]


def decode_record(content: bytes, where: str) -> NameRecord:
    """Read a document that `encode` wrote; errors name it as `where`. Raises BundleCorrupt naming the wrong field."""
    try:
        stored, _ = decode(content, _StoredRecord, where)
        return NameRecord(
            live=stored.live,
            previous=stored.previous,
            owner=stored.owner,
            reference=stored.reference,
            canary=None if stored.canary is None else stored.canary.checked(),
            withdrawn={
                version: Withdrawal(version=version, **dict(withdrawal))
                for version, withdrawal in stored.withdrawn.items()
            },
            history=tuple(stored.history),
        )
    except InvalidRequest as error:
        raise BundleCorrupt(f"{where}: canary.{error}") from error
    except BundleCorrupt as error:
        raise BundleCorrupt(f"{error}; restore the record, or remove it and promote a version") from error


def is_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None


def check_name(name: str) -> str:
    """Return the name of a model. Raises InvalidRequest for an invalid name."""
    if not is_name(name):
        raise InvalidRequest(
            "name",
            f"{name!r} is not a name",
            "use at most 63 lower-case letters, digits and hyphens, after `TENANT.` for a tenant's name",
        )
    return name


def _without_version(withdrawal: Withdrawal) -> dict[str, str]:
    return {key: value for key, value in asdict(withdrawal).items() if key != "version"}
