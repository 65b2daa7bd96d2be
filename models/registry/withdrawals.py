"""Withdrawn bundles: version, author, time and reason of each, and the versions that it blocks. Pure.

A withdrawn version, and a version with the same content under another name, needs force to be promoted. A withdrawal
outlives the folder of its bundle, since the same inputs can reproduce the bundle; a forced promotion deletes the
withdrawal.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from hashlib import sha256

from models.documents import Schema
from models.errors import BundleWithdrawn

SERVING = "serving/"
"""Prefix of a manifest's serving values among the file names: a decoder served in 4 bits differs from the same decoder
in 8 bits."""
_SERVING = ("decoder/", "student.onnx", "student_table/", "catalogue.parquet", SERVING)
"""The files that determine answers; reports and training inputs may differ between identical bundles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdrawal:
    """One withdrawn version.

    `at` is UTC, ISO 8601; `reason` may be empty; `content` identifies the content behind its answers.
    """

    version: str
    by: str
    at: str
    reason: str
    content: str

    def describe(self) -> str:
        """Return a sentence on who withdrew it, when and why."""
        return f"{self.version} was withdrawn by {self.by} at {self.at} ({self.reason or 'no reason given'})"


class StoredWithdrawal(Schema):
    """Schema of a withdrawal in a name's record, under its version."""

    by: str
    at: str
    reason: str
    content: str


def content_of(files: Mapping[str, str]) -> str:
    """Return the hash of the files (hashes by name) that determine answers; of all files if no file does."""
    serving = {name: digest for name, digest in files.items() if name.startswith(_SERVING)} or dict(files)
    return sha256(json.dumps(serving, sort_keys=True).encode()).hexdigest()


def refuse(
    records: Mapping[str, Withdrawal], version: str, files: Mapping[str, str], ancestors: Collection[str] = ()
) -> None:
    """Raise BundleWithdrawn if this version, an identical version, or one of its ancestors is withdrawn."""
    content = content_of(files)
    same = records.get(version) or next(
        (withdrawal for withdrawal in records.values() if withdrawal.content == content), None
    )
    parent = next((withdrawal for name, withdrawal in records.items() if name in ancestors), None)
    if (withdrawal := same or parent) is not None:
        twin = "" if withdrawal.version == version else f"{version} is identical to {withdrawal.version}: "
        twin = twin if same is not None else f"{version} was made from {withdrawal.version}: "
        raise BundleWithdrawn(f"{twin}{withdrawal.describe()}; --force promotes it anyway")


def without(records: Mapping[str, Withdrawal], version: str, files: Mapping[str, str]) -> dict[str, Withdrawal]:
    """Return the withdrawals that concern neither this version nor an identical version."""
    content = content_of(files)
    return {
        name: withdrawal for name, withdrawal in records.items() if name != version and withdrawal.content != content
    }
