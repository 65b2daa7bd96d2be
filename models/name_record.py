"""The record of a name: which version serves under it, which a share of users gets beside it, what served before, what was withdrawn, and the reference. Pure: no files, no clock.

A name (`default`, `mail`) is one small JSON document in the store of bundles. It is replaced whole, and only by a process that has seen its last
content, so that all its fields move together or not at all. Each method here returns the record after a move, or raises why it may not be made.
"""

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from models.canary import Canary, StoredCanary
from models.documents import Schema, Version, decode
from models.errors import BundleCorrupt, BundleMoved, BundleNotFound, BundleWithdrawn, CanaryError, InvalidRequest
from models.withdrawals import StoredWithdrawal, Withdrawal, refuse, without

DEFAULT_NAME = "default"
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_MAX_HISTORY = 100
_SAME_WEIGHTS = "same weights, more items"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The bundle below which trainings may not fall by steps: its version, who set it, and when (UTC, ISO 8601).

    The live bundle is another one each night, so a loss that each night's gate allows adds up; the reference stays until a person moves it. `by` and
    `at` are None where nobody set it.
    """

    version: str
    by: str | None = None
    at: str | None = None

    def describe(self) -> str:
        """Return a sentence on which version it is, and why."""
        why = f"set by {self.by} at {self.at}" if self.by else "the first whole training that is kept"
        return f"{self.version} is the reference, {why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One move of a name: `act` is promote, rollback, withdraw, release, share or end; `version` is the one that was live after it, None for none. `at` is UTC, ISO 8601.

    `note` says what else there is to it: the candidate of a release, its share, why it ended.
    """

    act: str
    version: str | None
    by: str
    at: str
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A version that a name may move to: what it answers with (hashes by name), the versions that it was made from, and whether it has the weights of the live one."""

    version: str
    files: Mapping[str, str]
    ancestors: frozenset[str] = frozenset()
    continues: bool = False

    def refuse_withdrawn(self, records: Mapping[str, Withdrawal]) -> None:
        """Raise BundleWithdrawn where it, an identical version, or one that it was made from is withdrawn. What continues the live version is judged by itself."""
        refuse(records, self.version, self.files, () if self.continues else self.ancestors)


@dataclass(frozen=True, slots=True, kw_only=True)
class NameRecord:
    """What serves under a name, and how that came about. `history` has the newest moves, oldest first; `withdrawn` is by version, oldest first."""

    live: str | None = None
    previous: str | None = None
    owner: str | None = None
    reference: Reference | None = None
    canary: Canary | None = None
    withdrawn: Mapping[str, Withdrawal] = field(default_factory=dict)
    history: tuple[Move, ...] = ()

    def in_release(self, canary: Canary | None) -> "NameRecord":
        """Return the record where this release is under way in this very stage, or none is asked for. Raises CanaryError.

        Whoever moves a release decides by what they saw of it, and a person may have ended it, moved it on or begun another since.
        """
        if canary is not None and (self.canary is None or self.canary.identity != canary.identity):
            now = (
                "no release is" if self.canary is None else f"{self.canary.version} in stage {self.canary.stage + 1} is"
            )
            raise CanaryError(
                f"the release of {canary.version} in stage {canary.stage + 1} is no longer under way: {now} as of now"
            )
        return self

    def promote(self, candidate: "Candidate", *, seen: str | None, by: str, at: str, force: bool) -> "NameRecord":
        """Return the record with this version live. `seen` is what its mover saw live.

        A version with the live one's weights, to which items were added, leaves `previous` as it is: a rollback goes to other weights.

        The canary itself may go live, which ends its release; `force` ends the release of any other, makes a withdrawn version live too, and removes its record.

        Raises BundleMoved, BundleWithdrawn, or CanaryError where another version has a release under way.
        """
        if self.canary is not None and candidate.version not in (self.canary.version, self.live) and not force:
            raise CanaryError(
                f"a release of {self.canary.version} is under way, and its verdict is against {self.live}: end it with `tailrace release --stop`, or give --force"
            )
        return self._move(candidate, seen=seen, force=force, move=("promote", by, at))

    def roll_back(
        self, candidate: "Candidate", *, left: Sequence[Withdrawal], reference: str | None, force: bool
    ) -> "NameRecord":
        """Return the record with this earlier version live, and withdrawn what `left` says: the live version, and others of its training.

        A release under way ends, since its verdict is against the version that is left. Where `reference`, the version that trainings are measured by, is among these, this version becomes that too: nothing is measured against what was withdrawn.
        Raises BundleMoved or BundleWithdrawn.
        """
        live, by, at = left[0].version, left[0].by, left[0].at
        moved = self._move(candidate, seen=live, force=force, move=("rollback", by, at))
        gone = {one.version: one for one in left if one.version not in self.withdrawn}
        instead = Reference(version=candidate.version, by=by, at=at) if reference in gone else self.reference
        return replace(moved, withdrawn={**moved.withdrawn, **gone}, reference=instead)

    def withdraw(self, left: Sequence[Withdrawal]) -> "NameRecord":
        """Return the record with a version withdrawn, and those that were made from it. Raises BundleNotFound where one of them is live, from which one rolls back."""
        first, gone = left[0], {one.version: one for one in left}
        if self.live in gone:
            what = "is live" if first.version == self.live else f"is what {self.live}, which is live, was made from"
            raise BundleNotFound(f"{first.version} {what}: `tailrace rollback` withdraws it and makes another live")
        reference = self.reference if self.reference is None or self.reference.version not in gone else None
        note = ": ".join(filter(None, (first.version, first.reason)))
        return replace(
            self,
            withdrawn={**self.withdrawn, **gone},
            reference=reference,
            canary=None if self.canary is not None and self.canary.version in gone else self.canary,
            history=self._with(Move(act="withdraw", version=self.live, by=first.by, at=first.at, note=note)),
        )

    def release(self, canary: Canary, candidate: "Candidate", *, seen: str | None) -> "NameRecord":
        """Return the record with this canary, which is of the candidate, beside the live version. `seen` is what its mover saw live.

        Raises BundleMoved, BundleWithdrawn, or CanaryError where nothing or this version is live, or another release is under way.
        """
        if self.live is None:
            raise CanaryError("nothing is live yet: `tailrace bundles promote` makes the first version live")
        if self.canary is not None:
            raise CanaryError(f"a release of {self.canary.version} is under way: end it with `tailrace release --stop`")
        if canary.version == self.live:
            raise CanaryError(f"{canary.version} is live already; name another version")
        if self.live != seen:
            raise BundleMoved(seen, self.live)
        candidate.refuse_withdrawn(self.withdrawn)
        note = f"{canary.version} at {canary.stages[canary.stage].share:.3g} of users"
        return replace(
            self,
            canary=canary,
            history=self._with(Move(act="release", version=self.live, by=canary.by, at=canary.at, note=note)),
        )

    def move_canary(self, version: str, stage: int, since_ms: int, *, by: str, at: str) -> "NameRecord":
        """Return the record with this canary in another stage from then on (Unix ms). Raises CanaryError where it is not under way, InvalidRequest for a stage that it has not."""
        canary = self._canary_of(version).moved(stage, since_ms)
        note = f"{version} at {canary.stages[stage].share:.3g} of users"
        move = Move(act="share", version=self.live, by=by, at=at, note=note)
        return replace(self, canary=canary, history=self._with(move))

    def pause_canary(self, version: str, *, by: str, at: str) -> "NameRecord":
        """Return the record with this canary's stages left by hand alone from now on. Raises CanaryError where it is not under way."""
        canary = replace(self._canary_of(version), by_hand=True)
        move = Move(act="share", version=self.live, by=by, at=at, note=f"{version} is moved on by hand from now on")
        return replace(self, canary=canary, history=self._with(move))

    def take_back(self, version: str, before: "NameRecord", after: "NameRecord") -> "NameRecord":
        """Return the record without a promotion of this version, which is gone; other moves that were made since stay."""
        if self == after:
            return before
        if self.live != version:
            return self
        return replace(self, live=before.live, previous=before.previous)

    def report_canary(self, version: str, report: str, looked_ms: int) -> "NameRecord":
        """Return the record with what was found of this canary. Raises CanaryError where it is not under way."""
        return replace(self, canary=replace(self._canary_of(version), report=report, looked_ms=looked_ms))

    def end_canary(self, version: str, *, by: str, at: str, note: str) -> "NameRecord":
        """Return the record without this canary, which is not withdrawn. Raises CanaryError where it is not under way."""
        self._canary_of(version)
        move = Move(act="end", version=self.live, by=by, at=at, note=": ".join(filter(None, (version, note))))
        return replace(self, canary=None, history=self._with(move))

    def _canary_of(self, version: str) -> Canary:
        if self.canary is None or self.canary.version != version:
            now = "none is" if self.canary is None else f"that of {self.canary.version} is"
            raise CanaryError(f"no release of {version} is under way; {now}")
        return self.canary

    def refer_to(self, reference: Reference) -> "NameRecord":
        """Return the record with this reference. Raises BundleWithdrawn."""
        if left := self.withdrawn.get(reference.version):
            raise BundleWithdrawn(f"{left.describe()}: it is no reference; name another of `tailrace bundles`")
        return replace(self, reference=reference)

    @property
    def spared(self) -> set[str]:
        """The versions that pruning must leave: those that may serve next."""
        candidate = None if self.canary is None else self.canary.version
        return {version for version in (self.live, self.previous, candidate) if version is not None}

    @property
    def serving(self) -> tuple[str, ...]:
        """The versions that answer now: the live one, and the canary after it."""
        candidate = None if self.canary is None else self.canary.version
        return tuple(version for version in (self.live, candidate) if version is not None)

    def encode(self) -> bytes:
        """Return the document. Each has a nonce, so that two of equal fields are still told apart by their hash."""
        withdrawn = {version: _without_version(one) for version, one in self.withdrawn.items()}
        fields = asdict(replace(self, withdrawn={})) | {"withdrawn": withdrawn, "nonce": uuid.uuid4().hex}
        return json.dumps(fields, indent=1).encode() + b"\n"

    def _move(
        self, candidate: "Candidate", *, seen: str | None, force: bool, move: tuple[str, str, str]
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
        before = replace(self, history=self.history[:-1]) if repeats else self  # or additions would push out trainings
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


class _StoredReference(Schema):
    version: Version
    by: str | None = None
    at: str | None = None


class _StoredMove(Schema):
    act: str
    version: Version | None
    by: str
    at: str
    note: str = ""


class _StoredRecord(Schema):
    live: Version | None
    previous: Version | None
    owner: str | None
    reference: _StoredReference | None
    canary: StoredCanary | None = None
    withdrawn: dict[Version, StoredWithdrawal]
    history: list[_StoredMove]


def decode_record(content: bytes, where: str) -> NameRecord:
    """Read what `encode` wrote. `where` names it in errors. Raises BundleCorrupt, which names the field that is wrong."""
    try:
        stored, _ = decode(content, _StoredRecord, where)
        return NameRecord(
            live=stored.live,
            previous=stored.previous,
            owner=stored.owner,
            reference=None if stored.reference is None else Reference(**dict(stored.reference)),
            canary=None if stored.canary is None else stored.canary.canary(),
            withdrawn={version: Withdrawal(version=version, **dict(one)) for version, one in stored.withdrawn.items()},
            history=tuple(Move(**dict(one)) for one in stored.history),
        )
    except InvalidRequest as error:
        raise BundleCorrupt(f"{where}: canary.{error}") from error
    except BundleCorrupt as error:
        raise BundleCorrupt(f"{error}; restore the record, or remove it and promote a version") from error


def is_name(text: str) -> bool:
    """Whether a model may have this name."""
    return _NAME.fullmatch(text) is not None


def check_name(name: str) -> str:
    """Return the name, or refuse one that is no name of a model. Raises InvalidRequest."""
    if not is_name(name):
        raise InvalidRequest("name", f"{name!r} is no name", "use lower-case letters, digits and hyphens, at most 63")
    return name


def _without_version(one: Withdrawal) -> dict[str, str]:
    return {key: value for key, value in asdict(one).items() if key != "version"}
